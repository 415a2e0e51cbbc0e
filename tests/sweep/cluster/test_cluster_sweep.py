"""Whole sweeps on a Ray cluster of several nodes, which give the same numbers as one machine."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import fedsweep as fedsweep_package
from fedsweep.preparation.source_files import SOURCES
from fedsweep.sweep.cluster.temporary_folders import longest_parent
from tests.sweep.clusters import alive, authenticated, busy_node, ray_cluster
from tests.sweep.helpers import (
    GRID,
    SMALL,
    assert_mlflow_equals_store,
    histories,
    launch,
    newest,
    play_alone,
    start,
    table,
    wait_for_rounds,
    write_space,
)

pytestmark = pytest.mark.slow
LONGER = {**GRID, "fixed": {**SMALL, "federation.rounds": 10}}
PREPARED = {  # enough rounds that a node which joins after the first round still gets work
    **GRID,
    "experiment": "fedra_pacs",
    "fixed": {**SMALL, "federation.rounds": 16, "data.domains": ["photo", "sketch"]},
    "seeds": [0],
}


@pytest.fixture(scope="module")
def on_one_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a sweep of the small grid without a cluster, and return its working directory."""
    folder = tmp_path_factory.mktemp("one_machine")
    write_space(folder, "tiny", LONGER)
    play_alone(folder, "tiny")
    return folder


def test_a_lost_node_changes_no_number_and_a_wrong_token_is_rejected(on_one_machine: Path, tmp_path: Path) -> None:
    write_space(tmp_path, "tiny", LONGER)
    with authenticated("token", tmp_path) as token, ray_cluster(3) as cluster:
        tune = ("tune", "tiny", "--address", cluster.address)
        other = tmp_path / "other_token"
        other.write_text("0" * 64)
        for changed, said in (
            ({"RAY_AUTH_TOKEN_PATH": str(other)}, "but the given token is wrong; "),
            ({"RAY_AUTH_MODE": "disabled"}, "but none was given; "),
            ({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}, "RAY_AUTH_MODE is token, but no token was found; "),
        ):
            with pytest.MonkeyPatch.context() as patch:
                for name, value in changed.items():
                    patch.setenv(name, value)
                refused = launch(tmp_path, *tune, code=2)
            assert said in refused.stderr
            errors = [line for line in refused.stderr.splitlines() if not line.endswith(" ...")]  # without progress
            assert len(errors) == 1, refused.stderr
        assert list((tmp_path / "mlruns").rglob("sweep.json")) == []

        process = start(tmp_path, *tune)
        wait_for_rounds(tmp_path, "tiny", 2, process)
        cluster.remove_node(busy_node(cluster), allow_graceful=False)
        out, error = process.communicate(timeout=280)
        assert process.returncode == 0, out + error
        assert "The sweep runs on 3 nodes of the Ray cluster" in error
        assert "Warning" not in error
        deadline = time.monotonic() + 60
        while alive(cluster) > 3 and time.monotonic() < deadline:  # a lost node counts until heartbeats are missing
            time.sleep(0.1)
        assert alive(cluster) == 3  # the head and two nodes are left, because only the sweep has ended
        assert token.read_text() not in out + error
    assert table(tmp_path, "tiny") == table(on_one_machine, "tiny")
    assert histories(newest(tmp_path, "tiny")) == histories(newest(on_one_machine, "tiny"))
    assert_mlflow_equals_store(tmp_path, "tiny")


def test_a_node_that_joins_later_gets_the_data_and_a_wrong_node_is_rejected(pacs_folder: Path, tmp_path: Path) -> None:
    """The driver has its own data folder, and every node starts with an empty one."""
    shutil.copytree(pacs_folder, tmp_path / "data")
    changed = tmp_path / "changed"
    shutil.copytree(Path(fedsweep_package.__file__).parent, changed / "fedsweep")
    randomness = changed / "fedsweep" / "common" / "randomness.py"
    randomness.write_text(randomness.read_text() + "# another version\n")
    broken = tmp_path / "broken" / "fedsweep"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("import a_package_that_is_missing\n")
    own = [{"env_vars": {"FEDSWEEP_DATA": str(tmp_path / f"node{number}")}} for number in range(2)]
    strange = [{"env_vars": {"PYTHONPATH": str(folder)}} for folder in (changed, broken.parent)]
    write_space(tmp_path, "prepared", PREPARED)
    tune = ("tune", "prepared", "--address")
    with authenticated("disabled", tmp_path), ray_cluster(node_arguments=[own[0], *strange]) as cluster:
        refused = launch(tmp_path, *tune, cluster.address, code=2)
        assert "2 of 3 nodes cannot run trials: " in refused.stderr
        assert "has another version of fedsweep (" in refused.stderr
        assert "cannot run fedsweep (" in refused.stderr
        assert "a_package_that_is_missing" in refused.stderr
        assert not (tmp_path / "node0").exists() or list((tmp_path / "node0").iterdir()) == []
        for node in [node for node in cluster.worker_nodes if node._ray_params.env_vars != own[0]["env_vars"]]:
            cluster.remove_node(node, allow_graceful=False)
        process = start(tmp_path, *tune, cluster.address)
        wait_for_rounds(tmp_path, "prepared", 1, process)
        assert sent(tmp_path / "node0") == sent(tmp_path / "data") != {}
        (first,) = cluster.worker_nodes
        cluster.add_node(num_cpus=1, **own[1])
        cluster.remove_node(first, allow_graceful=False)
        out, error = process.communicate(timeout=280)
        assert process.returncode == 0, out + error
        assert "can run code on the cluster" in error  # authentication is off, and the address is not the loopback
        assert sent(tmp_path / "node1") == sent(tmp_path / "data")
    assert_mlflow_equals_store(tmp_path, "prepared")


def sent(folder: Path) -> dict[str, bytes]:
    """Return the content of the data files of PACS and the weights in a data folder, keyed by path.

    The list of source files is left out, because only `data prepare` needs it.
    """
    wanted = [*folder.glob("pacs-64/*"), *folder.glob("backbones/tinyimagenet_vit.*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in wanted if path.name != SOURCES}


def test_a_new_ray_listens_only_on_the_loopback_requires_its_token_and_has_private_sockets() -> None:
    """The kernel lists the listening sockets of Ray's processes, and Ray rejects another process of the same user."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="") as short:
        Path(short).chmod(0o755)  # like /tmp, which protects nothing within Ray's folder
        # Nearly the longest path; the other process may have a longer process id.
        parent = Path(short) / ("x" * (longest_parent() - len(short) - 3))
        done = subprocess.run(
            [sys.executable, "-m", "tests.sweep.listening"],
            env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
            | {"RAY_TMPDIR": str(parent)},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        assert list(parent.iterdir()) == []  # the folder ends with the session
    addresses, stranger, sockets = done.stdout.splitlines()
    assert len(addresses.split()) >= 4, "GCS, raylet, object manager and workers must listen"
    assert set(addresses.split()) == {"127.0.0.1"}
    assert "InvalidAuthToken" in stranger
    number, *exposed = sockets.split()
    assert int(number) >= 2, "the raylet and the object store must have a socket"
    assert exposed == []
