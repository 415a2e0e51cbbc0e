"""Functions that find exact copies among decoded images, and keep each group of images on one side of a drawn split."""

import hashlib
import mmap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.data.groups import TooFewGroupsError, held_out, linked, merged, repeated
from fedsweep.data.prepared.arrow_files import map_domain, map_file, record_batch, write_domain
from fedsweep.data.prepared.card import COPIES, CopiesCard
from fedsweep.preparation.layouts.base import BOTH, Item, Split
from fedsweep.preparation.plan import SPLIT_SEED, DomainPlan, Plan, Progress

RELEASE = 256  # images that are hashed before the memory of the file is released


@dataclass(frozen=True)
class _Image:
    """An image in the file of a domain, with its split and the digest of its pixels."""

    item: Item
    split: Split
    pixels: str


@dataclass(frozen=True)
class Groups:
    """The groups of a data set's images, and the split that keeps each group on one side where possible.

    `images` maps each domain to its images, in the order of its file. `groups` and `splits` contain the group and the
    new split of each image of all domains. `copies` contains the images of each group of identical pixels.
    """

    images: dict[str, list[_Image]]
    groups: list[int]
    splits: list[Split]
    copies: list[list[str]]
    card: CopiesCard

    def write(self, folder: Path) -> None:
        """Write the domains' files again if a group has several images, and list all exact copies in a file."""
        if not repeated(self.groups):
            return
        first = 0
        for name, own in self.images.items():
            here = slice(first, first := first + len(own))
            _rewrite(folder / f"{name}.arrow", own, self.splits[here], self.groups[here])
        if self.copies:
            text = "".join("\t".join(own) + "\n" for own in self.copies)
            (folder / COPIES).write_text(text, encoding="utf-8")


def find_groups(plan: Plan, folder: Path, corrupt: Set[str], progress: Progress = lambda done, total: None) -> Groups:
    """Find the groups of a decoded data set, and draw a split that keeps them together.

    Images of the same pixels are one group, and so are images that the layout assigns to the same group. A split that
    was drawn at random is drawn again for all classes with groups of several images. A split that the data set comes
    with is left as it is.

    Args:
        plan: The plan of the data set.
        folder: The folder with the domains' files.
        corrupt: The paths of images that are not in the files.
        progress: A function that is called with the number of compared images and the total number of images.

    Raises:
        UserError: A file does not contain the planned images.
    """
    of_domain: dict[str, list[_Image]] = {}
    total = sum(item.path not in corrupt for item in plan.listing.items)
    for domain in plan.domains:
        before = sum(map(len, of_domain.values()))
        of_domain[domain.name] = own = []
        for image in _images(domain, folder, corrupt):
            own.append(image)
            if len(own) % RELEASE == 1:
                progress(before + len(own) - 1, total)
    progress(total, total)
    images = [image for own in of_domain.values() for image in own]
    groups = merged(
        [
            [image.pixels] if image.item.group is None else [image.pixels, f"group {image.item.group}"]
            for image in images
        ]
    )
    splits = _splits(plan, images, groups)
    alike: dict[str, list[Item]] = defaultdict(list)
    for image in images:
        alike[image.pixels].append(image.item)
    copies = [own for own in alike.values() if len(own) > 1]
    named = [sorted(f"{item.domain}:{item.path}" for item in own) for own in copies]
    sides = Counter(group for group, _ in {*zip(groups, splits, strict=True)})
    tests = {
        (group, image.item.validation)
        for group, image, split in zip(groups, images, splits, strict=True)
        if split == "test"
    }
    card = CopiesCard(
        groups=len(copies),
        both_splits=sum(count > 1 for count in sides.values()),
        both_tests=len(tests) - len({group for group, _ in tests}),
        other_classes=sum(len({item.label for item in own}) > 1 for own in copies),
        example=tuple(named[0]) if named else (),
        without_test=_emptied(images, splits, "test", plan.listing.class_names),
        without_training=_emptied(images, splits, "train", plan.listing.class_names),
    )
    return Groups(of_domain, groups, splits, named, card)


def _images(domain: DomainPlan, folder: Path, corrupt: Set[str]) -> Iterator[_Image]:
    """Yield the images of a domain in the order of its file.

    Raise UserError unless the paths and labels in the file match the plan. The check is necessary because the digest of
    the data set does not cover the paths.
    """
    path = folder / f"{domain.name}.arrow"
    for part, planned, split in zip(map_domain(path), domain.parts(corrupt), BOTH, strict=True):
        written = zip(part.labels.tolist(), part.paths.to_pylist(), strict=True)
        if [*written] != [(item.label, item.path) for _, item in planned]:
            raise UserError(
                f"{path} contains other labels or images than planned; delete {folder} and run the same command again."
            )
        for row, (_, item) in enumerate(planned):
            yield _Image(item, split, hashlib.blake2b(part.images[row].data, digest_size=16).hexdigest())
            if row % RELEASE == 0:
                part.pages.madvise(mmap.MADV_DONTNEED)


def _splits(plan: Plan, images: Sequence[_Image], groups: Sequence[int]) -> list[Split]:
    """Return the split of each image, so that no group of images without a listed split is on two sides.

    A group with a listed training image is a training group, and one with listed test images only is a test group. If
    this leaves a domain without training or test images, the domain keeps the split of the plan.
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
    sides = {(image.item.domain, split) for image, split in zip(images, splits, strict=True)}
    return [
        split if {(image.item.domain, one) for one in BOTH} <= sides else image.split
        for image, split in zip(images, splits, strict=True)
    ]


def listed_for_validation(part: Sequence[Item], domain: Sequence[Item]) -> list[bool] | None:
    """Return, for each image of a part of a domain, whether it is listed for validation.

    Return None if no image of the domain is listed for validation.
    """
    return [item.validation for item in part] if any(item.validation for item in domain) else None


def _emptied(
    images: Sequence[_Image], splits: Sequence[Split], side: Split, class_names: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return, for each domain, the classes with images on a side of the planned split but not on that of `splits`."""
    before = {(image.item.domain, image.item.label) for image in images if image.split == side}
    after = {
        (image.item.domain, image.item.label) for image, split in zip(images, splits, strict=True) if split == side
    }
    found: dict[str, tuple[str, ...]] = {}
    for domain, label in sorted(before - after):
        found[domain] = (*found.get(domain, ()), class_names[label])
    return found


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
        listed = listed_for_validation(items, [image.item for image in images])
        batches.append(
            record_batch(pixels[part], [one.label for one in items], [one.path for one in items], of_part, listed)
        )
    new = path.with_suffix(".arrow.new")
    write_domain(new, batches[0], batches[1], pages)
    new.replace(path)
    kept.unlink()
