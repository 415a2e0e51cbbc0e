"""The preparation of a data set, whose content equals an independent computation, and its errors."""

import errno
import hashlib
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from filelock import FileLock
from PIL import Image

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.data.prepared.arrow_files import stored_digest
from fedsweep.data.prepared.card import is_store, read_card, store_folder
from fedsweep.data.prepared.dataset import content_digest, read_domain
from fedsweep.preparation import decode
from fedsweep.preparation import prepare as module
from fedsweep.preparation.prepare import prepare
from tests.preparation.helpers import CLASSES, DOMAINS, Tree, Watched, plan_of


def by_hand(tree: Path, fraction: float = 0.2) -> tuple[str, dict[str, list[list[str]]]]:
    """Compute the digest and each domain's training and test paths with numpy and PIL alone.

    Images of 20 x 16 pixels are cropped to 16 x 16 pixels but not resized.
    """
    digest = hashlib.sha256("".join(f"{name}\0" for name in CLASSES).encode())
    paths: dict[str, list[list[str]]] = {}
    for domain in DOMAINS:
        parts: list[list[tuple[int, str]]] = [[], []]
        for label, name in enumerate(CLASSES):
            files = sorted(f"{domain}/{name}/{one}" for one in os.listdir(tree / domain / name))
            order = stream(0, "split", domain, name).permutation(len(files))
            tests = {files[place] for place in order[: round(fraction * len(files))]}
            for path in files:
                parts[path in tests].append((label, path))
        for part in parts:
            pixels = [np.asarray(Image.open(tree / path).convert("RGB"))[:, 2:18] for _, path in part]
            digest.update(domain.encode())
            digest.update(np.stack(pixels).transpose(0, 3, 1, 2).tobytes())
            digest.update(np.array([label for label, _ in part], "<i8").tobytes())
        paths[domain] = [[path for _, path in part] for part in parts]
    return digest.hexdigest(), paths


def test_counts_and_digest_equal_an_independent_computation(tree):
    card = prepare(plan_of(tree)).card
    digest, paths = by_hand(tree)
    assert card.digest == digest
    assert {name: (one.train, one.test) for name, one in card.domains.items()} == {
        name: (len(train), len(test)) for name, (train, test) in paths.items()
    }
    assert card.images == 60
    folder = store_folder("set", 16)
    reader = pa.ipc.open_file(str(folder / "sketch.arrow"))
    assert [reader.get_batch(part).column("path").to_pylist() for part in (0, 1)] == paths["sketch"]
    domains = [read_domain(folder / f"{name}.arrow", name) for name in card.domains]
    assert content_digest(card.class_names, domains) == stored_digest(folder, card) == digest


def test_the_card_is_read_back_as_it_was_written(tree):
    made = prepare(plan_of(tree))
    assert read_card(made.folder) == made.card
    assert (made.card.layout, made.card.size, made.card.test_fraction, made.card.skipped) == ("tree", 16, 0.2, ())
    assert sorted(path.name for path in made.folder.iterdir()) == [
        *("card.json", "photo.arrow", "sketch.arrow", "sources.parquet"),
    ]


def test_workers_and_chunks_do_not_change_a_byte(tree):
    alone = prepare(plan_of(tree, name="alone"), chunk=256)
    together = prepare(plan_of(tree, name="together"), workers=2, chunk=4)
    assert together.card.digest == alone.card.digest
    for name in DOMAINS:
        assert (together.folder / f"{name}.arrow").read_bytes() == (alone.folder / f"{name}.arrow").read_bytes()


def test_progress_counts_every_image_up_to_the_last(tree):
    seen: list[tuple[int, int]] = []
    prepare(plan_of(tree), progress=lambda *one: seen.append(one), chunk=7)
    assert [total for _, total in seen] == [60] * len(seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert (seen[0][0], seen[-1][0]) == (0, 60)


def test_an_existing_prepared_data_set_is_found_without_reading_images(tree):
    first, source = prepare(plan_of(tree)), Watched()
    again = prepare(plan_of(tree))
    assert (again.already, again.card) == (True, first.card)
    prepare(plan_of(tree, source, name="other"))
    assert len(source.seen) == 60  # the layout records all reads


CHANGES = {
    "file": "removed: `photo/bus/0.png`",
    "fraction": "test fraction 0.5 instead of 0.2",
    "classes": "number of classes 2 instead of 3; removed: `photo/dog/0.png`, `photo/dog/1.png`, `photo/dog/2.png` "
    "and 17 more",
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_source_or_option_is_an_error_unless_forced(tree, change):
    first = prepare(plan_of(tree)).card
    options = {"fraction": {"test_fraction": 0.5}, "classes": {"classes": 2}}.get(change, {})
    if change == "file":
        (tree / "photo" / "bus" / "0.png").unlink()
    with pytest.raises(UserError, match=re.escape(f"other options ({CHANGES[change]}); use `--force` to replace it")):
        prepare(plan_of(tree, **options))
    assert read_card(store_folder("set", 16)) == first
    forced = prepare(plan_of(tree, **options), force=True)
    assert not forced.already
    assert forced.card.digest != first.digest
    assert read_card(forced.folder) == forced.card
    assert sorted(path.name for path in forced.folder.parent.iterdir()) == [".set-16.lock", "set-16"]


@pytest.mark.parametrize("listed", [True, False])
def test_added_removed_and_replaced_files_are_named(tree, listed):
    made = prepare(plan_of(tree))
    if not listed:  # a data set of an earlier version
        (made.folder / "sources.parquet").unlink()
    (tree / "photo" / "bus" / "0.png").unlink()
    shutil.copy(tree / "photo" / "bus" / "1.png", tree / "sketch" / "dog" / "new.png")
    Image.new("RGB", (60, 60)).save(tree / "photo" / "cat" / "3.png")
    with pytest.raises(UserError) as error:
        prepare(plan_of(tree))
    replaced = "; replaced: `photo/cat/3.png`" if listed else ""
    assert f"(added: `sketch/dog/new.png`; removed: `photo/bus/0.png`{replaced}); use" in str(error.value)


def test_a_folder_that_is_not_a_prepared_data_set_is_never_replaced(tree):
    mine = store_folder("set", 16) / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(UserError, match="exists, but it is not a prepared data set; move it away"):
        prepare(plan_of(tree), force=True)
    assert mine.read_text() == "mine"


def test_a_replacement_that_was_killed_halfway_is_undone(tree):
    made = prepare(plan_of(tree))
    made.folder.rename(made.folder.with_name(".set-16.replaced"))
    assert prepare(plan_of(tree)).already


def test_two_simultaneous_preparations_are_an_error(tree):
    folder = store_folder("set", 16)
    folder.parent.mkdir(parents=True)
    with FileLock(folder.with_name(".set-16.lock")), pytest.raises(UserError, match="another `fedsweep data prepare`"):
        prepare(plan_of(tree))
    assert not prepare(plan_of(tree)).already


def test_a_disk_that_is_too_small_is_an_error_before_work_starts(tree, monkeypatch):
    usage = shutil._ntuple_diskusage(10**9, 10**9, 60_000)  # type: ignore[attr-defined]
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    source = Watched()
    with pytest.raises(UserError, match=r"needs 0\.1 MB, but only 0\.1 MB are free"):
        prepare(plan_of(tree, source))
    assert source.seen == []


@pytest.mark.parametrize("where", ["pixels", "arrow"])
def test_on_a_full_disk_decoded_images_are_kept(tree, monkeypatch, where):
    written = 0

    def full(file, data, *rest):
        nonlocal written
        written += 1
        if written > (25 if where == "pixels" else 0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, *rest)

    pwrite, source = os.pwrite, Watched()
    with monkeypatch.context() as patch:
        if where == "pixels":
            patch.setattr(decode.os, "pwrite", full)
        else:
            patch.setattr(module, "write_domain", lambda path, *rest: full(path, rest))
        with pytest.raises(UserError, match=r"cannot be written: No space left on device; the images decoded so far"):
            prepare(plan_of(tree, source), chunk=5)
    assert not store_folder("set", 16).exists()
    read = len(source.seen)
    made = prepare(plan_of(tree, source), chunk=5)
    assert made.card.digest == by_hand(tree)[0]
    assert len(source.seen) == read + {"pixels": 60 - 25, "arrow": 30}[where]


def test_a_corrupt_image_is_an_error_with_a_list_and_is_skipped_only_on_request(tree):
    truncated, empty = tree / "photo" / "cat" / "3.png", tree / "sketch" / "dog" / "7.png"
    truncated.write_bytes(truncated.read_bytes()[:200])
    empty.write_bytes(b"")
    with pytest.raises(UserError) as refusal:
        prepare(plan_of(tree), chunk=8)
    sentence = str(refusal.value)
    assert sentence.startswith("2 images of set cannot be decoded: photo/cat/3.png (")
    assert "sketch/dog/7.png (empty); " in sentence
    assert "`--skip-corrupt` leaves them out" in sentence
    listed = store_folder("set", 16).with_name("set-16.part") / "corrupt.txt"
    assert [line.split("\t")[0] for line in listed.read_text().splitlines()] == ["photo/cat/3.png", "sketch/dog/7.png"]
    assert str(listed) in sentence
    assert not store_folder("set", 16).exists()
    source = Watched()
    card = prepare(plan_of(tree, Tree()), skip_corrupt=True, chunk=8).card
    assert source.seen == []
    assert card.skipped == ("photo/cat/3.png", "sketch/dog/7.png")
    assert card.images == 58
    assert read_card(store_folder("set", 16)) == card


def test_skipped_images_do_not_change_the_others(tree, tmp_path):
    whole = prepare(plan_of(tree, name="whole")).folder
    (tree / "photo" / "cat" / "3.png").write_bytes(b"")
    less = prepare(plan_of(tree, name="less"), skip_corrupt=True).folder
    images = []
    for folder in (whole, less):
        reader = pa.ipc.open_file(str(folder / "photo.arrow"))
        batches = [reader.get_batch(part) for part in (0, 1)]
        images.append(
            {
                (part, path, label): image.tobytes()
                for part, batch in enumerate(batches)
                for image, label, path in zip(
                    batch.column("image").to_numpy_ndarray(),
                    *(batch.column(i).to_pylist() for i in (1, 2)),
                    strict=True,
                )
            }
        )
    gone = set(images[0]) - set(images[1])
    assert [path for _, path, _ in gone] == ["photo/cat/3.png"]
    assert all(images[0][key] == pixels for key, pixels in images[1].items())


def test_more_than_ten_corrupt_images_are_counted(tree):
    for name in CLASSES:
        for number in range(5):
            (tree / "photo" / name / f"{number}.png").write_bytes(b"x")
    with pytest.raises(UserError, match=r"^15 images .* and 5 more; ") as refusal:
        prepare(plan_of(tree))
    assert str(refusal.value).count("photo/") == 10


def test_a_class_without_images_after_skipping_is_an_error(tree):
    for path in (tree / "photo" / "cat").iterdir():
        path.write_bytes(b"x")
    with pytest.raises(
        UserError, match="the class `cat` of the domain `photo` has no image that can be decoded \\(of 10 in total\\)"
    ):
        prepare(plan_of(tree), skip_corrupt=True)
    assert not is_store(store_folder("set", 16))


def test_an_unreadable_file_is_not_a_corrupt_image(tree):
    plan = plan_of(tree)
    (tree / "photo" / "cat" / "3.png").unlink()
    with pytest.raises(UserError, match=r"photo/cat/3\.png cannot be read: No such file or directory\.$"):
        prepare(plan, skip_corrupt=True)


def test_a_data_folder_that_cannot_be_created_is_an_error(tree, monkeypatch):
    monkeypatch.setenv("FEDSWEEP_DATA", "/dev/null/x")
    with pytest.raises(UserError, match=r"^/dev/null/x cannot be written: Not a directory; set FEDSWEEP_DATA"):
        prepare(plan_of(tree))
