"""Trials on a cluster whose nodes share an object store instead of a folder."""

from pathlib import Path
from typing import Any

import pytest

from fedsweep.results import Store
from tests.sweep.clusters import authenticated, ray_cluster
from tests.sweep.helpers import SAMPLED, launch, write_space
from tests.sweep.objects import URI, machine, object_store, objects

pytestmark = pytest.mark.slow
client = pytest.fixture(object_store)


def test_nodes_write_to_the_object_store_and_no_file_of_ray_is_left(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search uses a scheduler, so the object store also contains proposals and decisions."""
    scheduler = {"name": "asha_async", "grace_rounds": 1, "reduction_factor": 2}
    write_space(tmp_path, "tiny", {**SAMPLED, "scheduler": scheduler})
    machine(tmp_path / "driver", monkeypatch)
    with authenticated("token", tmp_path), ray_cluster(2) as cluster:
        done = launch(tmp_path, "tune", "tiny", "--address", cluster.address, "--store", URI)
    assert "6 of 6 trials ended after" in done.stderr
    names = [name.split("/", 3)[-1] for name in objects(client)]
    assert {"decisions.jsonl", "sweep.json", "report/table.csv"} <= {*names}
    assert not [name for name in objects(client) if "/ray/" in name or "/." in name or name.startswith(".")]
    machine(tmp_path / "other", monkeypatch)
    trials = Store.at(URI).find("tiny").trials()
    assert len(trials) == 6
    assert {one.outcome and one.outcome.outcome for one in trials} <= {"finished", "pruned"}
