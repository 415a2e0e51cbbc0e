"""The check of a node, and the files that the driver can send to the node. No Ray is started."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from fedsweep.common.errors import UserError
from fedsweep.common.paths import environment
from fedsweep.sweep.cluster import file_delivery as delivery
from fedsweep.sweep.cluster.file_delivery import Library, fetch, items_of
from fedsweep.sweep.cluster.node_requirements import Arrival, Needs, enter, look
from fedsweep.sweep.plan.plan import Plan

SPACE = "ablations/dirichlet_alpha"
WEIGHTS = "backbones/tinyimagenet_vit.safetensors"


@pytest.fixture
def needs(pacs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Needs:
    """Return the requirements of a driver with data in `data`.

    Afterwards, this process acts as a node without data, whose data folder is `other`.
    """
    shutil.copytree(pacs_folder, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    needs = Needs.of(Plan.read(SPACE, {}, {}))
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"FEDSWEEP_DATA": str(tmp_path / "other")})
    return replace(needs, environment=environment() | {"FEDSWEEP_HOME": str(tmp_path / "driver")})


class LocalLibrary:
    """A replacement for Ray's actor `Library`, which can send a damaged item."""

    def __init__(self, items: tuple[delivery.Item, ...], spoil: str = "") -> None:
        self.library, self.spoil, self.piece, self.asked = Library(items), spoil, self, 0

    def remote(self, place: str, offset: int) -> bytes:
        self.asked += 1
        content = self.library.piece(place, offset)
        middle = len(content) // 2
        return (
            content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :] if place == self.spoil else content
        )


@pytest.fixture(autouse=True)
def _pieces_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda piece: piece)
    monkeypatch.setattr(delivery, "PIECE", 1 << 16)


def test_the_data_set_and_the_weights_with_their_card_can_be_sent(needs: Needs):
    assert [item.place for item in needs.items] == [
        "pacs-64",
        WEIGHTS,
        "backbones/tinyimagenet_vit.json",
    ]
    assert needs.items[0].files[0][0] == "pacs-64/card.json"
    assert all(item.bytes > 0 for item in needs.items)
    assert list(items_of(Plan.read("ablations/lora_rank", {}, {}).base)) == []  # the data are embedded in the package


def test_a_node_that_lacks_data_gets_them_once_and_is_then_ready(needs: Needs, tmp_path: Path):
    assert look(needs).lacking == list(needs.items)
    assert look(needs).problems == []
    library = LocalLibrary(needs.items)
    fetch(needs.items, library)
    asked = library.asked
    assert asked > len(needs.items)  # large files are sent in several pieces
    assert look(needs).lacking == look(needs).problems == []
    fetch(needs.items, library)
    assert library.asked == asked
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == [".arriving.lock", "backbones", "pacs-64"]
    for item in needs.items:
        for name, _ in item.files:
            assert (tmp_path / "other" / name).read_bytes() == (tmp_path / "data" / name).read_bytes()


@pytest.mark.parametrize("spoilt", ["pacs-64/art_painting.arrow", WEIGHTS])
def test_damaged_items_are_not_moved_to_their_path(needs: Needs, tmp_path: Path, spoilt: str):
    with pytest.raises(UserError, match="arrived damaged"):
        fetch(needs.items, LocalLibrary(needs.items, spoilt))
    assert not (tmp_path / "other" / spoilt).exists()
    fetch(needs.items, LocalLibrary(needs.items))  # leftovers of the first attempt do no harm
    assert look(needs).lacking == look(needs).problems == []


def test_only_the_files_of_a_plan_are_sent(needs: Needs, tmp_path: Path):
    (tmp_path / "data" / "secret").write_text("x")
    with pytest.raises(KeyError):
        Library(needs.items).piece("secret", 0)
    with pytest.raises(KeyError):
        Library(needs.items).piece("../data/secret", 0)


def test_all_problems_of_a_node_are_reported(needs: Needs, tmp_path: Path):
    other = replace(
        needs, packages=dict(needs.packages) | {"torch": "1.0", "timm": "0.1"}, probe=f"{tmp_path / 'no'}#x"
    )
    torch, timm, store = look(other).problems
    assert torch.endswith(", not 1.0")
    assert timm.startswith("has timm ")
    assert (
        store
        == f"cannot use the store {tmp_path / 'no'}, a folder that all nodes must share (No such file or directory)"
    )
    assert look(replace(needs, engine="0" * 64)).problems == [
        f"has another version of fedsweep ({needs.engine[:12]}, not {'0' * 12})"
    ]


def test_the_check_leaves_a_shared_store_unchanged(needs: Needs, tmp_path: Path):
    probe = tmp_path / "probe"
    probe.write_text("abc")
    before = sorted(tmp_path.iterdir())
    assert look(replace(needs, probe=f"{tmp_path}#probe")).problems == []
    assert [one for one in sorted(tmp_path.iterdir()) if one.name != "other"] == before


def test_different_images_under_the_same_name_are_reported_and_not_replaced(needs: Needs, tmp_path: Path):
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    card = tmp_path / "other" / "pacs-64" / "card.json"
    said = json.loads(card.read_text())
    card.write_text(card.read_text().replace(said["digest"], "0" * 64))
    found = look(needs)
    assert found.lacking == []
    assert found.problems == [f"has different data in {tmp_path / 'other'}"]


def test_a_full_disk_is_reported_before_anything_is_sent(needs: Needs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda root: shutil._ntuple_diskusage(1, 1, 0))
    (problem,) = look(needs).problems
    assert problem.startswith("lacks 0.0 GB of data, and ")


def test_a_nodes_own_folders_take_precedence_over_the_drivers(monkeypatch: pytest.MonkeyPatch):
    given = {"FEDSWEEP_DATA": "/driver/data", "FEDSWEEP_CACHE": "/driver/cache", "FEDSWEEP_HOME": "/driver"}
    monkeypatch.setattr(os, "environ", {"FEDSWEEP_DATA": "/node/data", "FEDSWEEP_CACHE": "cache"})
    enter(given)
    assert os.environ == given | {"FEDSWEEP_DATA": "/node/data"}


def test_a_worker_prepares_a_node_that_joined_later(needs: Needs, tmp_path: Path):
    library = LocalLibrary(needs.items)
    Arrival(needs, library).enter()
    assert (tmp_path / "other" / WEIGHTS).exists()
    asked = library.asked
    Arrival(needs, library).enter()
    assert library.asked == asked
    with pytest.raises(UserError, match=r"^the node .* has another version of fedsweep .*; every node must have"):
        Arrival(replace(needs, engine="0" * 64), library).enter()
