"""Trials of a cluster whose nodes share no folder, but an object store."""

from pathlib import Path
from typing import Any

import pytest

from fedsweep.store import Store
from tests.sweep.clusters import authenticated, ray_cluster
from tests.sweep.helpers import GRID, fedsweep, write_space
from tests.sweep.objects import URI, machine, object_store, objects

pytestmark = pytest.mark.slow
client = pytest.fixture(object_store)


def test_nodes_write_there_and_nothing_of_rays_is_left(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_space(tmp_path, "tiny", {**GRID, "seeds": [0]})
    machine(tmp_path / "driver", monkeypatch)
    with authenticated("token", tmp_path), ray_cluster(2) as cluster:
        done = fedsweep(tmp_path, "tune", "tiny", "--address", cluster.address, "--store", URI)
    assert "2 of 2 after" in done.stderr
    assert not [name for name in objects(client) if "/ray/" in name or "/." in name or name.startswith(".")]
    machine(tmp_path / "other", monkeypatch)
    trials = Store.at(URI).find("tiny").trials()
    assert [one.outcome and one.outcome.outcome for one in trials] == ["finished"] * 2
