"""Sweeps in a process that is already connected to Ray, such as a notebook. No Ray is started."""

import os
from typing import Any

import pytest
import ray

from fedsweep.common.errors import UserError
from fedsweep.sweep.cluster import cluster
from fedsweep.sweep.cluster.cluster import check_resources, concurrency
from fedsweep.sweep.cluster.ray_session import ray_session
from fedsweep.sweep.space.settings import Resources

ONE = Resources(cpus_per_trial=1, gpus_per_trial=0)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Simulate a running Ray with two cores, and return its nodes. Starting or stopping Ray fails the test."""
    nodes = [{"Alive": True, "NodeID": "a", "NodeName": "a", "Resources": {"CPU": 2.0}}]

    def untouched(*_: object, **__: object) -> None:
        raise AssertionError("a sweep must not start or stop a running Ray")

    for name in [name for name in os.environ if name.startswith(("RAY_", "TUNE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: nodes[0]["Resources"])
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "init", untouched)
    monkeypatch.setattr(ray, "shutdown", untouched)
    monkeypatch.setattr(cluster, "available_cpus", lambda: 8)
    return nodes


def test_a_running_ray_is_used_and_left_running_without_a_new_token(running: list[dict[str, Any]]) -> None:
    with ray_session():
        assert os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] == "1"
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & os.environ.keys()


def test_trials_get_no_more_than_the_running_ray_has(running: list[dict[str, Any]]) -> None:
    assert concurrency(ONE) == 2
    with pytest.raises(UserError, match="`cpus_per_trial` is 4, but this machine has 2 cores"):
        check_resources(ONE.model_copy(update={"cpus_per_trial": 4}))


def test_a_cluster_that_the_process_has_joined_is_not_mistaken_for_this_machine(running: list[dict[str, Any]]) -> None:
    running.append({**running[0], "NodeID": "b", "NodeName": "b"})
    with pytest.raises(UserError, match="this process has joined a Ray cluster of 2 nodes; "):
        ray_session().__enter__()
