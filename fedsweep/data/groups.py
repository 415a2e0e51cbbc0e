"""Functions that hold out whole groups of images, so that a group is never on two sides of a split.

A group contains all images of the same thing: the renderings of one scan, the frames of one video, or exact copies of
one image. A model that was trained on an image of a group knows the others, so they cannot test or validate it.
This module does not import torch, so that `fedsweep data prepare` starts quickly.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fedsweep.common.errors import UserError
from fedsweep.types import FederatedData


class TooFewGroupsError(Exception):
    """The error raised if a set cannot be divided, because its images belong to too few groups."""

    def __init__(self, name: str, groups: int) -> None:
        super().__init__(name)
        self.name, self.groups = name, groups


def linked(sets: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of the sets with a group that has several images, in the same set or in different sets.

    `sets` maps a name to the group of each image, int64 (n,). All other sets can be divided image by image.
    """
    groups, counts = np.unique(np.concatenate([np.array([], np.int64), *sets.values()]), return_counts=True)
    several = groups[counts > 1]
    return [name for name, own in sets.items() if np.isin(own, several).any()] if len(several) else []


def wanted(share: float, images: int) -> int:
    """Return the number of images to hold out of `images` images: at least 1, and at most all except one."""
    return min(max(round(share * images), 1), images - 1)


def held_out(sets: Mapping[str, np.ndarray], share: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the groups that are held out of all sets together.

    The groups are visited in random order. A group is held out if this brings the numbers of held-out images closer to
    `share` of each set, summed over the sets, and leaves an image in every set. If no image of a set is held out
    afterwards, one more group is held out.

    Args:
        sets: The group of each image, int64 (n,), keyed by the name of the set. No set is empty.
        share: The share of each set that is held out.
        rng: The random generator.

    Returns:
        The groups that are held out, in ascending order.

    Raises:
        TooFewGroupsError: A set cannot keep an image and have another one held out.
    """
    names, sizes = list(sets), np.array([len(own) for own in sets.values()])
    need, left = np.array([wanted(share, int(size)) for size in sizes]), sizes.copy()
    members: dict[int, list[tuple[int, int]]] = {}  # for each group, the numbers of sets and of images in these sets
    for place, own in enumerate(sets.values()):
        for group, count in zip(*np.unique(own, return_counts=True), strict=True):
            members.setdefault(int(group), []).append((place, int(count)))
    order = [int(group) for group in rng.permutation(np.sort(np.fromiter(members, np.int64)))]
    out: set[int] = set()

    def hold(group: int) -> bool:
        """Hold out `group` unless a set would be left without images."""
        if group in out or any(count >= left[place] for place, count in members[group]):
            return False
        out.add(group)
        for place, count in members[group]:
            need[place] -= count
            left[place] -= count
        return True

    for group in order:
        if sum(abs(need[place] - count) - abs(need[place]) for place, count in members[group]) < 0:
            hold(group)
    for place, name in enumerate(names):
        if left[place] == sizes[place] and not any(hold(group) for group in order if place in dict(members[group])):
            raise TooFewGroupsError(name, len(np.unique(sets[name])))
    return np.sort(np.fromiter(out, np.int64))


def check_groups_known(data: FederatedData, setting: str) -> None:
    """Raise UserError if the groups of the images are unknown. `setting` is the setting that holds out images."""
    if not data.groups_known:
        raise UserError(
            f"{setting} holds out whole groups of images, but {data.name} was prepared by an older version of fedsweep "
            f"that recorded no groups; prepare it again with `fedsweep data prepare {data.name} ... --force`."
        )


def labels_of_groups(groups: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the groups, and the label and the number of images of each group.

    The label of a group is the most frequent label of its images, and the smallest of these if there are several.

    Args:
        groups: The group of each image, int64 (n,).
        labels: The label of each image, int64 (n,).

    Returns:
        The place of each image's group (n,), the label of each group (g,), and the size of each group (g,).
    """
    _, of_image, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    span = int(labels.max(initial=0)) + 1
    pairs, counts = np.unique(of_image * span + labels, return_counts=True)
    owners, own = np.divmod(pairs, span)
    order = np.lexsort((-own, counts))  # of a group's pairs, the last one has the most images, and the smallest label
    chosen = np.empty(len(sizes), np.int64)
    chosen[owners[order]] = own[order]
    return of_image, chosen, sizes


def merged(keys: Sequence[Sequence[str]]) -> list[int]:
    """Return a group for each image, so that images that share a key, even through other images, are one group.

    Args:
        keys: The keys of each image, such as the name of its video and the digest of its pixels.

    Returns:
        The number of each image's group. Groups are numbered in the order of their first images.
    """
    first: dict[str, int] = {}
    parent = list(range(len(keys)))

    def root(image: int) -> int:
        while parent[image] != image:
            parent[image] = image = parent[parent[image]]
        return image

    for image, own in enumerate(keys):
        for key in own:
            one, other = sorted((root(first.setdefault(key, image)), root(image)))
            parent[other] = one
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(image), len(numbers)) for image in range(len(keys))]


def repeated(groups: Sequence[int]) -> bool:
    """Return whether a group has several images."""
    return max(Counter(groups).values(), default=0) > 1
