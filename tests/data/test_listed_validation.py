"""Validation images that a data set lists itself, from its files to the rounds of a run."""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedsweep.cli import early_check
from fedsweep.common.errors import UserError
from fedsweep.data.data_config import DigitsData, PreparedData, load
from fedsweep.data.prepared.arrow_files import stored_digest, verify
from fedsweep.data.prepared.card import CARD, StoreCard
from fedsweep.data.prepared.dataset import content_digest, read_domain
from fedsweep.federation.build_and_run import content_digests, run
from fedsweep.preparation import plan as plan_module
from fedsweep.preparation.plan import Options, make_plan
from fedsweep.preparation.prepare import Prepared, prepare
from fedsweep.types import Domain, FederatedData, ImageSet

SIZE = 16
COUNTS = {"train": 6, "val": 2, "test": 3}  # images of each class
LABELS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
)  # ten, as in the digits backbone
DOMAINS = ("cartoon", "photo")
Ids = dict[str, set[int]]  # the numbers of the images of each split


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "data"))


def png(number: int) -> bytes:
    """Return a PNG file whose first two colour channels contain `number`."""
    pixels = np.random.default_rng(number).integers(256, size=(SIZE, SIZE, 3), dtype=np.uint8)
    pixels[..., :2] = divmod(number, 256)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def numbers(found: ImageSet | None) -> set[int]:
    """Return the numbers that `png` wrote into the images."""
    assert found is not None
    pixels, _ = found.take(torch.arange(len(found)))
    return {256 * int(one[0, 0, 0]) + int(one[1, 0, 0]) for one in pixels}


def images(counts: Mapping[str, int], domains: Sequence[str]) -> Iterator[tuple[int, str, str, str]]:
    """Yield the number, the domain, the split and the class of each image."""
    number = 0
    for domain in domains:
        for split, count in counts.items():
            for label in LABELS:
                for _ in range(count):
                    yield (number := number + 1), domain, split, label


def save(root: Path, path: str, number: int) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(png(number))


def pacs(root: Path, counts: Mapping[str, int]) -> None:
    """Write PACS's folders and lists, with test lists that name all images, as the published lists do."""
    lists: dict[str, list[str]] = {}
    for number, domain, split, label in images(counts, DOMAINS):
        path = f"{domain}/{label}/pic_{number:03}.png"
        save(root, f"kfold/{path}", number)
        parts = {"train": ["train"], "val": ["crossval"], "test": []}[split]
        for part in (*parts, "test"):
            lists.setdefault(f"{domain}_{part}_kfold.txt", []).append(f"{path} {LABELS.index(label) + 1}\n")
    for name, lines in lists.items():
        (root / name).write_text("".join(lines))


def split_folders(pattern: str, names: Mapping[str, str]) -> Callable[[Path, Mapping[str, int]], None]:
    """Return a function that writes images to folders whose paths have this pattern."""

    def write(root: Path, counts: Mapping[str, int]) -> None:
        for number, domain, split, label in images(counts, DOMAINS if "domain" in pattern else ("one",)):
            folder = pattern.format(domain=domain, split=names.get(split, split), label=label)
            save(root, f"{folder}/{number}.png", number)

    return write


def parquet(root: Path, counts: Mapping[str, int], by_file: bool = False) -> None:
    """Write Parquet files with a column `split`, or a file for each split."""
    rows = [
        {"image": {"bytes": png(number)}, "label": LABELS.index(label), "domain": domain, "split": split}
        for number, domain, split, label in images(counts, ("one",) if by_file else DOMAINS)
    ]
    whole = pa.Table.from_pylist([{**row, "split": row["split"].replace("val", "validation")} for row in rows])
    if not by_file:
        pq.write_table(whole, root / "all.parquet")
        return
    for split in whole["split"].unique().to_pylist():
        part = whole.filter(pa.compute.equal(whole["split"], split)).drop_columns(["split", "domain"])
        pq.write_table(part, root / f"{split}-00000-of-00001.parquet")


FORMATS: dict[str, tuple[str, Callable[[Path, Mapping[str, int]], None]]] = {
    "pacs": ("pacs", pacs),
    "split/class": ("flowers", split_folders("{split}/{label}", {})),
    "split/domain/class": ("animals", split_folders("{split}/{domain}/{label}", {"val": "valid"})),
    "domain/split/class": ("animals", split_folders("{domain}/{split}/{label}", {"val": "Validation"})),
    "parquet column": ("table", parquet),
    "parquet files": ("tables", lambda root, counts: parquet(root, counts, by_file=True)),
}


def made(tmp_path: Path, source: str, counts: Mapping[str, int] = COUNTS, force: bool = False) -> Prepared:
    """Write a data set in its published format unless it is already written, and prepare it."""
    name, write = FORMATS[source]
    root = tmp_path / source.replace("/", "-")
    if not root.exists():
        root.mkdir()
        write(root, counts)
    return prepare(make_plan(Options(name, SIZE), root), force=force)


def loaded(card: StoreCard, held: object, **changes: object) -> FederatedData:
    given = {"name": "prepared", "set": card.name, "size": SIZE, "domains": [*card.domains]}
    return load(PreparedData.of({**given, "validation_fraction": held, **changes}, "test"))


def expected(domain: Domain, counts: Mapping[str, int] = COUNTS) -> Ids:
    names = DOMAINS if domain.name in DOMAINS else (domain.name,)
    found: Ids = {split: set() for split in counts}
    for number, name, split, _ in images(counts, names):
        if name == domain.name:
            found[split].add(number)
    return found


def digest_without_marks(made_now: Prepared) -> str:
    card = made_now.card
    return content_digest(
        card.class_names, [read_domain(made_now.folder / f"{name}.arrow", name) for name in card.domains]
    )


@pytest.mark.parametrize("source", FORMATS)
def test_listed_images_are_validation_images_and_the_rest_stays(tmp_path, source):
    card = made(tmp_path, source).card
    default, listed, drawn = (loaded(card, held) for held in (0, "listed", 0.5))
    for before, after, other in zip(default.domains, listed.domains, drawn.domains, strict=True):
        ids = expected(before)
        assert numbers(before.train) == numbers(after.train) == ids["train"]
        assert numbers(before.test) == numbers(other.test) == ids["val"] | ids["test"]
        assert (numbers(after.validation), numbers(after.test)) == (ids["val"], ids["test"])
        assert before.validation is None
        assert numbers(other.validation) | numbers(other.train) == ids["train"]
    assert card.validation == len(LABELS) * COUNTS["val"] * len(card.domains)
    assert default.digest == drawn.digest == card.digest != listed.digest


@pytest.mark.parametrize("source", FORMATS)
def test_the_digest_covers_which_images_are_listed_for_validation(tmp_path, source):
    prepared = made(tmp_path, source)
    verify(prepared.folder)
    assert prepared.card.digest != digest_without_marks(prepared)


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("counts", [{"train": 4, "val": 2}, {"train": 4, "test": 2}])
def test_without_validation_images_apart_from_test_images_nothing_is_recorded(tmp_path, source, counts):
    prepared = made(tmp_path, source, counts)
    assert prepared.card.validation == 0
    assert prepared.card.digest == digest_without_marks(prepared) == stored_digest(prepared.folder, prepared.card)
    with pytest.raises(
        UserError,
        match=r"^`data.validation_fraction` is listed, but these domains of \w+ lack listed validation images or other "
        r"test images: `.*`; set a share of the training images instead, for example 0\.2\.$",
    ):
        loaded(prepared.card, "listed")


def test_a_data_set_of_an_older_version_stays_usable_and_can_be_prepared_again(tmp_path, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(
            plan_module, "_with_other_tests", lambda items: (replace(item, validation=False) for item in items)
        )
        before = made(tmp_path, "pacs")
    content = json.loads((before.folder / CARD).read_text())
    for domain in content["domains"].values():
        del domain["validation"]
    (before.folder / CARD).write_text(json.dumps(content))
    again = made(tmp_path, "pacs")
    assert (again.already, again.card.validation, again.card.digest) == (True, None, before.card.digest)
    with pytest.raises(UserError, match=r"but pacs was prepared by an older version .* prepare it again with .*force"):
        loaded(again.card, "listed")
    old = loaded(again.card, 0)
    new = made(tmp_path, "pacs", force=True)
    for one, other in zip(old.domains, loaded(new.card, 0).domains, strict=True):
        assert (numbers(one.train), numbers(one.test)) == (numbers(other.train), numbers(other.test))
    assert loaded(new.card, "listed").domains[0].validation is not None


def test_other_validation_lists_are_other_options(tmp_path):
    made(tmp_path, "pacs")
    path = tmp_path / "pacs" / "photo_crossval_kfold.txt"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(UserError, match=r"other options \(number of listed validation images 22 instead of 40\); use"):
        made(tmp_path, "pacs")


def test_corrupt_images_do_not_shift_the_listed_validation_images(tmp_path):
    root = tmp_path / "domain-split-class"
    root.mkdir()
    FORMATS["domain/split/class"][1](root, COUNTS)
    lost = {1, 13, 61, 62, 81, 200}
    for number in lost:
        (path,) = root.rglob(f"{number}.png")
        path.write_bytes(b"no")
    card = prepare(make_plan(Options("animals", SIZE), root), skip_corrupt=True).card
    assert len(card.skipped) == len(lost)
    for domain in loaded(card, "listed").domains:
        ids = expected(domain)
        parts = {"train": domain.train, "val": domain.validation, "test": domain.test}
        assert {split: numbers(part) for split, part in parts.items()} == {
            split: own - lost for split, own in ids.items()
        }


def test_lists_changed_before_resuming_change_the_validation_images_of_finished_domains(tmp_path):
    root = tmp_path / "pacs"
    root.mkdir()
    pacs(root, COUNTS)
    broken = max(root.glob("kfold/photo/*/*.png"))
    content = broken.read_bytes()
    broken.write_bytes(b"no")
    with pytest.raises(UserError, match="1 image of pacs cannot be decoded"):
        made(tmp_path, "pacs")
    broken.write_bytes(content)
    path = root / "cartoon_crossval_kfold.txt"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    cartoon, photo = loaded(made(tmp_path, "pacs").card, "listed").domains
    assert len(numbers(cartoon.validation)) == 3
    assert numbers(photo.validation) == expected(photo)["val"]


def patients(root: Path, groups: Sequence[Sequence[str]]) -> Prepared:
    """Prepare two domains with a training, a validation and a test image for each patient in the lists `groups`."""
    rows, number = [], 0
    for split, names in zip(("train", "validation", "test"), groups, strict=True):
        for domain in DOMAINS:
            for name in names:
                number += 1
                image = {"bytes": png(number)}
                rows.append({"image": image, "label": 0, "domain": domain, "split": split, "group": f"{domain} {name}"})
    pq.write_table(pa.Table.from_pylist(rows), root / "all.parquet")
    return prepare(make_plan(Options("patients", SIZE), root))


@pytest.mark.parametrize(
    ("groups", "both_splits", "both_tests"),
    [
        ((("a", "b"), ("c", "d"), ("e", "f")), 0, 0),
        ((("a", "b"), ("b", "c"), ("e", "f")), 2, 0),
        ((("a", "b"), ("c", "d"), ("d", "f")), 0, 2),
    ],
)
def test_groups_on_both_sides_of_the_listed_split_are_kept_and_reported(tmp_path, groups, both_splits, both_tests):
    prepared = patients(tmp_path, groups)
    copies = prepared.card.copies
    assert (copies.both_splits, copies.both_tests) == (both_splits, both_tests)
    assert sum("are listed for validation and other test images" in one for one in prepared.warnings) == bool(
        both_tests
    )
    for first, domain in zip((1, 3), loaded(prepared.card, "listed").domains, strict=True):
        parts = (domain.train, domain.validation, domain.test)
        assert [numbers(part) for part in parts] == [{first + 4 * row, first + 4 * row + 1} for row in range(3)]
    verify(prepared.folder)


def test_a_held_out_domain_is_tested_on_all_images_except_relatives_of_the_clients_and_validation_images(tmp_path):
    rows = [
        (1, "photo", "train", "a"), (2, "photo", "validation", "b"), (3, "photo", "test", "c"),
        (4, "cartoon", "train", "a"), (5, "cartoon", "train", "b"), (6, "cartoon", "train", "d"),
        (7, "cartoon", "validation", "e"), (8, "cartoon", "test", "f"),
    ]  # fmt: skip
    table = [
        {"image": {"bytes": png(number)}, "label": 0, "domain": domain, "split": split, "group": group}
        for number, domain, split, group in rows
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "all.parquet")
    card = prepare(make_plan(Options("scans", SIZE), tmp_path)).card
    listed = loaded(card, "listed", held_out_domains=["cartoon"])
    assert [one.name for one in listed.domains] == ["photo"]
    assert numbers(listed.domains[0].validation) == {2}
    assert listed.held_out[0].validation is None
    assert numbers(listed.held_out[0].test) == {6, 7, 8}
    assert numbers(loaded(card, 0, held_out_domains=["cartoon"]).held_out[0].test) == {5, 6, 7, 8}


@pytest.mark.parametrize("wrong", [1.0, -0.1, "list", True])
def test_other_values_are_an_error(wrong):
    with pytest.raises(UserError, match="validation_fraction"):
        DigitsData.of({"name": "digits", "validation_fraction": wrong}, "test")


def test_digits_have_no_listed_validation_images():
    sentence = "`data.validation_fraction` must be a number below 1, because digits lists no validation images"
    with pytest.raises(UserError, match=sentence):
        DigitsData.of({"name": "digits", "validation_fraction": "listed"}, "test")


def test_every_round_of_a_run_measures_the_listed_validation_images(tmp_path, tiny):
    card = made(tmp_path, "domain/split/class").card
    source = {"name": "prepared", "set": card.name, "size": SIZE, "domains": [*card.domains]}
    config = tiny.override(
        {
            "data": {**source, "validation_fraction": "listed"},
            "evaluation.test_rounds": "last",
            "federation.depths": [12, 6],
            "local.batch_size": 4,
        },
        "test",
    )
    results = list(run(config))
    assert all("validation/accuracy/mean" in one.metrics for one in results)
    assert ["accuracy/mean" in one.metrics for one in results] == [True, False, True]
    assert set(config.metrics()) == {*results[-1].metrics} == {*early_check.metrics(config)}
    other = config.override({"data.validation_fraction": 0.2}, "test")
    assert content_digests(config)["data"] != content_digests(other)["data"]
