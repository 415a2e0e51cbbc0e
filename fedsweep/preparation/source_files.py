"""The files from which a data set was prepared, and the comparison of a prepared data set with a new plan."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fedsweep.common.errors import UserError, summarise_list
from fedsweep.data.prepared.arrow_files import map_domain
from fedsweep.data.prepared.card import CARD, StoreCard, is_store, read_card
from fedsweep.preparation.plan import Plan

SOURCES = "sources.parquet"
"""The list of the source files in the folder of a prepared data set: path, size in bytes, modification time in ns."""
SHOWN = 3  # an error message names at most this many files of a kind
Stamps = Mapping[str, tuple[int, int]]


def write_sources(folder: Path, stamps: Stamps) -> None:
    """Write the list of source files; `stamps` maps each path to the size in bytes and the modification time in ns."""
    lengths, times = ([stamp[place] for stamp in stamps.values()] for place in (0, 1))
    table = pa.table({"path": [*stamps], "bytes": pa.array(lengths, pa.int64()), "time": pa.array(times, pa.int64())})
    pq.write_table(table, folder / SOURCES)


def read_sources(folder: Path) -> dict[str, tuple[int, int]] | None:
    """Return what `write_sources` wrote, or None if the list is missing or damaged."""
    try:
        columns = pq.read_table(folder / SOURCES).to_pydict()
        return dict(zip(columns["path"], zip(columns["bytes"], columns["time"], strict=True), strict=True))
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None


def existing_card(plan: Plan, force: bool) -> StoreCard | None:
    """Return the card of the existing prepared data set, or None if the data set has to be prepared.

    Raise UserError if the folder exists but is not a prepared data set. Unless `force` is true, also raise UserError if
    the data set was prepared from other files or with other options, or by a version of fedsweep that knew no groups. A
    data set that was prepared by a version that recorded no listed validation images is accepted.
    """
    folder = plan.folder
    if not folder.exists():
        return None
    if not is_store(folder):
        raise UserError(f"{folder} exists, but it is not a prepared data set; move it away or choose another NAME.")
    if force:
        return None
    card = read_card(folder)
    if card.plan == plan.key(with_groups=False, with_validation=False) and plan.grouped:
        raise UserError(
            f"{folder} was prepared by an older version of fedsweep that recorded no groups of images, such as the "
            "clips of one video, so a group can be on both sides of a split; use `--force` to prepare the images again."
        )
    if card.plan != plan.key(with_validation=card.validation is not None):
        changes = "; ".join([*_other_options(plan, card), *_other_files(plan, card)])
        raise UserError(
            f"{folder} was prepared from other images or with other options{f' ({changes})' if changes else ''}; use "
            "`--force` to replace it, or another NAME to keep it."
        )
    # Older cards contain no times; for these, no file may be newer than the card.
    written = (folder / CARD).stat().st_mtime_ns
    newer = [path for path, (_, time) in plan.stamps.items() if time > written]
    if card.times != plan.times() and (card.times or newer):
        before = read_sources(folder)
        edited = newer if before is None else [one for one, stamp in plan.stamps.items() if before.get(one) != stamp]
        raise UserError(
            f"the modification times of files in {plan.root} have changed since {folder} was prepared"
            f"{f' ({_named(edited)})' if edited else ''}, so the images may have changed; use `--force` to prepare "
            "them again."
        )
    return card


def _other_options(plan: Plan, card: StoreCard) -> Iterator[str]:
    options: dict[str, tuple[object, object]] = {
        "layout": (plan.layout.name, card.layout),
        "crop": (plan.geometry.crop_pct, card.crop_pct),
        "crop mode": (plan.geometry.crop_mode, card.crop_mode),
        "interpolation": (plan.geometry.interpolation, card.interpolation),
        "test fraction": (plan.options.test_fraction if plan.drawn else None, card.test_fraction),
        "number of classes": (len(plan.listing.class_names), len(card.class_names)),
    }
    if card.validation is not None:
        listed = sum(item.validation and item.path not in card.skipped for item in plan.listing.items)
        options["number of listed validation images"] = (listed, card.validation)
    for name, (now, before) in options.items():
        if now != before:
            yield f"{name} {now} instead of {before}"


def _other_files(plan: Plan, card: StoreCard) -> Iterator[str]:
    """Yield a phrase for the files that were added, removed or replaced since the data set was prepared.

    Older data sets contain no list of source files. For these, only added and removed images are found.
    """
    before, replaced = read_sources(plan.folder), list[str]()
    now: Collection[str] = plan.stamps
    known: Collection[str]
    if before is None:
        now, known = {item.path for item in plan.listing.items}, {*_prepared_paths(plan.folder, card), *card.skipped}
    else:
        known = before
        replaced = [path for path, (length, _) in plan.stamps.items() if path in before and before[path][0] != length]
    changes = {
        "added": [path for path in sorted(now) if path not in known],
        "removed": [path for path in sorted(known) if path not in now],
        "replaced": replaced,
    }
    for verb, paths in changes.items():
        if paths:
            yield f"{verb}: {_named(paths)}"


def _prepared_paths(folder: Path, card: StoreCard) -> Iterator[str]:
    for name in card.domains:
        for part in map_domain(folder / f"{name}.arrow"):
            yield from part.paths.to_pylist()


def _named(paths: Collection[str]) -> str:
    return summarise_list(paths, SHOWN)
