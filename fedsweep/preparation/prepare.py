"""Functions that decode the images of a data set, write its Arrow files and card, and replace an older version."""

import os
import shutil
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsweep.common.errors import UserError, one_line, summarise_list
from fedsweep.common.files import locked, write_atomically
from fedsweep.data.prepared.arrow_files import map_domain, map_file, record_batch, stored_digest, write_domain
from fedsweep.data.prepared.card import CARD, COPIES, CopiesCard, DomainCard, StoreCard
from fedsweep.preparation.copies import find_groups, listed_for_validation
from fedsweep.preparation.decode import MADE_WITH, Corrupt, Done, decode_chunks
from fedsweep.preparation.input_warnings import blank_warning, copies_warnings, corrupt_warnings, plan_warnings, reject
from fedsweep.preparation.plan import DomainPlan, Plan, Progress
from fedsweep.preparation.scratch import Scratch
from fedsweep.preparation.source_files import SOURCES, existing_card, write_sources

CORRUPT = "corrupt.txt"
SHOWN = 10  # largest number of corrupt images that an error message lists
CHUNK = 256  # images per chunk, and thus the most images that a killed worker has to decode again


@dataclass(frozen=True)
class Prepared:
    """A prepared data set. `already` is true if an earlier call had already prepared it."""

    card: StoreCard
    folder: Path
    already: bool
    warnings: tuple[str, ...]
    """Sentences without a full stop about input that was probably not intended."""


def prepare(
    plan: Plan,
    workers: int = 1,
    skip_corrupt: bool = False,
    force: bool = False,
    strict: bool = False,
    progress: Progress = lambda done, total: None,
    compared: Progress = lambda done, total: None,
    chunk: int = CHUNK,
) -> Prepared:
    """Prepare a data set unless it is already prepared.

    An interrupted preparation is continued.

    Args:
        plan: The images and their positions.
        workers: The number of processes that decode images.
        skip_corrupt: Whether to leave out corrupt images instead of raising UserError.
        force: Whether to replace an existing prepared data set.
        strict: Whether to raise UserError instead of returning warnings.
        progress: A function that is called with the number of decoded images and the total number of images.
        compared: A function that is called with the number of images that have been compared with the others, to find
            copies, and the total number of images.
        chunk: The number of images that a worker decodes at a time.

    Raises:
        UserError: Another process is preparing the data set, the folder `plan.folder` contains other files or was
            prepared from other images, an image is corrupt, the disk is full, or `strict` is true and there are
            warnings.
    """
    folder = plan.folder
    part, replaced = folder.with_name(f"{folder.name}.part"), folder.with_name(f".{folder.name}.replaced")
    taken = f"another `fedsweep data prepare` is writing {folder} now."
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock"), taken):
            if replaced.exists() and not folder.exists():  # an exchange was killed between its two renames
                replaced.rename(folder)
            shutil.rmtree(replaced, ignore_errors=True)
            warnings = plan_warnings(plan)
            if (found := existing_card(plan, force)) is not None:
                return _already(plan, found, warnings, strict)
            reject(plan, warnings, strict)
            scratch = Scratch(part)
            chunks = _make_domains(plan, scratch, workers, progress, chunk)
            corrupt = [bad for one in chunks for bad in one.corrupt]
            blank = sorted(path for one in chunks for path in one.blank)
            _write_corrupt(plan, corrupt, part / CORRUPT, skip_corrupt)
            skipped = {one.path for one in corrupt}
            _check_complete(plan, skipped)
            reject(plan, warnings := [*warnings, *corrupt_warnings(plan, skipped), *blank_warning(blank)], strict)
            groups = find_groups(plan, part, skipped, compared)
            reject(plan, warnings := [*warnings, *copies_warnings(groups.card)], strict)
            groups.write(part)
            write_sources(part, plan.stamps)
            card = _write_card(plan, scratch, corrupt, blank, groups.card)
            _exchange(part, folder, replaced, card)
            return Prepared(card, folder, False, tuple(warnings))
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise UserError(f"{error.filename or part} cannot be written: {reason}; {_remedy(part)}") from None


def _remedy(part: Path) -> str:
    """Return the end of the error message about a file that cannot be written. `part` is the scratch folder."""
    if os.path.exists(part / Scratch.LOG):  # unlike Path.exists, this raises no PermissionError
        return "the images decoded so far are kept, and the same command continues with the others."
    return "set FEDSWEEP_DATA to use another data folder."


def _already(plan: Plan, card: StoreCard, warnings: Sequence[str], strict: bool) -> Prepared:
    """Return a data set that an earlier call has prepared, with the warnings of that call."""
    of_images = [*corrupt_warnings(plan, {*card.skipped}), *blank_warning(card.blank), *copies_warnings(card.copies)]
    warnings = [*warnings, *of_images]
    reject(plan, warnings, strict)
    return Prepared(card, plan.folder, True, tuple(warnings))


def _make_domains(plan: Plan, scratch: Scratch, workers: int, progress: Progress, length: int) -> list[Done]:
    """Decode the images of all domains, and write each domain's file as soon as its last chunk is decoded.

    Corrupt images are left out of the files. `length` is the number of images per chunk.
    """
    chunks = {one.name: plan.chunks(one, length, scratch.pixels(one.name)) for one in plan.domains}
    keys = {one.name: plan.domain_key(one, chunks[one.name]) for one in plan.domains}
    left = [one for one in plan.domains if not scratch.has_domain(one.name, keys[one.name])]
    _check_space(plan, left, scratch.folder)
    for domain in left:
        scratch.pixels(domain.name).touch()
        os.truncate(scratch.pixels(domain.name), len(domain.items) * plan.geometry.image_bytes)  # keeps existing pixels
    missing = {one.key: one for domain in left for one in chunks[domain.name] if not scratch.has_chunk(one)}
    owners = {one.key: domain for domain in left for one in chunks[domain.name]}
    waiting = Counter(owners[key].name for key in missing)

    def finish(domain: DomainPlan) -> None:
        corrupt = {bad.path for one in chunks[domain.name] for bad in scratch.chunks[one.key].corrupt}
        written = _assemble(plan, domain, corrupt, scratch.pixels(domain.name))
        scratch.finish(domain.name, keys[domain.name], written)

    for domain in left:
        if not waiting[domain.name]:
            finish(domain)
    total = len(plan.listing.items)
    done = total - sum(len(chunk.items) for chunk in missing.values())
    progress(done, total)
    with closing(decode_chunks([*missing.values()], workers)) as results:
        for result in results:
            scratch.add(result)
            done += len(missing[result.key].items)
            progress(done, total)
            domain = owners[result.key]
            waiting[domain.name] -= 1
            if not waiting[domain.name]:
                finish(domain)
    return [scratch.chunks[one.key] for own in chunks.values() for one in own]


def _check_space(plan: Plan, domains: Sequence[DomainPlan], folder: Path) -> None:
    left = [len(domain.items) * plan.geometry.image_bytes for domain in domains]
    used = sum(512 * path.stat().st_blocks for path in folder.glob("*.pixels"))
    need = sum(left) + max(left, default=0) - used
    free = shutil.disk_usage(folder).free
    if need > free:
        raise UserError(
            f"the preparation of {plan.folder} needs {need / 1e6:,.1f} MB, but only {free / 1e6:,.1f} MB are free on "
            "its disk; set FEDSWEEP_DATA to a folder on another disk."
        )


def _assemble(plan: Plan, domain: DomainPlan, corrupt: Set[str], pixels: Path) -> Path:
    """Write the images of a domain, except those in `corrupt`, to a temporary file, and return the file's path."""
    train, test = domain.parts(corrupt)
    gaps, path = len(train + test) < len(domain.items), pixels.with_name(f"{domain.name}.arrow.new")
    if gaps:
        pixels = _without_gaps(pixels, [slot for slot, _ in train + test], plan.geometry.image_bytes)
    pages = map_file(pixels) if train or test else None
    images = np.frombuffer(pages or b"", np.uint8).reshape(-1, 3, plan.geometry.size, plan.geometry.size)
    batches = [
        record_batch(
            rows,
            [item.label for _, item in part],
            [item.path for _, item in part],
            validation=listed_for_validation([item for _, item in part], domain.items),
        )
        for rows, part in ((images[: len(train)], train), (images[len(train) :], test))
    ]
    write_domain(path, batches[0], batches[1], pages)
    if gaps:
        pixels.unlink()
    return path


def _without_gaps(pixels: Path, slots: Sequence[int], length: int) -> Path:
    path = pixels.with_suffix(".kept")
    with pixels.open("rb") as source, path.open("wb") as sink:
        for slot in slots:
            source.seek(slot * length)
            sink.write(source.read(length))
    return path


def _write_corrupt(plan: Plan, corrupt: Sequence[Corrupt], path: Path, skip: bool) -> None:
    """List the corrupt images, each with the reason, in the file `path`.

    Raise UserError if there are corrupt images, unless `skip` is true.
    """
    if not corrupt:
        return
    path.write_text("".join(f"{one.path}\t{one.reason}\n" for one in corrupt), encoding="utf-8")
    if skip:
        return
    shown = summarise_list((f"{one.path} ({one.reason})" for one in corrupt), SHOWN, quote="")
    raise UserError(
        f"{len(corrupt)} image{'s' * (len(corrupt) != 1)} of {plan.options.name} cannot be decoded: {shown}; "
        f"{path} lists all of them, and `--skip-corrupt` leaves them out without decoding the others again."
    )


def _check_complete(plan: Plan, corrupt: Set[str]) -> None:
    """Raise UserError if, in any domain, all images of a class, all training images or all test images are corrupt."""
    for domain in plan.domains if corrupt else ():
        train, test = domain.parts(corrupt)
        before = Counter(item.label for item in domain.items)
        left = {item.label for _, item in train + test}
        for label in sorted(before):
            if label not in left:
                raise UserError(
                    f"the class `{plan.listing.class_names[label]}` of the domain `{domain.name}` has no image that "
                    f"can be decoded (of {before[label]} in total), and a class must not be left out."
                )
        for split, part in (("train", train), ("test", test)):
            if not part:
                raise UserError(f"the domain `{domain.name}` has no {split} image that can be decoded.")


def _write_card(
    plan: Plan, scratch: Scratch, corrupt: Sequence[Corrupt], blank: Sequence[str], copies: CopiesCard
) -> StoreCard:
    """Write and return the card, with a digest that is computed from the files on disk."""
    skipped = tuple(one.path for one in corrupt)
    card = StoreCard(
        name=plan.options.name,
        size=plan.options.size,
        layout=plan.layout.name,
        class_names=plan.listing.class_names,
        domains={domain.name: _domain_card(scratch.folder / f"{domain.name}.arrow") for domain in plan.domains},
        digest="",
        crop_pct=plan.geometry.crop_pct,
        crop_mode=plan.geometry.crop_mode,
        interpolation=plan.geometry.interpolation,
        test_fraction=plan.options.test_fraction if plan.drawn else None,
        skipped=skipped,
        copies=copies,
        blank=tuple(blank),
        plan=plan.key(),
        times=plan.times(),
        made_with=MADE_WITH,
    )
    card = card.model_copy(update={"digest": stored_digest(scratch.folder, card)})
    write_atomically(scratch.folder / CARD, card.model_dump_json(indent=1).encode())
    return card


def _domain_card(path: Path) -> DomainCard:
    train, test = map_domain(path)
    validation = 0 if test.validation is None else int(test.validation.sum())
    return DomainCard(train=len(train.labels), test=len(test.labels), bytes=path.stat().st_size, validation=validation)


def _exchange(part: Path, folder: Path, replaced: Path, card: StoreCard) -> None:
    """Replace the prepared data set in `folder`, if there is one, with the finished data set in `part`.

    The older folder is first renamed to `replaced` and finally deleted. Processes that have mapped its files into
    memory can still read them.
    """
    keep = {
        CARD,
        COPIES,
        SOURCES,
        Scratch.LOG,
        *(f"{name}.arrow" for name in card.domains),
        *([CORRUPT] if card.skipped else []),
    }
    for path in part.iterdir():
        if path.name not in keep:
            path.unlink()
    if folder.exists():
        folder.rename(replaced)
    part.rename(folder)
    (folder / Scratch.LOG).unlink()
    shutil.rmtree(replaced, ignore_errors=True)
