"""The addresses, node resources and tokens of a sweep's cluster. No Ray is started."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from fedsweep.common.errors import UserError
from fedsweep.common.process_usage import COUNT, SIZE
from fedsweep.sweep.cluster import cluster
from fedsweep.sweep.cluster import ray_session as joining
from fedsweep.sweep.cluster.cluster import (
    HERE,
    Cluster,
    Node,
    check_device,
    check_resources,
    concurrency,
    decided,
    most_on_a_gpu,
    processor,
)
from fedsweep.sweep.cluster.ray_session import (
    check_address,
    not_followed,
    opened,
    prepare_environment,
)
from fedsweep.sweep.space.settings import Resources
from tests.tracking.helpers import MANIFEST

HEAD = Node("a", "head", 0, 0)
CPUS = Node("b", "cpus", 16, 0)
GPUS = Node("c", "gpus", 4, 2)


@pytest.mark.parametrize(
    ("nodes", "cpus", "gpus", "side_by_side"),
    [
        ((HEAD, CPUS), 1, 0, 16),
        ((HEAD, CPUS), 3, 0, 5),
        ((CPUS, CPUS), 10, 0, 2),  # the sum of the cores would allow 3
        ((CPUS, GPUS), 1, 0.5, 4),
        ((CPUS, GPUS), 2, 0.25, 2),
        ((CPUS, GPUS), 1, 0.3, 4),  # a trial does not span two GPUs
        ((GPUS, GPUS), 1, 2, 2),
        ((CPUS, GPUS), 1, "auto", 4),  # the number of cores is the limit
    ],
)
def test_the_number_of_parallel_trials_is_limited_by_each_node(nodes, cpus, gpus, side_by_side):
    resources = Resources(cpus_per_trial=cpus, gpus_per_trial=gpus)
    there = Cluster("10.0.0.1:6379", nodes)
    check_resources(resources, there)
    assert concurrency(resources, there) == side_by_side


@pytest.mark.parametrize(
    ("nodes", "cpus", "gpus", "sentence"),
    [
        (
            (CPUS, CPUS),
            17,
            0,
            "`cpus_per_trial` is 17, but no node of the cluster 10.0.0.1:6379 has more than 16 cores, "
            "and a trial must fit on one node.",
        ),
        (
            (CPUS, GPUS),
            1,
            3,
            "`gpus_per_trial` is 3, but no node of the cluster 10.0.0.1:6379 has more than 2 GPUs, "
            "and a trial must fit on one node.",
        ),
        (
            (CPUS, GPUS),
            8,
            1,
            "`cpus_per_trial` is 8 and `gpus_per_trial` 1, but no node of the cluster 10.0.0.1:6379 has both, "
            "and a trial must fit on one node.",
        ),
        (
            (CPUS, HEAD),
            1,
            "auto",
            "`gpus_per_trial` is auto, but no node of the cluster 10.0.0.1:6379 has more than 0 GPUs, "
            "and a trial must fit on one node.",
        ),
        ((GPUS,), 1, 1.5, "`gpus_per_trial` must be a fraction of one GPU or a whole number, but it is 1.5."),
    ],
)
def test_requests_that_no_single_node_can_meet_are_rejected(nodes, cpus, gpus, sentence):
    with pytest.raises(UserError) as refused:
        check_resources(Resources(cpus_per_trial=cpus, gpus_per_trial=gpus), Cluster("10.0.0.1:6379", nodes))
    assert str(refused.value) == sentence


def test_gpus_of_a_cluster_are_not_those_of_the_driver(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    with pytest.raises(UserError, match="no node of the cluster"):
        check_resources(Resources(gpus_per_trial=1), Cluster("10.0.0.1:6379", (CPUS,)))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    check_resources(Resources(gpus_per_trial=2), Cluster("10.0.0.1:6379", (GPUS,)))


@pytest.mark.parametrize(
    ("nodes", "at_once", "most"),
    [((CPUS, GPUS), None, 2), ((replace(GPUS, cpus=9), CPUS), None, 5), ((HEAD,), 6, 6), ((GPUS,), 2, 1)],
)
def test_enough_trials_share_a_gpu_of_a_cluster_to_keep_all_cores_busy(nodes, at_once, most):
    assert most_on_a_gpu(Resources(gpus_per_trial="auto"), Cluster("10.0.0.1:6379", nodes, at_once)) == most


def test_logical_gpus_are_rejected_on_a_cluster(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(COUNT, "2")
    monkeypatch.setenv(SIZE, "1")
    there = Cluster("10.0.0.1:6379", (GPUS,))
    with pytest.raises(UserError, match="simulates GPUs on this machine only"):
        check_resources(Resources(gpus_per_trial="auto"), there)
    check_resources(Resources(), there)


SOME = Cluster("10.0.0.1:6379", (HEAD, CPUS, GPUS))
NONE = Cluster("10.0.0.1:6379", (HEAD, CPUS))


@pytest.mark.parametrize(
    ("here", "count", "logical", "gpus"),
    [
        (HERE, 0, None, 0.0),
        (HERE, 2, None, "auto"),
        (HERE, 0, "1", "auto"),
        (SOME, 0, None, "auto"),
        (NONE, 2, None, 0.0),
    ],
)
def test_a_sweep_without_a_request_uses_the_gpus_that_its_machines_have(monkeypatch, here, count, logical, gpus):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    simulated(monkeypatch, logical)
    found = decided(Resources(), here)
    assert (found.gpus_per_trial, found.cpus_per_trial) == (gpus, 1)
    check_resources(found, here)
    for asked in (0.0, 0.5, "auto"):
        assert decided(Resources(gpus_per_trial=asked), here).gpus_per_trial == asked


@pytest.mark.parametrize(("count", "logical"), [(0, None), (2, None), (0, "1")])
@pytest.mark.parametrize("device", [None, "cpu", "cuda"])
def test_a_resumed_sweep_without_a_request_keeps_its_device(monkeypatch, count, logical, device):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    simulated(monkeypatch, logical)
    found = decided(Resources(), HERE, manifest(device=device))
    expected = {None: 0.0, "cpu": "auto" if logical else 0.0, "cuda": "auto"}
    assert found.gpus_per_trial == expected[device]
    assert device is None or logical or found.device == device


RULE = "all trials of a sweep must run on the same device, so"
NEEDS = f"{RULE} resume it on a machine with a GPU, or start a new sweep."
CPU, GPU = "sweep s of space was started on the CPU, but", "sweep s of space was started on a GPU, but"


@pytest.mark.parametrize(
    ("started", "asked", "here", "count", "sentence"),
    [
        (
            "cpu",
            "auto",
            HERE,
            2,
            f"{CPU} `gpus_per_trial` is auto; {RULE} use `--gpus-per-trial 0`, or start a new sweep.",
        ),
        ("cpu", 0.5, SOME, 0, f"{CPU} `gpus_per_trial` is 0.5; {RULE} use `--gpus-per-trial 0`, or start a new sweep."),
        (
            "cuda",
            0.0,
            HERE,
            2,
            f"{GPU} `gpus_per_trial` is 0; {RULE} use `--gpus-per-trial auto`, or start a new sweep.",
        ),
        (
            "cuda",
            "auto",
            HERE,
            0,
            f"{GPU} this machine has no GPU; {NEEDS}",
        ),
        (
            "cuda",
            0.0,
            HERE,
            0,
            f"{GPU} this machine has no GPU; {NEEDS}",
        ),
        (
            "cuda",
            "auto",
            NONE,
            2,
            f"{GPU} the cluster 10.0.0.1:6379 has no GPU; {NEEDS}",
        ),
    ],
)
def test_a_sweep_is_not_resumed_on_another_device(monkeypatch, started, asked, here, count, sentence):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    with pytest.raises(UserError) as refused:
        check_device(Resources(gpus_per_trial=asked), here, manifest(id="s", name="space", device=started))
    assert str(refused.value) == sentence
    check_device(Resources(gpus_per_trial=asked), here, manifest(device=None))  # of an older version


def test_a_sweep_is_resumed_on_the_same_device(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    check_device(Resources(gpus_per_trial=0), HERE, manifest(device="cpu"))
    for gpus in (0.25, 1, "auto"):  # the share does not affect the results
        check_device(Resources(gpus_per_trial=gpus), HERE, manifest(device="cuda"))
        check_device(Resources(gpus_per_trial=gpus), SOME, manifest(device="cuda"))
        check_device(Resources(gpus_per_trial=gpus), replace(NONE, at_once=4), manifest(device="cuda"))
    simulated(monkeypatch, "1")
    check_device(Resources(gpus_per_trial="auto"), HERE, manifest(device="cpu"))
    with pytest.raises(UserError, match="this machine has no GPU"):
        check_device(Resources(gpus_per_trial="auto"), HERE, manifest(device="cuda"))


def test_a_driver_without_a_gpu_does_not_know_the_gpus_of_its_cluster(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert processor(Resources(gpus_per_trial="auto")) == ""


def manifest(**changes):
    return MANIFEST.model_copy(update=changes)


def simulated(monkeypatch, logical):
    if logical:
        monkeypatch.setenv(COUNT, logical)
        monkeypatch.setenv(SIZE, "1")


def test_a_cluster_that_adds_nodes_gets_the_requested_number_of_trials():
    resources = Resources(cpus_per_trial=8, gpus_per_trial=1)
    check_resources(resources, Cluster("10.0.0.1:6379", (HEAD,), at_once=5))
    assert concurrency(resources, Cluster("10.0.0.1:6379", (HEAD, GPUS), at_once=5)) == 5


@pytest.mark.parametrize(("at_once", "side_by_side"), [(None, 8), (1, 1), (20, 8)])
def test_fewer_parallel_trials_than_fit_on_this_machine_can_be_requested(monkeypatch, at_once, side_by_side):
    monkeypatch.setattr(cluster, "available_cpus", lambda: 8)
    assert concurrency(Resources(cpus_per_trial=1), Cluster(at_once=at_once)) == side_by_side


@pytest.mark.parametrize("address", ["local", "auto", "10.0.0.1:6379", "head.example.org:6379", "[::1]:6379"])
def test_valid_addresses_are_accepted(address: str):
    check_address(address)


@pytest.mark.parametrize("address", ["", "Local", "head", "10.0.0.1", "http://head:8265", "head:port", "head:6379/x"])
def test_invalid_addresses_are_rejected(address: str):
    with pytest.raises(UserError, match="must be local, auto, or HOST:PORT of a Ray cluster's head, but"):
        check_address(address)


def test_ray_clients_address_is_rejected_with_the_command_to_use_instead():
    with pytest.raises(
        UserError, match=r"^`--address` ray://head:10001 is an address of Ray Client, .* `ray job submit -- fedsweep"
    ):
        check_address("ray://head:10001")


def test_an_address_without_a_cluster_is_reported_at_once(clean: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address, variable in ((f"127.0.0.1:{port}", None), ("auto", f"127.0.0.1:{port}")):
        if variable:
            os.environ["RAY_ADDRESS"] = variable
        with pytest.raises(UserError, match=rf"^no Ray cluster can be reached at 127.0.0.1:{port}: "):
            opened(address).__enter__()
    os.environ["RAY_ADDRESS"] = "ray://head:10001"
    with pytest.raises(UserError, match="is an address of Ray Client, which fedsweep does not support"):
        opened("auto").__enter__()


def test_a_rejection_that_ray_writes_to_stderr_is_understood_and_not_shown(clean, monkeypatch, capfd):
    def init(*_: object, **__: object) -> None:
        os.write(2, b"gcs_client.cc:205: Unauthenticated: RPC error: InvalidAuthToken")
        raise ConnectionError

    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = opened(f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(UserError, match="requires a token, but the given token is wrong; set RAY_"), there:
            pass
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


def test_a_note_is_shown_if_ray_address_is_ignored(clean: Path):
    assert not_followed("local") == ""
    os.environ["RAY_ADDRESS"] = "10.0.0.1:6379"
    assert "use the cluster in RAY_ADDRESS (10.0.0.1:6379), add `--address auto`" in not_followed("local")
    assert not_followed("auto") == ""


def test_a_new_ray_listens_only_on_this_machine_and_writes_its_token_to_no_file(clean: Path):
    prepare_environment()
    first = os.environ["RAY_AUTH_TOKEN"]
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert len(first) == 64
    assert list(clean.iterdir()) == []
    del os.environ["RAY_AUTH_TOKEN"]
    prepare_environment()
    assert os.environ["RAY_AUTH_TOKEN"] != first


def test_a_users_token_is_used_and_authentication_can_be_off(clean: Path):
    os.environ["RAY_AUTH_TOKEN_PATH"] = "mine"  # noqa: S105
    prepare_environment()
    assert "RAY_AUTH_TOKEN" not in os.environ
    os.environ["RAY_AUTH_MODE"] = "disabled"
    prepare_environment()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_an_existing_token_is_used_for_a_cluster_and_none_is_created(clean: Path):
    there = Cluster("10.0.0.1:6379")
    prepare_environment(there)
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"} & os.environ.keys()
    (clean / ".ray").mkdir()
    (clean / ".ray" / "auth_token").write_text("secret")
    prepare_environment(there)
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_dead_nodes_are_left_out_and_nodes_of_the_same_name_get_their_id():
    found = [
        {"Alive": True, "NodeID": "1" * 40, "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 4.0}},
        {"Alive": True, "NodeID": "2" * 40, "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 4.0, "GPU": 1.0}},
        {"Alive": False, "NodeID": "3" * 40, "NodeManagerAddress": "10.0.0.3", "Resources": {}},
        {"Alive": True, "NodeID": "4" * 40, "NodeManagerAddress": "10.0.0.4", "NodeName": "head", "Resources": {}},
    ]
    nodes = joining._alive(found)
    assert [node.name for node in nodes] == ["10.0.0.2 (11111111)", "10.0.0.2 (22222222)", "head"]
    assert [(node.cpus, node.gpus) for node in nodes] == [(4, 0), (4, 1), (0, 0)]
