"""Which image is for training and which for testing, and its place in the store."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.preparation.sources.base import Item, Listing, Split

SPLIT_SEED = 0  # a data set is one and the same for every run; runs differ in their own seed


@dataclass(frozen=True)
class DomainPlan:
    """The images of a domain in the order in which their source lists them, hence reads them best.

    `slots[i]` is the place of `items[i]` in the store: `train` training images first, each split by label, then path.
    """

    name: str
    items: tuple[Item, ...]
    slots: tuple[int, ...]
    train: int

    def in_order(self) -> list[tuple[int, Item]]:
        """The images with their places, in the order of the store."""
        return sorted(zip(self.slots, self.items, strict=True), key=lambda one: one[0])


def plan_domains(listing: Listing, test_fraction: float) -> tuple[DomainPlan, ...]:
    """Give every image its split and its place.

    Raises:
        UserError: a domain has nothing to train on or nothing to test on.
    """
    by_domain: dict[str, list[Item]] = {name: [] for name in listing.domains}
    for item in listing.items:
        by_domain[item.domain].append(item)
    return tuple(_domain(name, items, listing.class_names, test_fraction) for name, items in by_domain.items())


def _domain(name: str, items: Sequence[Item], class_names: Sequence[str], test_fraction: float) -> DomainPlan:
    drawn = _draw(name, items, class_names, test_fraction)
    splits: list[Split] = [item.split or drawn[item.path] for item in items]
    for split in ("train", "test"):
        if split not in splits:
            raise UserError(
                f"the domain `{name}` must have images to train on and to test on, but of its {len(items)} none is for "
                f"{'training' if split == 'train' else 'testing'}."
            )
    order = sorted(range(len(items)), key=lambda i: (splits[i] == "test", items[i].label, items[i].path))
    slots = [0] * len(items)
    for slot, place in enumerate(order):
        slots[place] = slot
    return DomainPlan(name, tuple(items), tuple(slots), splits.count("train"))


def _draw(name: str, items: Sequence[Item], class_names: Sequence[str], test_fraction: float) -> dict[str, Split]:
    """The split of each path whose layout has none: `test_fraction` of each class, by names alone.

    A class of two images or more has at least one in each split; a single image is for training.
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
