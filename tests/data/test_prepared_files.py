"""The files of prepared data sets, which are memory-mapped and written in pieces, and errors for damaged files."""

import hashlib
import mmap

import numpy as np
import pyarrow as pa
import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.data.prepared import arrow_files as files
from fedsweep.data.prepared.arrow_files import record_batch, schema, write_domain
from fedsweep.data.prepared.card import (
    DomainCard,
    StoreCard,
    find_store,
    read_card,
    store_folder,
    stores,
)
from fedsweep.data.prepared.dataset import content_digest, read_domain

SIZE = 8


def batch(count: int, seed: int) -> tuple[pa.RecordBatch, np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 3, SIZE, SIZE), dtype=np.uint8)
    labels = sorted(rng.integers(0, 3, count).tolist())
    return record_batch(images, labels, [f"{place}.png" for place in range(count)]), images, labels


@pytest.fixture
def written(tmp_path):
    """Write the file of a domain with 20 training and 5 test images; return the path and the images."""
    (train, *one), (test, *other) = batch(20, 0), batch(5, 1)
    path = tmp_path / "photo.arrow"
    write_domain(path, train, test)
    return path, one, other


def mapping_of(address: int) -> tuple[str, str]:
    """Return the permissions and the file of the memory map that contains an address."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            if low <= address < high:
                return line.split()[1], line.split()[-1]
    raise AssertionError("no memory map contains the address")


def test_images_are_in_the_memory_map_of_the_file(written):
    path, (images, labels), (test_images, test_labels) = written
    domain = read_domain(path, "photo")
    assert np.array_equal(domain.train.images.numpy(), images)
    assert np.array_equal(domain.test.images.numpy(), test_images)
    assert domain.train.labels.tolist() == labels
    assert domain.test.labels.dtype == torch.int64
    assert domain.test.labels.tolist() == test_labels
    for part in (domain.train, domain.test):
        permissions, file = mapping_of(part.images.data_ptr())
        assert file == str(path)
        assert "w" not in permissions
        assert part.images.is_contiguous()


def test_any_arrow_library_reads_it(written):
    path, (images, labels), _ = written
    table = pa.ipc.open_file(str(path)).get_batch(0)
    assert table.schema == schema(SIZE)
    assert np.array_equal(table.column("image").to_numpy_ndarray(), images)
    assert table.column("label").to_pylist() == labels
    assert table.column("path")[3].as_py() == "3.png"


@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_writing_in_pieces_does_not_change_a_byte(written, tmp_path, monkeypatch, piece):
    monkeypatch.setattr(files, "PIECE", piece)
    write_domain(tmp_path / "again.arrow", batch(20, 0)[0], batch(5, 1)[0])
    assert (tmp_path / "again.arrow").read_bytes() == written[0].read_bytes()


def test_memory_mapped_images_are_written_and_their_memory_is_released(written, tmp_path):
    images = np.concatenate([written[1][0], written[2][0]])
    (tmp_path / "raw").write_bytes(images.tobytes())
    pages = files.map_file(tmp_path / "raw")
    whole = np.frombuffer(pages, np.uint8).reshape(images.shape)
    parts = [(slice(0, 20), written[1][1]), (slice(20, 25), written[2][1])]
    batches = [record_batch(whole[part], labels, [f"{i}.png" for i in range(len(labels))]) for part, labels in parts]
    write_domain(tmp_path / "again.arrow", *batches, pages)
    assert isinstance(pages, mmap.mmap)
    assert (tmp_path / "again.arrow").read_bytes() == written[0].read_bytes()


def test_a_file_can_have_more_than_two_billion_pixels(tmp_path, monkeypatch):
    asked, new_file = [], pa.ipc.new_file
    monkeypatch.setattr(pa.ipc, "new_file", lambda *rest, **given: asked.append(given) or new_file(*rest, **given))
    write_domain(tmp_path / "x.arrow", batch(2, 0)[0], batch(2, 1)[0])
    assert [given["options"].allow_64bit for given in asked] == [True]


def test_the_digest_is_the_documented_one(written):
    path, (images, labels), (test_images, test_labels) = written
    expected = hashlib.sha256(b"bus\0cat\0dog\0")
    for part, numbers in ((images, labels), (test_images, test_labels)):
        expected.update(b"photo" + part.tobytes() + np.array(numbers, "<i8").tobytes())
    assert content_digest(("bus", "cat", "dog"), [read_domain(path, "photo")]) == expected.hexdigest()


@pytest.mark.parametrize("damage", ["garbage", "empty", "other columns", "one batch"])
def test_a_file_of_another_kind_is_an_error(written, damage):
    path = written[0]
    length = path.stat().st_size
    if damage == "garbage":
        path.write_bytes(bytes(length))
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        table = pa.table({"image": [1]}).to_batches()[0] if damage == "other columns" else batch(2, 0)[0]
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_batch(table)
    with pytest.raises(UserError, match=r"photo\.arrow is not a file of prepared images, or it is damaged"):
        read_domain(path, "photo")


def card(name: str = "set", size: int = SIZE, length: int = 3) -> StoreCard:
    return StoreCard(
        name=name, size=size, layout="domains", class_names=("bus", "cat"), digest="ab" * 32, crop_pct=1.0,
        domains={"photo": DomainCard(train=2, test=1, bytes=length)},
    )  # fmt: skip


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Return the folder of a data set that consists of a card and a file of three bytes."""
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path))
    folder = store_folder("set", SIZE)
    folder.mkdir()
    (folder / "card.json").write_text(card().model_dump_json())
    (folder / "photo.arrow").write_bytes(b"abc")
    return folder


def test_a_written_card_is_read_unchanged(store):
    assert read_card(store) == card()
    assert (card().images, card().bytes) == (3, 3)
    assert stores() == [store]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda store: (store / "photo.arrow").write_bytes(b"ab"), "photo.arrow must have 3 bytes, but it has 2; "),
        (lambda store: (store / "photo.arrow").unlink(), "photo.arrow must have 3 bytes, but it has 0; "),
        (lambda store: (store / "card.json").write_text("{"), "card.json is not valid JSON"),
        (lambda store: (store / "card.json").write_text("{}"), "`name` is missing"),
        (
            lambda store: (store / "card.json").write_text(card("other").model_dump_json()),
            "its card describes other at 8",
        ),
        (lambda store: (store / "card.json").write_text(card(size=9).model_dump_json()), "its card describes set at 9"),
    ],
)
def test_a_damaged_data_set_is_an_error(store, change, words):
    change(store)
    with pytest.raises(UserError) as refusal:
        read_card(store)
    assert words in str(refusal.value)


def test_a_data_set_is_found_by_its_name(store):
    assert find_store("set") == find_store("set", SIZE) == store
    with pytest.raises(UserError, match=r"there is no prepared data set `sett` in .*; did you mean `set`"):
        find_store("sett")
    with pytest.raises(UserError, match=r"`fedsweep data prepare birds --root DIR` to prepare it\.$"):
        find_store("birds")
    with pytest.raises(
        UserError, match="set is prepared at 8 pixels, not at 64; run `fedsweep data prepare set --root"
    ):
        find_store("set", 64)
    other = store_folder("set", 16)
    other.mkdir()
    (other / "card.json").write_text(card(size=16).model_dump_json())
    with pytest.raises(UserError, match=r"set is prepared at 8 and 16 pixels; choose one, e\.g\. with `--size 8`"):
        find_store("set")
    assert find_store("set", 16) == other


def test_an_incomplete_data_set_is_not_listed(store):
    store.rename(store.with_name("set-8.part"))
    assert stores() == []
