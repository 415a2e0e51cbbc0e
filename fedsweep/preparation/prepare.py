"""Preparing a data set: plan, decode, write, and the cards that describe the result."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsweep.common.errors import UserError
from fedsweep.data.prepared.arrow_files import map_domain, map_file, record_batch, stored_digest, sync, write_domain
from fedsweep.data.prepared.card import CARD, DomainCard, StoreCard, is_store, read_card
from fedsweep.preparation.chunks import (
    CORRUPT,
    Chunk,
    Corrupt,
    Decoders,
    check_complete,
    refuse,
    unwritable,
    write_list,
)
from fedsweep.preparation.decode import MADE_WITH
from fedsweep.preparation.part_folder import Scratch, alone, recover, take_name
from fedsweep.preparation.plan import DomainPlan, Plan


def write_card(plan: Plan, scratch: Scratch, corrupt: Corrupt) -> StoreCard:
    """Write the card, with the digest of what can be read from the disk.

    Raises:
        UserError: a file holds other labels, paths or splits than planned.
    """
    card = StoreCard(
        name=plan.options.name,
        size=plan.options.size,
        layout=plan.layout.name,
        class_names=plan.listing.class_names,
        domains={domain.name: _domain_card(domain, scratch, corrupt) for domain in plan.domains},
        digest="",
        crop_pct=plan.geometry.crop_pct,
        crop_mode=plan.geometry.crop_mode,
        interpolation=plan.geometry.interpolation,
        test_fraction=plan.options.test_fraction if plan.drawn else None,
        skipped=tuple(path for _, path, _ in corrupt),
        plan=plan.key(),
        times=plan.times(),
        made_with=MADE_WITH,
    )
    card = card.model_copy(update={"digest": stored_digest(scratch.folder, card)})
    with (scratch.folder / CARD).open("wb") as file:
        file.write(card.model_dump_json(indent=1).encode())
        file.flush()
        sync(file)
    return card


def _domain_card(domain: DomainPlan, scratch: Scratch, corrupt: Corrupt) -> DomainCard:
    """Counts of a domain's file, whose labels and paths are those of the plan; the digest would not tell."""
    path = scratch.arrow(domain.name)
    bad = {name for of_domain, name, _ in corrupt if of_domain == domain.name}
    kept = [(slot, item) for slot, item in domain.in_order() if item.path not in bad]
    train = sum(slot < domain.train for slot, _ in kept)
    found = map_domain(path)
    for part, wanted in zip(found, (kept[:train], kept[train:]), strict=True):
        labels, paths = [item.label for _, item in wanted], [item.path for _, item in wanted]
        if part.labels.tolist() != labels or part.paths.to_pylist() != paths:
            raise UserError(
                f"{path} holds other labels or images than were planned; remove {scratch.folder}, and the same command "
                "begins anew."
            )
    return DomainCard(train=len(found[0].labels), test=len(found[1].labels), bytes=path.stat().st_size)


CHUNK = 256
"""Images that are decoded between two lines of the log: what a kill costs at most, per worker."""
Progress = Callable[[int, int], None]
"""Told how many images are decoded, and of how many."""


@dataclass(frozen=True)
class Prepared:
    """A store, and whether it was there before."""

    card: StoreCard
    folder: Path
    already: bool


def prepare(
    plan: Plan,
    workers: int = 1,
    skip_corrupt: bool = False,
    force: bool = False,
    progress: Progress = lambda done, total: None,
    chunk: int = CHUNK,
) -> Prepared:
    """Make the store, or find it made; go on where an earlier preparation was stopped.

    Raises:
        UserError: another preparation is at it, the folder is taken by something else, an image is corrupt (without
            `skip_corrupt`) or a class is left without images, or the disk is full.
    """
    folder, part = plan.folder, plan.folder.with_name(f"{plan.folder.name}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            recover(folder)
            if (found := _existing(plan, force)) is not None:
                return Prepared(found, folder, already=True)
            scratch = Scratch(part)
            works = list(_work(plan, scratch, chunk))
            _check_space(plan, works, scratch)
            corrupt = _decode(plan, works, scratch, workers, progress)
            write_list(part / CORRUPT, corrupt)
            if corrupt and not skip_corrupt:
                raise refuse(plan.options.name, corrupt, part / CORRUPT)
            check_complete(plan.domains, plan.listing.class_names, corrupt)
            card = write_card(plan, scratch, corrupt)
            take_name(part, folder, card)
            return Prepared(card, folder, already=False)
    except OSError as error:
        begun = os.path.exists(part / Scratch.LOG)  # unlike Path's own, silent where even asking is refused
        raise unwritable(Path(error.filename or part), error, begun) from None


def _existing(plan: Plan, force: bool) -> StoreCard | None:
    folder = plan.folder
    if not folder.exists():
        return None
    if not is_store(folder):
        raise UserError(f"{folder} is there, but is no prepared data set; move it away, or choose another NAME.")
    if force:
        return None
    card = read_card(folder)
    if card.plan != plan.key():
        raise UserError(
            f"{folder} is prepared from another source or with other options; `--force` would replace it, "
            "another NAME would keep it."
        )
    if card.times != plan.times() and (card.times or _newer(plan, folder)):
        raise UserError(
            f"files in {plan.root} have other times of change than those that {folder} was prepared from, so they may "
            "hold other images; `--force` prepares it anew."
        )
    return card


def _newer(plan: Plan, folder: Path) -> bool:
    """Whether a file has changed since the set was prepared, for cards from before they noted times."""
    return max(time for _, time in plan.stamps.values()) > (folder / CARD).stat().st_mtime_ns


@dataclass(frozen=True)
class _Work:
    """A domain in chunks, and the key of its whole file."""

    domain: DomainPlan
    chunks: tuple[Chunk, ...]
    key: str


def _work(plan: Plan, scratch: Scratch, length: int) -> Iterator[_Work]:
    for domain in plan.domains:
        pixels, chunks = scratch.folder / f"{domain.name}.pixels", []
        for start in range(0, len(domain.items), length):
            places = range(start, min(start + length, len(domain.items)))
            items, slots = domain.items[start : places.stop], domain.slots[start : places.stop]
            key = plan.chunk_key(domain, places)
            chunks.append(Chunk(key, plan.layout, plan.root, items, slots, plan.geometry, pixels))
        yield _Work(domain, tuple(chunks), plan.domain_key(domain, [one.key for one in chunks]))


def _check_space(plan: Plan, works: Sequence[_Work], scratch: Scratch) -> None:
    left = [
        len(one.domain.items) * plan.image_bytes for one in works if not scratch.has_domain(one.domain.name, one.key)
    ]
    need = sum(left) + max(left, default=0) - scratch.used()
    free = shutil.disk_usage(scratch.folder).free
    if need > free:
        raise UserError(
            f"{plan.folder} needs {need / 1e6:,.1f} MB while it is being made, but only {free / 1e6:,.1f} MB are free "
            "on that disk; FEDSWEEP_DATA can name a folder on another."
        )


def _decode(
    plan: Plan, works: Sequence[_Work], scratch: Scratch, workers: int, progress: Progress
) -> list[tuple[str, str, str]]:
    """Make the file of every domain without its corrupt images: their domain, path and reason are returned."""
    corrupt: list[tuple[str, str, str]] = []
    total, finished = len(plan.listing.items), 0
    with Decoders(workers) as decoders:
        for one in works:
            name, images = one.domain.name, len(one.domain.items)
            if not scratch.has_domain(name, one.key):
                pixels = scratch.pixels(name, images * plan.image_bytes)
                left = {
                    chunk.key: chunk
                    for chunk in one.chunks
                    if not scratch.has_chunk(chunk.key, chunk.slots, pixels, plan.image_bytes)
                }
                done = finished + images - sum(len(chunk.items) for chunk in left.values())
                progress(done, total)
                for result in decoders.decode(list(left.values())):
                    scratch.add(result)
                    done += len(left[result.key].items)
                    progress(done, total)
                bad = {slot for chunk in one.chunks for slot, _, _ in scratch.chunks[chunk.key].corrupt}
                scratch.finish(name, one.key, _assemble(plan, one.domain, bad, pixels))
            finished += images
            progress(finished, total)
            for chunk in one.chunks:
                corrupt += [(name, path, reason) for _, path, reason in scratch.chunks[chunk.key].corrupt]
    return corrupt


def _assemble(plan: Plan, domain: DomainPlan, bad: set[int], pixels: Path) -> Path:
    """Write a domain's file under a name of its own."""
    kept = [(slot, item) for slot, item in domain.in_order() if slot not in bad]
    if bad:
        pixels = _without_gaps(pixels, [slot for slot, _ in kept], plan.image_bytes)
    size = plan.geometry.size
    pages = map_file(pixels) if kept else None
    images = np.frombuffer(pages or b"", np.uint8).reshape(-1, 3, size, size)
    train = sum(slot < domain.train for slot, _ in kept)
    batches = [
        record_batch(images[part], [item.label for _, item in kept[part]], [item.path for _, item in kept[part]])
        for part in (slice(train), slice(train, None))
    ]
    path = pixels.with_name(f"{domain.name}.arrow.new")
    write_domain(path, batches[0], batches[1], pages)
    if bad:
        pixels.unlink()
    return path


def _without_gaps(pixels: Path, slots: Sequence[int], length: int) -> Path:
    path = pixels.with_suffix(".kept")
    with pixels.open("rb") as source, path.open("wb") as sink:
        for slot in slots:
            source.seek(slot * length)
            sink.write(source.read(length))
    return path
