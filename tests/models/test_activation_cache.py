"""The activation cache, whose rows are always correct, are computed once, and stay within the size limit."""

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.common.paths import activation_bytes, activation_folder, environment
from fedsweep.data.digits import DigitsData
from fedsweep.data.image_sets import pool
from fedsweep.federation.build_and_run import build, sources
from fedsweep.federation.rounds import federate
from fedsweep.models import DigitsClip, LoraConfig, build_model
from fedsweep.models.activation_cache import GROUP, LOOKS, SUFFIX, FrozenFunction, FrozenRows, digest_of
from fedsweep.models.base import Reader
from fedsweep.models.layered import LayeredModel
from fedsweep.testing.compare import identical, identical_rounds
from fedsweep.types import Batch, ImageSet

WIDTH = 1024
"""The number of values in a row, which fills one 4 KiB block of a file; all flags together fill another block."""
ROW = 4 * WIDTH


def image_set(count: int, first: int = 0) -> ImageSet:
    """Return `count` images whose first pixels encode their numbers, which start at `first`."""
    numbers = torch.arange(first, first + count)
    images = torch.randint(0, 256, (count, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(first))
    images[:, 0, 0, 0], images[:, 0, 0, 1] = numbers // 256, numbers % 256
    return ImageSet(images, numbers)


def numbers_of(images: Tensor) -> list[int]:
    return (256 * images[:, 0, 0, 0].int() + images[:, 0, 0, 1]).tolist()


def expected(images: Tensor) -> Tensor:
    """Return the rows (n, 2, 512) of images, computed exactly from the pixels of each image."""
    flat = images.flatten(1).float()
    return flat.repeat(1, WIDTH // flat.shape[1] + 1)[:, :WIDTH].mul(0.25).view(len(flat), 2, -1)


class Computed:
    """A frozen function that records the numbers of the images in each batch that it computes."""

    def __init__(self, key: str = "one") -> None:
        self.batches: list[list[int]] = []
        self.function = FrozenFunction(key, self)

    def __call__(self, images: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        self.batches.append(numbers_of(images))
        return expected(images)

    def images(self) -> list[int]:
        """Return the numbers of the computed images, without padding."""
        return [number for batch in self.batches for number in dict.fromkeys(batch)]


def kept(folder: Path | None, *sets: ImageSet, limit: int = 10**9, content: str = "content") -> FrozenRows:
    """Return a new cache of rows for `sets` in a folder, as another process would open it."""
    return FrozenRows({one.images.data_ptr(): f"{content}/{place}" for place, one in enumerate(sets)}, folder, limit)


def orders(count: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, count - 1), min_size=1, unique=True), min_size=1, max_size=4)


@given(orders(40))
def test_rows_equal_the_functions_output_in_any_order(asked):
    images, computed = image_set(40), Computed()
    with tempfile.TemporaryDirectory() as folder:
        rows = kept(Path(folder), images)
        for index in asked:
            got = rows.rows(computed.function, images, torch.tensor(index))
            assert torch.equal(got, expected(images.images[index]))
    assert sorted(computed.images()) == sorted({number for index in asked for number in index})


@given(orders(30), st.integers(0, 2**31))
def test_a_pool_shares_the_rows_of_its_parts(asked, seed):
    parts = [image_set(12), image_set(9, first=300), image_set(25, first=600)]
    chosen = torch.randperm(25, generator=torch.Generator().manual_seed(seed))[:9]
    pooled = pool([parts[0], parts[1], parts[2].select(chosen)])
    assert len(pooled) == 30
    computed = Computed()
    with tempfile.TemporaryDirectory() as folder:
        rows = kept(Path(folder), *parts)
        for index in map(torch.tensor, asked):
            assert torch.equal(rows.rows(computed.function, pooled, index), expected(pooled.take(index)[0]))
        before = len(computed.images())
        assert before == len({number for index in asked for number in pooled.labels[index].tolist()})
        index = torch.tensor(asked[0])  # the rows that the pool has cached, read through one part alone
        of_last = pooled.labels[index] >= 600
        own = pooled.labels[index][of_last] - 600
        if len(own):
            assert torch.equal(rows.rows(computed.function, parts[2], own), expected(parts[2].images[own]))
        assert len(computed.images()) == before


@pytest.mark.parametrize("size", [1, 7, 16, 100])
def test_all_returns_rows_in_the_order_of_the_set_and_reads_them_from_the_folder_the_second_time(tmp_path, size):
    images = image_set(50).select(torch.randperm(50, generator=torch.Generator().manual_seed(0))[:43])
    computed, rows = Computed(), kept(tmp_path, images)
    for _ in range(2):
        assert torch.equal(rows.all(computed.function, images, size), expected(images.take(torch.arange(43))[0]))
    assert sorted(computed.images()) == sorted(images.labels.tolist())
    assert len(computed.batches) == -(-43 // size)


def test_returned_rows_are_copies(tmp_path):
    images, computed = image_set(8), Computed()
    rows, index = kept(tmp_path, images), torch.arange(8)
    for _ in range(3):
        rows.rows(computed.function, images, index).fill_(-1.0)
    assert torch.equal(rows.rows(computed.function, images, index), expected(images.images))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("folder", [False, True])
def test_a_function_gets_whole_groups_padded_with_copies(tmp_path, count, folder):
    images, computed = image_set(40), Computed()
    index = torch.arange(count).flip(0)
    kept(tmp_path if folder else None, images).rows(computed.function, images, index)
    (batch,) = computed.batches
    assert len(batch) % GROUP == 0
    assert batch == [*index.tolist(), *[count - 1] * (-count % GROUP)]


def test_another_process_does_not_compute_cached_rows(tmp_path):
    images, first, second = image_set(40), Computed(), Computed()
    kept(tmp_path, images).rows(first.function, images, torch.arange(30))
    rows = kept(tmp_path, images)
    assert torch.equal(rows.rows(second.function, images, torch.arange(20)), expected(images.images[:20]))
    assert second.images() == []
    index = torch.tensor([35, 3, 30, 29])
    assert torch.equal(rows.rows(second.function, images, index), expected(images.images[index]))
    assert second.images() == [35, 30]


def test_rows_of_one_process_are_visible_to_another_at_once(tmp_path):
    images, computed = image_set(40), Computed()
    one, other = kept(tmp_path, images), kept(tmp_path, images)
    for index in torch.arange(40).split(5):
        for rows in (one, other):
            assert torch.equal(rows.rows(computed.function, images, index), expected(images.images[index]))
    assert computed.images() == list(range(40))


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (1,),
        (5, 1, 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_rows_can_have_any_shape_and_dtype(tmp_path, shape, dtype):
    images, calls = image_set(20), []

    def compute(images: Tensor) -> Tensor:
        calls.append(len(images))
        values = images[:, 0, 0, 1].to(dtype)
        return values.view(-1, *[1] * len(shape)).expand(-1, *shape) + torch.zeros(shape, dtype=dtype)

    for _ in range(2):
        got = kept(tmp_path, images).all(FrozenFunction("key", compute), images, 7)
        assert identical(got, compute(images.images))
    assert len(calls) == 3 + 2


def taken(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob(f"*{SUFFIX}"))


def test_beyond_the_limit_rows_are_correct_but_not_cached(tmp_path):
    images, computed = image_set(64), Computed()
    rows = kept(tmp_path, images, limit=20 * ROW)
    for _ in range(2):
        assert torch.equal(rows.all(computed.function, images, 8), expected(images.images))
        assert taken(tmp_path) == 17 * ROW
    seen = computed.images()
    assert [seen.count(number) for number in range(64)] == [1] * 16 + [2] * 48
    assert torch.equal(rows.rows(computed.function, images, torch.tensor([3, 40])), expected(images.images[[3, 40]]))
    assert computed.images()[len(seen) :] == [40]


def test_rows_that_exactly_reach_the_limit_are_cached(tmp_path):
    images, computed = image_set(16), Computed()
    rows = kept(tmp_path, images, limit=17 * ROW)
    for _ in range(2):
        rows.all(computed.function, images, 4)
    assert computed.images() == list(range(16))


def filled(folder: Path, key: str, images: ImageSet, since: int) -> Path:
    """Write rows as an earlier process, and return their file; `since` is the time of last use in Unix seconds."""
    before = set(folder.iterdir())
    kept(folder, images).all(Computed(key).function, images, 16)
    (path,) = set(folder.iterdir()) - before
    os.utime(path, (since, since))
    return path


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_unused_rows_are_removed_for_new_ones_the_least_recently_used_first(tmp_path, gone):
    images = image_set(16)
    old, new, oldest = (
        filled(tmp_path, key, images, since) for key, since in (("old", 2000), ("new", 3000), ("oldest", 1000))
    )
    assert taken(tmp_path) == 3 * 17 * ROW
    mine = Computed("mine")
    rows = kept(tmp_path, images, limit=(4 - gone) * 17 * ROW)
    for _ in range(2):
        assert torch.equal(rows.all(mine.function, images, 4), expected(images.images))
    assert len(mine.images()) == 16
    assert [path.exists() for path in (oldest, old, new)] == [place >= gone for place in range(3)]
    assert taken(tmp_path) == (4 - gone) * 17 * ROW


def test_rows_in_use_are_not_removed(tmp_path):
    images, one, other = image_set(16), Computed("one"), Computed("other")
    rows = kept(tmp_path, images, limit=26 * ROW)
    rows.all(one.function, images, 8)
    for path in tmp_path.iterdir():
        os.utime(path, (1000, 1000))
    for _ in range(2):
        assert torch.equal(rows.all(other.function, images, 8), expected(images.images))
        assert torch.equal(rows.all(one.function, images, 8), expected(images.images))
    assert len(one.images()) == 16
    assert other.images() == [*range(16), *range(8, 16)]


def test_processes_that_write_at_once_stay_near_their_common_limit(tmp_path):
    images, limit = image_set(100), 128 * ROW
    both = [(kept(tmp_path, images, limit=limit), Computed(key)) for key in ("one", "other")]
    most = 0
    for index in torch.arange(100).split(1):
        for rows, computed in both:
            assert torch.equal(rows.rows(computed.function, images, index), expected(images.images[index]))
            most = max(most, taken(tmp_path))
    assert 100 * ROW < most <= limit + 2 * limit // LOOKS


def test_a_file_that_disappears_while_the_folder_is_measured_is_ignored(tmp_path):
    (tmp_path / f"gone{SUFFIX}").symlink_to("nowhere")  # listed in the folder, but the file does not exist
    images, computed = image_set(16), Computed()
    for _ in range(2):
        kept(tmp_path, images).all(computed.function, images, 16)
    assert computed.images() == list(range(16))


def test_rows_of_an_earlier_boot_of_the_machine_are_not_used(tmp_path, monkeypatch):
    images, computed = image_set(16), Computed()
    for start in ("one", "two", "one"):
        monkeypatch.setattr("fedsweep.models.activation_cache._boot", lambda start=start: start)
        assert torch.equal(kept(tmp_path, images).all(computed.function, images, 16), expected(images.images))
    assert computed.images() == 2 * list(range(16))


def test_opening_a_file_updates_its_time_of_last_use(tmp_path):
    images = image_set(16)
    first, second = (filled(tmp_path, key, images, since) for key, since in (("first", 1000), ("second", 2000)))
    again = Computed("first")
    kept(tmp_path, images).rows(again.function, images, torch.arange(1))
    assert again.images() == []
    kept(tmp_path, images, limit=40 * ROW).all(Computed("third").function, images, 16)
    assert first.exists()
    assert not second.exists()


def test_functions_and_contents_do_not_share_rows(tmp_path):
    one, other = image_set(20), image_set(20, first=500)
    kept(tmp_path, one).all(Computed("key").function, one, 20)
    for key, images, content in (("another key", one, "content"), ("key", other, "other content"), ("key", one, "v2")):
        computed, rows = Computed(key), kept(tmp_path, images, content=content)
        assert torch.equal(rows.all(computed.function, images, 20), expected(images.images))
        assert len(computed.images()) == 20
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 4


def test_parts_of_a_pool_are_cached_under_their_own_content(tmp_path):
    one, other = image_set(10), image_set(10, first=500)
    both, computed = pool([one, other]), Computed()
    rows = kept(tmp_path, one, other)
    rows.all(computed.function, both, 20)
    assert torch.equal(rows.all(computed.function, other, 10), expected(other.images))
    assert len(computed.images()) == 20
    swapped = kept(tmp_path, other, one)  # the contents are swapped on purpose, to show which rows are read
    assert torch.equal(swapped.all(computed.function, one, 10), expected(other.images))


def test_images_of_unknown_content_are_computed_and_never_cached(tmp_path):
    known, unknown, computed = image_set(10), image_set(10, first=500), Computed()
    for images in (unknown, pool([known, unknown])):
        for _ in range(2):
            rows = kept(tmp_path, known).all(computed.function, images, 20)
            assert torch.equal(rows, expected(images.take(torch.arange(len(images)))[0]))
    assert len(computed.images()) == 2 * (10 + 20)
    assert not list(tmp_path.iterdir())


def test_the_first_images_of_a_tensor_are_not_confused_with_the_whole_tensor(tmp_path):
    whole, function = image_set(5000), FrozenFunction("key", lambda images: images.flatten(1).float())
    kept(tmp_path, whole).all(function, whole, 1000)
    first = ImageSet(whole.images[:10], whole.labels[:10])
    rows = kept(tmp_path, first).all(function, first, 10)
    assert torch.equal(rows, first.images.flatten(1).float())


def test_an_empty_index_is_an_error(tmp_path):
    images = image_set(4)
    with pytest.raises(ValueError, match="must select at least one image"):
        kept(tmp_path, images).rows(Computed().function, images, torch.arange(0))


@pytest.mark.parametrize("gigabytes", ["0", "0.0"])
def test_a_limit_of_zero_writes_nothing(tmp_path, monkeypatch, gigabytes):
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDSWEEP_CACHE_GB", gigabytes)
    images, computed = image_set(10), Computed()
    rows = FrozenRows.of({images.images.data_ptr(): "content"})
    for _ in range(2):
        assert torch.equal(rows.all(computed.function, images, 10), expected(images.images))
    assert len(computed.images()) == 20
    assert not (tmp_path / "cache").exists()


def test_environment_variables_set_the_folder_and_the_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path / "some" / "cache"))
    monkeypatch.setenv("FEDSWEEP_CACHE_GB", str(7 * ROW / 1e9))
    images, computed = image_set(10), Computed()
    rows = FrozenRows.of({images.images.data_ptr(): "content"})
    for _ in range(2):
        assert torch.equal(rows.all(computed.function, images, 2), expected(images.images))
    assert [computed.images().count(number) for number in range(10)] == [1] * 6 + [2] * 4
    assert taken(tmp_path / "some" / "cache") == 7 * ROW


def test_nothing_is_cached_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path / "file" / "cache"))
    images, computed = image_set(10), Computed()
    rows = FrozenRows.of({images.images.data_ptr(): "content"})
    for _ in range(2):
        assert torch.equal(rows.all(computed.function, images, 10), expected(images.images))
    assert len(computed.images()) == 20


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(shutil.rmtree, id="gone"),
        pytest.param(
            lambda folder: folder.chmod(0o500),
            id="read-only",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder"),
        ),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_nothing_more_is_cached_in_a_folder_that_becomes_unwritable(tmp_path, monkeypatch, spoil, begun):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDSWEEP_CACHE", str(folder))
    images, computed, other = image_set(10), Computed(), Computed("other")
    rows = FrozenRows.of({images.images.data_ptr(): "content"})
    if begun:
        rows.rows(computed.function, images, torch.arange(4))
    spoil(folder)
    for _ in range(2):
        for one in (computed, other):
            assert torch.equal(rows.all(one.function, images, 10), expected(images.images))
    assert other.images() == 2 * list(range(10))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("spoil", [Path.unlink, emptied])
def test_rows_are_correct_after_their_file_is_removed_or_emptied(tmp_path, spoil):
    """A program that cleans up the disk may remove or empty the file."""
    images = image_set(10)
    kept(tmp_path, images).all(Computed().function, images, 10)
    (path,) = tmp_path.iterdir()
    spoil(path)
    rows, computed = kept(tmp_path, images), Computed()
    for _ in range(2):
        assert torch.equal(rows.all(computed.function, images, 3), expected(images.images))
    assert len(computed.images()) == 10


@pytest.mark.parametrize("whole", [0, 1, 3])
def test_rows_that_were_partly_written_on_a_full_disk_are_not_used(tmp_path, monkeypatch, whole):
    images, computed, written = image_set(8), Computed(), os.pwrite
    left = [whole]

    def filling(file: int, content: bytes, offset: int) -> int:
        if len(content) == ROW:
            if not left[0]:
                return written(file, content[: ROW // 2], offset)
            left[0] -= 1
        return written(file, content, offset)

    monkeypatch.setattr(os, "pwrite", filling)
    assert torch.equal(kept(tmp_path, images).all(computed.function, images, 8), expected(images.images))
    monkeypatch.setattr(os, "pwrite", written)
    assert torch.equal(kept(tmp_path, images).all(computed.function, images, 8), expected(images.images))
    assert computed.images() == [*range(8), *range(whole, 8)]


def test_rows_are_correct_while_another_process_removes_their_file(tmp_path):
    images = image_set(16)
    rows, computed = kept(tmp_path, images), Computed("shared")
    rows.rows(computed.function, images, torch.arange(8))
    (path,) = tmp_path.iterdir()
    os.utime(path, (1000, 1000))
    kept(tmp_path, images, limit=20 * ROW).all(Computed("mine").function, images, 16)
    assert not path.exists()
    third = kept(tmp_path, images)  # creates the file again
    assert torch.equal(third.rows(computed.function, images, torch.tensor([5, 12])), expected(images.images[[5, 12]]))
    for index in torch.arange(16).flip(0).split(3):
        for one in (rows, third):
            assert torch.equal(one.rows(computed.function, images, index), expected(images.images[index]))


def test_rows_are_correct_if_files_disappear_during_the_removal_of_others(tmp_path, monkeypatch):
    images = image_set(16)
    filled(tmp_path, "shared", images, since=1000)
    other, got, unlink = kept(tmp_path, images), [], Path.unlink

    def interrupted(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if not got:
            got.append(other.rows(Computed("shared").function, images, torch.tensor([0])))

    monkeypatch.setattr(Path, "unlink", interrupted)
    kept(tmp_path, images, limit=20 * ROW).all(Computed("mine").function, images, 16)
    assert len(got) == 1
    again = other.rows(Computed("shared").function, images, torch.arange(16))
    assert torch.equal(again, expected(images.images))


@pytest.mark.parametrize("begun_anew", [False, True])
def test_rows_are_correct_if_their_file_disappears_while_it_is_opened(tmp_path, monkeypatch, begun_anew):
    """Another process removes the file, and a third process may create it again."""
    images, computed, utime = image_set(16), Computed(), os.utime
    filled(tmp_path, "one", images, since=1000)

    def gone(path: Path) -> None:
        utime(path)
        path.unlink()
        if begun_anew:
            path.write_bytes(b"")

    monkeypatch.setattr(os, "utime", gone)
    for rows in (kept(tmp_path, images), kept(tmp_path, images)):
        for size in (5, 16):
            assert torch.equal(rows.all(computed.function, images, size), expected(images.images))


def fill(folder: Path, seed: int) -> None:
    """Read 300 rows three times in random order, at the same time as another process that runs this function."""
    values = torch.arange(300 * 48, dtype=torch.int32).mul(7919).remainder(251).to(torch.uint8)
    images = ImageSet(values.view(300, 3, 4, 4), torch.arange(300))

    def compute(images: Tensor) -> Tensor:
        time.sleep(0.001)
        return images.flatten(1).float().repeat(1, 64)

    rows = FrozenRows({images.images.data_ptr(): "content"}, folder / "cache", 10**9)
    (folder / f"ready{seed}").touch()
    while not all((folder / f"ready{one}").exists() for one in (1, 2)):
        time.sleep(0.001)
    for turn in range(3):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(10 * turn + seed))
        for index in order.split(7):
            got = rows.rows(FrozenFunction("key", compute), images, index)
            assert torch.equal(got, compute(images.images[index])), "cached rows are wrong"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_that_fill_one_folder_at_once_get_correct_rows(tmp_path):
    (tmp_path / "cache").mkdir()
    both = [multiprocessing.get_context("fork").Process(target=fill, args=(tmp_path, seed)) for seed in (1, 2)]
    for process in both:
        process.start()
    for process in both:
        process.join(100)
    assert [process.exitcode for process in both] == [0, 0]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    values = torch.arange(300 * 48, dtype=torch.int32).mul(7919).remainder(251).to(torch.uint8)
    images, asked = ImageSet(values.view(300, 3, 4, 4), torch.arange(300)), []

    def compute(images: Tensor) -> Tensor:
        asked.append(len(images))
        return images.flatten(1).float().repeat(1, 64)

    function = FrozenFunction("key", compute)
    rows = FrozenRows({images.images.data_ptr(): "content"}, tmp_path / "cache", 10**9)
    assert torch.equal(rows.rows(function, images, torch.arange(300)), values.view(300, -1).float().repeat(1, 64))
    assert asked == []


def test_the_folder_is_in_the_users_cache_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSWEEP_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for given_folder, xdg, found in (
        (None, None, tmp_path / "me" / ".cache" / "fedsweep" / "activations"),
        (None, str(tmp_path / "xdg"), tmp_path / "xdg" / "fedsweep" / "activations"),
        ("", "", tmp_path / "me" / ".cache" / "fedsweep" / "activations"),
        ("here", str(tmp_path / "xdg"), tmp_path / "here"),
        ("~/there", None, tmp_path / "me" / "there"),
        (str(tmp_path / "else"), None, tmp_path / "else"),
    ):
        for name, value in (("FEDSWEEP_CACHE", given_folder), ("XDG_CACHE_HOME", xdg)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        assert activation_folder() == found
        assert environment()["FEDSWEEP_CACHE"] == str(found)


@pytest.mark.parametrize(
    ("given_size", "size"),
    [(None, 10 * 10**9), ("", 10 * 10**9), ("0", 0), ("2", 2 * 10**9), ("0.5", 5 * 10**8), ("1e3", 10**12)],
)
def test_the_limit_is_ten_gigabytes_by_default(monkeypatch, given_size, size):
    if given_size is not None:
        monkeypatch.setenv("FEDSWEEP_CACHE_GB", given_size)
    assert activation_bytes() == size
    assert environment().get("FEDSWEEP_CACHE_GB") == (given_size or None)


@pytest.mark.parametrize("given_size", ["many", "-1", "nan", "inf", "1e400", "5 GB"])
def test_an_invalid_limit_is_an_error(monkeypatch, given_size):
    monkeypatch.setenv("FEDSWEEP_CACHE_GB", given_size)
    rule = "must be a number of gigabytes, at least 0"
    sentence = f"the environment variable FEDSWEEP_CACHE_GB {rule}, but it is {given_size}."
    for ask in (activation_bytes, lambda: FrozenRows.of({})):
        with pytest.raises(UserError) as refusal:
            ask()
        assert str(refusal.value) == sentence


def test_a_digest_covers_names_dtypes_shapes_values_and_the_arithmetic():
    state = {"a": torch.arange(6.0), "b": torch.zeros(2)}
    cpu = torch.device("cpu")
    digests = [
        digest_of("model", state, cpu),
        digest_of("model 2", state, cpu),
        digest_of("model", state, torch.device("cuda")),
        digest_of("model", {}, cpu),
        digest_of("model", {"a": state["a"]}, cpu),
        digest_of("model", {"a": state["a"], "c": state["b"]}, cpu),
        digest_of("model", {**state, "b": torch.tensor([0.0, 1e-30])}, cpu),
        digest_of("model", {**state, "a": state["a"].view(2, 3)}, cpu),
        digest_of("model", {**state, "b": torch.zeros(2, dtype=torch.int32)}, cpu),
    ]
    torch.set_num_threads(2)
    digests.append(digest_of("model", state, cpu))
    torch.set_num_threads(1)
    assert len(set(digests)) == len(digests) == 10
    shuffled = {"b": state["b"], "a": torch.arange(12.0)[::2] / 2}
    assert digest_of("model", shuffled, cpu) == digests[0]


@pytest.fixture(scope="module")
def digits():
    """Return the digits data set with the single domain `plain`, and its test images."""
    data = DigitsData(domains=("plain",)).load()
    return data, data.domains[0].test


@pytest.fixture(scope="module")
def clip() -> LayeredModel:
    """Return the small CLIP of fedsweep with random adapters of rank 1."""
    model = build_model(DigitsClip(), LoraConfig(rank=1, scaling=1.0, position="mlp", dropout=0.0), 10, seed=0)
    generator = torch.Generator().manual_seed(1)
    state = {name: 0.2 * torch.randn(one.shape, generator=generator) for name, one in model.adapter().items()}
    model.load_adapter(state)
    assert len(state) == 2 * 2 * 6 * 2
    return model


def read(reader: Reader, function: FrozenFunction, images: ImageSet, sizes: Sequence[int]) -> Tensor:
    """Return all rows of a set, which are read in random order in batches of `sizes` and one batch for the rest."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(3))
    parts = order.split([*sizes, len(images) - sum(sizes)])
    rows = torch.cat([reader.kept.rows(function, images, index) for index in parts])
    return rows[order.argsort()]


@pytest.mark.parametrize("steps", [1, 4, 6])
def test_rows_of_a_model_do_not_depend_on_the_batches_that_were_cached(tmp_path, clip, digits, steps):
    data, images = digits[0], digits[1].select(torch.arange(120))
    reader = Reader(clip, "clip")
    function = reader.prefix(range(6), steps, clip.adapter())
    whole = reader.kept.rows(function, images, torch.arange(len(images)))
    assert whole.shape == ((120, 64) if steps == 6 else (120, 17, 64))
    for place, sizes in enumerate([(1, 3, 7, 17, 33, 2, 1), (5,) * 12]):
        (tmp_path / str(place)).mkdir()
        keeping = replace(reader, kept=FrozenRows(sources(data), tmp_path / str(place), 10**9))
        for _ in range(2):  # first computed, then cached
            assert torch.equal(read(keeping, function, images, sizes), whole)
        assert len(list((tmp_path / str(place)).iterdir())) == 1
        assert torch.equal(read(reader, function, images, sizes), whole)  # equals the rows without a cache


@pytest.mark.parametrize("steps", [0, 1, 4, 6])
def test_a_batch_with_cached_tokens_has_the_same_logits_as_its_pixels(tmp_path, clip, digits, steps):
    data, images = digits
    reader = Reader(clip, "clip", FrozenRows(sources(data), tmp_path, 10**9))
    prefix = reader.prefix(range(6), steps, clip.adapter()) if steps else None
    index = torch.tensor([300, 2, 17, 58, 5])
    batch = reader.batch(images, index, prefix, steps, {"row": torch.arange(359)} if steps != 4 else {})
    assert isinstance(batch, Batch)
    assert len(batch) == 5
    assert batch.done == steps
    assert torch.equal(batch.images, images.take(index)[0])
    if steps != 4:
        assert batch.side_inputs["row"].tolist() == index.tolist()
    with torch.no_grad():
        torch.testing.assert_close(clip(batch), clip(images.take(index)[0]), rtol=1e-4, atol=1e-4)


def test_a_batch_without_frozen_steps_and_side_inputs_is_its_pixels(clip, digits):
    index = torch.tensor([4, 1])
    assert identical(Reader(clip, "clip").batch(digits[1], index, None, 0, {}), digits[1].images[[4, 1]])


def test_the_key_of_a_prefix_covers_the_model_the_steps_and_their_adapters(clip):
    adapter = clip.adapter()
    one, upper = dict(adapter), dict(adapter)
    below = next(name for name in adapter if name.startswith("backbone.blocks.1.vision."))
    above = next(name for name in adapter if name.startswith("backbone.blocks.3.vision."))
    one[below], upper[above] = adapter[below] + 1, adapter[above] + 1
    reader = Reader(clip, "clip")
    path = tuple(range(6))
    key = reader.prefix(path, 2, adapter).key
    assert reader.prefix(path, 2, upper).key == key
    assert reader.prefix(path[:4], 2, adapter).key == key
    assert reader.prefix(path, 2, dict(reversed(adapter.items()))).key == key
    others = [
        reader.prefix(path, 3, adapter).key,
        reader.prefix(path, 2, one).key,
        reader.prefix((0, 2, 3), 2, adapter).key,
        reader.prefix(path[:2], 2, adapter).key,  # a prefix of the whole walk consists of features instead of tokens
        replace(reader, identity="other").prefix(path, 2, adapter).key,
        reader.prefix(path, 4, upper).key,
        reader.prefix(path, 4, adapter).key,
    ]
    assert len({key, *others}) == 8
    plain = [reader.prefix(walk, steps, {}).key for walk in (path, (1, 2, 3), (0, 2, 3)) for steps in (1, 2)]
    assert len(set(plain)) == 5  # the first and the last walk begin with the same step


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "lfft", "federation.depths": [12]},
        {"method": "promptfl", "backbone": "digits_clip", "lora.position": "mlp", "federation.depths": [6]},
    ],
    ids=["lfft", "promptfl"],
)
def test_a_run_is_bit_identical_with_and_without_the_cache(tmp_path, monkeypatch, tiny, changes):
    few = {"data.domains": ["plain"], "federation.rounds": 1, "local.steps": 3}
    config = tiny.override({**changes, **few}, "test")
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path))
    runs = []
    for gigabytes in ("0", "1", "1"):  # no cache, an empty cache, and a cache filled by another run
        monkeypatch.setenv("FEDSWEEP_CACHE_GB", gigabytes)
        runs.append(list(federate(build(config))))
        assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == (2 if len(runs) > 1 else 0)  # training and test images
    assert len(runs[0]) == 2
    assert runs[0][1].metrics["loss/test"] != runs[0][0].metrics["loss/test"]
    assert identical_rounds(runs[0], runs[1])
    assert identical_rounds(runs[0], runs[2])
