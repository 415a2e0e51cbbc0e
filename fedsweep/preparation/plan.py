"""The plan of a preparation: the domain, label, split and position of each image."""

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path

import numpy as np

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.data.prepared.card import store_folder
from fedsweep.preparation.decode import MADE_WITH, Chunk, Geometry, geometry_of
from fedsweep.preparation.layouts import find
from fedsweep.preparation.layouts.base import Item, Layout, Listing, Split

Progress = Callable[[int, int], None]  # called with the number of finished images and the number of all images
SPLIT_SEED = 0  # constant, so that a data set has the same split in every run, whatever the run's seed


@dataclass(frozen=True)
class DomainPlan:
    """The images of a domain, in the order of the layout's listing.

    Reading the images is fastest in this order. `slots[i]` is the position of `items[i]` in the prepared data set. The
    first `train` positions belong to training images, and the others belong to test images. Within each split, images
    are sorted by label and then by path.
    """

    name: str
    items: tuple[Item, ...]
    slots: tuple[int, ...]
    train: int

    def parts(self, corrupt: Set[str]) -> tuple[list[tuple[int, Item]], list[tuple[int, Item]]]:
        """Return the training images and the test images, except those whose paths are in `corrupt`.

        Each image is paired with its slot, that is, its position in the prepared data set. Both lists are sorted by
        slot.
        """
        pairs = zip(self.slots, self.items, strict=True)
        kept = sorted((pair for pair in pairs if pair[1].path not in corrupt), key=itemgetter(0))
        train = sum(slot < self.train for slot, _ in kept)
        return kept[:train], kept[train:]


def plan_domains(listing: Listing, test_fraction: float) -> tuple[DomainPlan, ...]:
    """Return the plan of each domain, which assigns every image to training or test and to a position in the domain.

    Images that the data set itself does not assign are divided at random. In each class, the fraction `test_fraction`
    of these images is used for testing. Raise UserError if a domain has no training images or no test images.
    """
    by_domain: dict[str, list[Item]] = {name: [] for name in listing.domains}
    for item in listing.items:
        by_domain[item.domain].append(item)
    return tuple(_domain(name, items, listing.class_names, test_fraction) for name, items in by_domain.items())


def _domain(name: str, items: Sequence[Item], class_names: Sequence[str], test_fraction: float) -> DomainPlan:
    drawn = _draw(name, items, class_names, test_fraction)
    splits: list[Split] = [item.split or drawn[item.path] for item in items]
    for split, purpose in (("train", "training"), ("test", "testing")):
        if split not in splits:
            raise UserError(
                f"the domain `{name}` must have images for training and for testing, but it has none for {purpose} "
                f"(of {len(items)} in total)."
            )
    order = sorted(range(len(items)), key=lambda i: (splits[i] == "test", items[i].label, items[i].path))
    slots = np.argsort(order).tolist()  # the inverse permutation
    return DomainPlan(name, tuple(items), tuple(slots), splits.count("train"))


def _draw(name: str, items: Sequence[Item], class_names: Sequence[str], test_fraction: float) -> dict[str, Split]:
    """Divide the images without a split at random, and return the split of each of these images, keyed by path.

    In each class, the fraction `test_fraction` of these images is used for testing. If a class has two or more of these
    images, at least one is used for training and at least one for testing. A single image is used for training. The
    result does not depend on the seed of a run.
    """
    by_label: dict[int, list[str]] = defaultdict(list)
    for item in items:
        if item.split is None:
            by_label[item.label].append(item.path)
    drawn: dict[str, Split] = {}
    for label, paths in by_label.items():
        paths.sort()
        tests = min(max(round(test_fraction * len(paths)), 1), len(paths) - 1)
        order = stream(SPLIT_SEED, "split", name, class_names[label]).permutation(len(paths)).tolist()
        drawn.update((paths[place], "test" if rank < tests else "train") for rank, place in enumerate(order))
    return drawn


SMALLEST, LARGEST = 8, 1024
NAME = re.compile(r"\w[\w.+-]{0,99}", re.ASCII)


@dataclass(frozen=True)
class Options:
    """The arguments of `fedsweep data prepare` from which a plan is made, except for `--root`."""

    name: str
    size: int = 224
    layout: str | None = None
    backbone: str | None = None
    test_fraction: float = 0.2
    classes: int | None = None

    def check(self) -> None:
        """Raise UserError if an option is invalid."""
        if not NAME.fullmatch(self.name):
            raise UserError(f"NAME must be a folder name of letters, digits and `_ . + -`, but it is `{self.name}`.")
        if not SMALLEST <= self.size <= LARGEST:
            raise UserError(f"`--size` must be between {SMALLEST} and {LARGEST} pixels, but it is {self.size}.")
        if not 0 < self.test_fraction < 1:
            raise UserError(f"`--test-fraction` must be between 0 and 1, but it is {self.test_fraction}.")
        if self.classes is not None and self.classes < 1:
            raise UserError(f"`--classes` must be at least 1, but it is {self.classes}.")


@dataclass(frozen=True)
class Plan:
    """All images of a data set, the files that contain them, and their positions in the prepared data set."""

    options: Options
    root: Path
    layout: Layout
    listing: Listing
    geometry: Geometry
    domains: tuple[DomainPlan, ...]
    stamps: dict[str, tuple[int, int]]  # size in bytes and modification time in ns of each file that contains images

    @property
    def folder(self) -> Path:
        """The folder of the prepared data set."""
        return store_folder(self.options.name, self.options.size)

    @property
    def drawn(self) -> bool:
        """True if the split of at least one image is drawn at random."""
        return any(item.split is None for item in self.listing.items)

    @property
    def grouped(self) -> bool:
        """True if the layout assigns at least one image to a group."""
        return any(item.group for item in self.listing.items)

    @property
    def validation_images(self) -> int:
        """The number of images that the data set lists for validation, apart from other test images."""
        return sum(item.validation for item in self.listing.items)

    def key(self, with_groups: bool = True, with_validation: bool = True) -> str:
        """Return the SHA-256 of everything that determines the prepared data set.

        The path of the root folder, the files' modification times and the version of the image decoder are not
        included. Without the groups of the layout or without the listed validation images, the key is that of versions
        of fedsweep that did not record them.
        """
        options = [self.layout.name, asdict(self.geometry), self.options.test_fraction if self.drawn else None]
        items = ([item.path, item.label, item.domain, item.split] for item in self.listing.items)
        lengths = ([path, length] for path, (length, _) in sorted(self.stamps.items()))
        groups = [[item.group for item in self.listing.items]] if with_groups and self.grouped else []
        listed = [_validation(self.listing.items)] if with_validation and self.validation_images else []
        return _sha256([options, self.listing.class_names, self.listing.domains], *items, *lengths, *groups, *listed)

    def times(self) -> str:
        """Return the SHA-256 of the files' modification times.

        If an image has been edited, its modification time is different even if the file size is the same. Equal file
        sizes are common with BMP images.
        """
        return _sha256([(path, time) for path, (_, time) in sorted(self.stamps.items())])

    def chunks(self, domain: DomainPlan, length: int, pixels: Path) -> list[Chunk]:
        """Divide the images of a domain into chunks of at most `length` images.

        The pixels of all chunks will be written to the file `pixels`. The key of a chunk is the SHA-256 of everything
        that determines the pixels of the images and the positions of the images in the file.
        """
        common = [self.layout.name, str(self.root), asdict(self.geometry), MADE_WITH, domain.name]
        chunks = []
        for start in range(0, len(domain.items), length):
            items, slots = domain.items[start : start + length], domain.slots[start : start + length]
            places = [[item.path, slot] for item, slot in zip(items, slots, strict=True)]
            key = _sha256([*common, *places, [self.stamps[file] for file in self.layout.files(items)]])
            chunks.append(Chunk(key, self.layout, self.root, items, slots, self.geometry, pixels))
        return chunks

    def domain_key(self, domain: DomainPlan, chunks: Iterable[Chunk]) -> str:
        """Return the SHA-256 of everything that determines a domain's file.

        It covers the chunks, the class names, the split, the labels and the listed validation images.

        Labels are included because they can change while the chunks stay the same, for example when another domain
        gains a class.
        """
        keys, labels = (chunk.key for chunk in chunks), [item.label for item in domain.items]
        listed = [_validation(domain.items)] if any(item.validation for item in domain.items) else []
        return _sha256([*keys, self.listing.class_names, domain.train, labels], *listed)


def make_plan(options: Options, root: Path, layout: Layout | None = None) -> Plan:
    """Return the plan for preparing the images in the folder `root`.

    The layout is detected unless `layout` or `options.layout` is given.

    Raises:
        UserError: An option is invalid, or the files in `root` cannot be read or do not match the layout.
    """
    options.check()
    root = root.expanduser().absolute()
    if not root.is_dir():
        wrong = "is a file" if root.exists() else "does not exist"
        raise UserError(f"`--root` must be a folder with images, but {root} {wrong}.")
    layout = layout or find(options.name, root, options.layout)
    geometry = geometry_of(options.backbone, options.size) if options.backbone else Geometry(options.size)
    listing = layout.list(root, options.classes)
    if listing.nameless:  # the layout has named the only domain after the root
        named = tuple(replace(item, domain=options.name) for item in listing.items)
        listing = replace(listing, domains=(options.name,), items=named)
    if all(item.split == "train" for item in listing.items):  # without test images, the split is drawn
        listing = replace(listing, items=tuple(replace(item, split=None) for item in listing.items))
    listing = replace(listing, items=tuple(_with_other_tests(listing.items)))
    domains = plan_domains(listing, options.test_fraction)
    try:
        status = {file: os.stat(f"{root}/{file}") for file in layout.files(listing.items)}
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}.") from None
    stamps = {file: (one.st_size, one.st_mtime_ns) for file, one in status.items()}
    return Plan(options, root, layout, listing, geometry, domains, stamps)


def _with_other_tests(items: Sequence[Item]) -> Iterator[Item]:
    """Yield the images of a data set, without validation marks in domains that have no other test images."""
    others = {item.domain for item in items if item.split == "test" and not item.validation}
    for item in items:
        yield replace(item, validation=False) if item.validation and item.domain not in others else item


def _validation(items: Sequence[Item]) -> dict[str, list[str]]:
    return {"validation": [item.path for item in items if item.validation]}


def _sha256(*content: object) -> str:
    found = hashlib.sha256()
    for one in content:
        found.update(json.dumps(one, sort_keys=True).encode())
    return found.hexdigest()
