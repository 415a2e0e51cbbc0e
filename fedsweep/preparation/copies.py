"""Functions that find exact copies among decoded images, and keep each group of images on one side of a drawn split."""

import hashlib
import mmap
from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.data.groups import TooFewGroupsError, held_out, linked, merged, repeated
from fedsweep.data.prepared.arrow_files import map_domain, map_file, record_batch, write_domain
from fedsweep.data.prepared.card import COPIES, CopiesCard
from fedsweep.preparation.layouts.base import BOTH, Item, Split
from fedsweep.preparation.plan import SPLIT_SEED, DomainPlan, Plan

RELEASE = 256  # images that are hashed before the memory of the file is released


@dataclass(frozen=True)
class _Image:
    """An image in the file of a domain, with its split and the digest of its pixels."""

    item: Item
    split: Split
    pixels: str


def keep_groups_together(plan: Plan, folder: Path, corrupt: Set[str]) -> CopiesCard:
    """Find the groups of a prepared data set, and write the domains' files again if a group has several images.

    Images of the same pixels are one group, and so are images that the layout assigns to the same group. The new files
    contain the group of each image. A split that was drawn at random is drawn again for all classes with groups of
    several images. A split that the data set comes with is left as it is.

    Args:
        plan: The plan of the data set.
        folder: The folder with the domains' files, to which a list of all exact copies is written.
        corrupt: The paths of images that are not in the files.

    Raises:
        UserError: The images of a domain belong to a single group, so that it has no training or no test images.
    """
    of_domain = {domain.name: _images(domain, folder, corrupt) for domain in plan.domains}
    images = [image for own in of_domain.values() for image in own]
    groups = merged(
        [[image.pixels, *([f"group {image.item.group}"] * (image.item.group is not None))] for image in images]
    )
    if not repeated(groups):
        return CopiesCard(groups=0, both_splits=0, other_classes=0)
    splits = _splits(plan, images, groups)
    first = 0
    for name, own in of_domain.items():
        here = slice(first, first := first + len(own))
        _rewrite(folder / f"{name}.arrow", own, splits[here], groups[here])
    return _list_copies(images, splits, groups, folder / COPIES)


def _images(domain: DomainPlan, folder: Path, corrupt: Set[str]) -> list[_Image]:
    """Return the images of a domain in the order of its file."""
    found = []
    parts = zip(map_domain(folder / f"{domain.name}.arrow"), domain.parts(corrupt), BOTH, strict=True)
    for part, planned, split in parts:
        for row, (_, item) in enumerate(planned):
            found.append(_Image(item, split, hashlib.blake2b(part.images[row].data, digest_size=16).hexdigest()))
            if row % RELEASE == 0:
                part.pages.madvise(mmap.MADV_DONTNEED)
    return found


def _splits(plan: Plan, images: Sequence[_Image], groups: Sequence[int]) -> list[Split]:
    """Return the split of each image, so that no group of images without a listed split is on two sides.

    A group with a listed training image is a training group, and one with listed test images only is a test group.
    """
    listed: dict[int, Split] = {}
    for image, group in zip(images, groups, strict=True):
        if image.item.split is not None and listed.get(group) != "train":
            listed[group] = image.item.split
    sets: dict[str, list[int]] = defaultdict(list)
    for image, group in zip(images, groups, strict=True):
        if image.item.split is None and group not in listed:
            sets[f"{image.item.domain}/{plan.listing.class_names[image.item.label]}"].append(group)
    arrays = {name: np.array(own) for name, own in sets.items()}
    drawn = {name: arrays[name] for name in linked(arrays)}
    tests = _test_groups(drawn, plan.options.test_fraction)
    again = {group for own in drawn.values() for group in own.tolist()}
    splits: list[Split] = []
    for image, group in zip(images, groups, strict=True):
        split = image.item.split or listed.get(group)
        if split is None:
            split = image.split if group not in again else "test" if group in tests else "train"
        splits.append(split)
    return splits


def _test_groups(sets: dict[str, np.ndarray], fraction: float) -> set[int]:
    """Draw test groups from the classes `sets`. A class with too few groups gets none of its own."""
    sets = {name: own for name, own in sets.items() if len(np.unique(own)) > 1}
    while sets:
        try:
            return set(held_out(sets, fraction, stream(SPLIT_SEED, "split", "groups")).tolist())
        except TooFewGroupsError as error:
            del sets[error.name]
    return set()


def _rewrite(path: Path, images: Sequence[_Image], splits: Sequence[Split], groups: Sequence[int]) -> None:
    """Write the file of a domain again, with the new split and the group of each image."""
    for split, purpose in (("train", "training"), ("test", "testing")):
        if split not in splits:
            raise UserError(
                f"the domain `{path.stem}` must have images for training and for testing, but it has none for "
                f"{purpose}, because too many of its images are exact copies or belong to the same group."
            )
    order = sorted(range(len(images)), key=lambda i: (splits[i] == "test", images[i].item.label, images[i].item.path))
    train, test = map_domain(path)
    size, kept = train.images.shape[-1], path.with_suffix(".kept")
    with kept.open("wb") as sink:
        for image in order:
            in_train = image < len(train.labels)
            sink.write((train.images[image] if in_train else test.images[image - len(train.labels)]).data)
    pages, count = map_file(kept), splits.count("train")
    pixels = np.frombuffer(pages, np.uint8).reshape(-1, 3, size, size)
    batches = []
    for part in (slice(count), slice(count, None)):
        items = [images[image].item for image in order[part]]
        of_part = [groups[image] for image in order[part]]
        batches.append(record_batch(pixels[part], [one.label for one in items], [one.path for one in items], of_part))
    new = path.with_suffix(".arrow.new")
    write_domain(new, batches[0], batches[1], pages)
    new.replace(path)
    kept.unlink()


def _list_copies(images: Sequence[_Image], splits: Sequence[Split], groups: Sequence[int], path: Path) -> CopiesCard:
    """List the exact copies in the file `path`, one line for the paths of each group, and return their numbers."""
    alike: dict[str, list[int]] = defaultdict(list)
    for place, image in enumerate(images):
        alike[image.pixels].append(place)
    copies = [places for places in alike.values() if len(places) > 1]
    names = (sorted(f"{images[place].item.domain}:{images[place].item.path}" for place in own) for own in copies)
    lines = ["\t".join(own) for own in names]
    if lines:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    sides = Counter(group for group, _ in {*zip(groups, splits, strict=True)})
    return CopiesCard(
        groups=len(copies),
        both_splits=sum(count > 1 for count in sides.values()),
        other_classes=sum(len({images[place].item.label for place in own}) > 1 for own in copies),
    )
