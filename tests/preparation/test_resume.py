"""The continuation of a killed preparation, which does not mistake incomplete files for complete ones."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedsweep.common.errors import UserError
from fedsweep.data.prepared.card import store_folder
from fedsweep.preparation import prepare as module
from fedsweep.preparation.layouts.base import Item, Listing
from fedsweep.preparation.layouts.parquet import Parquet
from fedsweep.preparation.prepare import prepare
from fedsweep.preparation.scratch import Scratch
from tests.preparation.helpers import DOMAINS, Watched, plan_of

ROOT = Path(__file__).parents[2]
CHUNK = 4
START = f"""
import sys
from pathlib import Path
from tests.preparation.helpers import Slow, plan_of
from fedsweep.preparation.prepare import prepare
prepare(plan_of(Path(sys.argv[1]), Slow()), workers=2, chunk={CHUNK})
"""


def chunks_in(log: Path) -> list[dict]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.startswith('{"chunk"') and line.endswith("}")]


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition did not hold within {seconds:g} seconds"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]


def test_a_killed_preparation_continues(tree, data):
    undisturbed = prepare(plan_of(tree, Watched(), name="whole"), chunk=CHUNK)
    process = subprocess.Popen([sys.executable, "-c", START, str(tree)], cwd=ROOT, env={**os.environ})
    log = data / "set-16.part" / "done.jsonl"
    wait_for(lambda: len(chunks_in(log)) >= 4 or process.poll() is not None)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(workers) >= 2
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))  # workers end with their parent
    done = len(chunks_in(log))
    assert 4 <= done < 16
    assert not store_folder("set", 16).exists()

    source = Watched()
    made = prepare(plan_of(tree, source), chunk=CHUNK)
    assert len(chunks_in(log.parents[1] / "set-16.part" / "done.jsonl")) == 0  # the folder was renamed
    assert len(source.seen) == len(set(source.seen)) <= 60 - CHUNK * (done - 2)  # the last chunk of a domain is short
    assert len(source.seen) > 0
    assert made.card.digest == undisturbed.card.digest
    for name in DOMAINS:
        assert (made.folder / f"{name}.arrow").read_bytes() == (undisturbed.folder / f"{name}.arrow").read_bytes()


@pytest.fixture
def stopped(tree, data, monkeypatch) -> Path:
    """Stop a preparation just before it writes the file of the second domain, and return its folder."""

    def stop(*_):
        raise KeyboardInterrupt

    assemble = module._assemble
    with monkeypatch.context() as patch:
        patch.setattr(module, "_assemble", lambda plan, domain, *rest: (
            assemble(plan, domain, *rest) if domain.name == "photo" else stop()
        ))  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            prepare(plan_of(tree, Watched()), chunk=5)
    return data / "set-16.part"


def decoded_again(tree, **options) -> int:
    source = Watched()
    made = prepare(plan_of(tree, source, **options), chunk=5)
    reference = prepare(plan_of(tree, Watched(), name="reference", **options), chunk=5)
    assert made.card.digest == reference.card.digest
    return len(source.seen)


def test_nothing_is_decoded_again(tree, stopped):
    assert decoded_again(tree) == 0


def test_pixels_with_another_checksum_are_decoded_again(tree, stopped):
    with (stopped / "sketch.pixels").open("r+b") as file:
        file.write(bytes(3 * 16 * 16))
    assert decoded_again(tree) == 5


def test_a_finished_file_of_another_size_is_written_again(tree, stopped):
    os.truncate(stopped / "photo.arrow", 1000)
    assert decoded_again(tree) == 30


@pytest.mark.parametrize("torn", [-1, -2])
def test_the_chunk_of_an_incomplete_log_line_is_decoded_again(tree, stopped, torn):
    log = stopped / "done.jsonl"
    lines = log.read_bytes().split(b"\n")
    assert all(line.startswith(b'{"chunk"') for line in lines[-2:])
    lines[torn] = lines[torn][:-20]
    log.write_bytes(b"\n".join(lines))
    assert decoded_again(tree) == 5


class Interrupted(Watched):
    """A layout whose reading is interrupted at the first image of the second domain."""

    def read(self, root: Path, items: Sequence[Item]) -> Iterator[bytes]:
        if items[0].domain == "sketch":
            raise KeyboardInterrupt
        yield from super().read(root, items)


def test_a_domain_is_finished_before_the_next_is_decoded(tree, data, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        prepare(plan_of(tree, Interrupted()), chunk=5)
    part = data / "set-16.part"
    assert {path.name for path in part.iterdir()} == {"done.jsonl", "photo.arrow", "sketch.pixels"}
    looked, has_chunk = [], Scratch.has_chunk
    monkeypatch.setattr(Scratch, "has_chunk", lambda *args: looked.append(args[1]) or has_chunk(*args))
    assert decoded_again(tree) == 30
    assert {one.pixels.name for one in looked if one.pixels.parent == part} == {"sketch.pixels"}


@pytest.mark.parametrize("options", [{"test_fraction": 0.5}, {"classes": 2}])
def test_with_other_options_everything_is_decoded_again(tree, stopped, options):
    images = 40 if "classes" in options else 60
    assert decoded_again(tree, **options) == images


def test_the_chunk_of_a_changed_image_is_decoded_again(tree, stopped):
    path = tree / "sketch" / "cat" / "2.png"
    path.write_bytes((tree / "sketch" / "cat" / "3.png").read_bytes())
    assert decoded_again(tree) == 5


def test_all_images_in_a_changed_file_are_decoded_again(tmp_path):
    table = pa.table({"image": [b"x", b"y"] * 2, "label": [0, 0, 1, 1]})
    (tmp_path / "many").mkdir()
    pq.write_table(table, path := tmp_path / "many" / "photo.parquet")
    plans = [plan_of(tmp_path / "many", Parquet())]
    os.utime(path, ns=(0, 0))
    plans.append(plan_of(tmp_path / "many", Parquet()))
    keys = [[chunk.key for chunk in plan.chunks(plan.domains[0], 2, tmp_path / "pixels")] for plan in plans]
    assert len({*keys[0], *keys[1]}) == 4
    assert plans[0].key() == plans[1].key()  # both plans have the same key


def labels_by_path(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Return the domain, split and label of each image in a prepared data set, keyed by the path of the image."""
    found = {}
    for name in ("A", "B"):
        reader = pa.ipc.open_file(str(folder / f"{name}.arrow"))
        for part in (0, 1):
            labels, paths = (reader.get_batch(part).column(column).to_pylist() for column in ("label", "path"))
            found.update({path: (name, part, label) for path, label in zip(paths, labels, strict=True)})
    return found


def test_a_class_removed_before_resuming_changes_labels_in_finished_domains(tree, tmp_path):
    root = tmp_path / "letters"
    for place in ("A/cat", "A/zebra", "B/cat", "B/zebra"):
        shutil.copytree(tree / "photo" / "cat", root / place)
    (root / "B" / "aardvark").mkdir()
    (root / "B" / "aardvark" / "0.png").write_bytes(b"no")
    with pytest.raises(UserError, match="1 image of set cannot be decoded"):
        prepare(plan_of(root), chunk=5)
    shutil.rmtree(root / "B" / "aardvark")
    made = prepare(plan_of(root), chunk=5)
    assert made.card.class_names == ("cat", "zebra")
    found = labels_by_path(made.folder)
    assert len(found) == 40
    assert all(label == made.card.class_names.index(path.split("/")[1]) for path, (_, _, label) in found.items())
    assert made.card.digest == prepare(plan_of(root, name="reference")).card.digest


class Listed(Watched):
    """The layout `Watched`, with the first `train` images of each class as training images."""

    def __init__(self, train: int) -> None:
        super().__init__()
        self.train = train

    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        listing = super().list(root, num_classes)
        items = [replace(i, split="train" if int(i.path[-5]) < self.train else "test") for i in listing.items]
        return Listing(listing.class_names, listing.domains, tuple(items))


def test_lists_changed_before_resuming_change_the_split_of_finished_domains(tree, tmp_path):
    root = tmp_path / "letters"
    for place in ("A/cat", "B/cat"):
        shutil.copytree(tree / "photo" / "cat", root / place)
    (root / "B" / "cat" / "3.png").write_bytes(b"no")
    with pytest.raises(UserError, match="1 image of set cannot be decoded"):
        prepare(plan_of(root, Listed(8)), chunk=5)  # each image keeps its row, because rows are ordered by name
    made = prepare(plan_of(root, Listed(5)), chunk=5, skip_corrupt=True)
    assert (made.card.domains["A"].train, made.card.domains["A"].test) == (5, 5)
    assert (made.card.domains["B"].train, made.card.domains["B"].test) == (4, 5)


def test_a_file_with_other_labels_is_an_error(tree, monkeypatch):
    record_batch = module.record_batch
    monkeypatch.setattr(
        module, "record_batch", lambda images, labels, paths, **_: record_batch(images, labels[::-1], paths)
    )
    with pytest.raises(UserError, match=r"photo\.arrow contains other labels or images than planned; delete "):
        prepare(plan_of(tree))
    assert not store_folder("set", 16).exists()
