"""Functions that divide images among clients, so that a group of images never reaches two clients."""

from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.data.groups import labels_of_groups
from fedsweep.types import ImageSet

TRIES = 1000


def deal_by_dirichlet(
    images: ImageSet, clients: int, alpha: float, min_size: int, rng: np.random.Generator, whose: str
) -> list[Tensor]:
    """Divide the examples of each class among clients in proportions drawn from a Dirichlet distribution.

    The examples of a class are shuffled and divided in the proportions p ~ Dirichlet(alpha, ..., alpha). The
    proportions of all classes are redrawn until every client has at least `min_size` examples. The examples of a group
    stay together and belong to the most frequent label of the group, so the proportions are met up to half a group.

    Args:
        images: The examples to divide.
        clients: The number of clients.
        alpha: The concentration of the Dirichlet distribution; a small value gives each client few classes.
        min_size: The smallest number of examples per client.
        rng: The random generator.
        whose: The source of the examples, e.g. "domain art", for error messages.

    Returns:
        For each client, the positions of its examples in `images`, in ascending order.

    Raises:
        UserError: There are too few examples, or no draw gives every client `min_size` examples.
    """
    if clients * min_size > len(images):
        raise UserError(
            f"`partition.min_size` {min_size} for each of {clients} clients needs {clients * min_size} images, "
            f"but {whose} has {len(images)}."
        )
    of_example, labels, sizes = _grouped(images)
    classes = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    order = np.concatenate(classes)  # all groups, class by class
    before = np.concatenate([[0], sizes[order].cumsum()])  # number of examples in the first 0, 1, 2, ... groups
    middles = (before[:-1] + before[1:]) / 2  # a group is dealt with the side that has its middle
    edges = np.concatenate([[0], np.cumsum([len(own) for own in classes])])
    starts, counts = before[edges[:-1], None], np.diff(before[edges])[:, None]
    best = 0
    for _ in range(TRIES):
        shares = rng.dirichlet(np.full(clients, alpha), size=len(classes))
        places = starts + np.rint(shares.cumsum(axis=1) * counts)[:, :-1]  # the sum of all shares is 1 up to rounding
        ends = np.concatenate([np.searchsorted(middles, places), edges[1:, None]], axis=1)  # (classes, clients)
        smallest = int(np.diff(before[ends], prepend=starts, axis=1).sum(axis=0).min())
        if smallest >= min_size:
            client = np.tile(np.arange(clients), len(classes)).repeat(np.diff(ends.flatten(), prepend=0))
            return _examples(of_example, order, client, clients)
        best = max(best, smallest)
    raise UserError(
        f"`partition.alpha` {alpha:g} leaves one of the {clients} clients of {whose} with fewer images than "
        f"`partition.min_size` {min_size} in each of {TRIES} draws (at best {best} of {len(images)}); "
        "increase alpha, or decrease the number of clients or the minimum."
    )


def deal_evenly(images: ImageSet, clients: int, rng: np.random.Generator) -> list[Tensor]:
    """Divide the examples among clients at random, so that the numbers of examples are as equal as possible.

    Without groups of several examples, the numbers differ by at most one. Otherwise, the groups are dealt in random
    order, each to the client with the fewest examples so far.

    Returns:
        For each client, the positions of its examples in `images`, in ascending order.

    Raises:
        UserError: There are fewer groups than clients.
    """
    of_example, _, sizes = _grouped(images)
    if len(sizes) < clients:
        what = "images" if len(sizes) == len(images) else "groups of images"
        raise UserError(f"`partition.clients` must be at most {len(sizes)}, the number of {what}, but it is {clients}.")
    order = rng.permutation(len(sizes))
    if len(sizes) == len(images):
        lengths = [len(part) for part in np.array_split(order, clients)]
        return _examples(of_example, order, np.arange(clients).repeat(lengths), clients)
    loads, dealt = [(0, client) for client in range(clients)], []
    for size in sizes[order].tolist():
        load, client = heappop(loads)
        dealt.append(client)
        heappush(loads, (load + size, client))
    return _examples(of_example, order, np.array(dealt), clients)


def _grouped(images: ImageSet) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the place of each example's group, and the label and the size of each group."""
    labels = images.labels.numpy()
    if images.groups is None:
        return np.arange(len(labels)), labels, np.ones(len(labels), np.int64)
    return labels_of_groups(images.groups.numpy(), labels)


def _examples(of_example: np.ndarray, groups: np.ndarray, clients_of_groups: np.ndarray, clients: int) -> list[Tensor]:
    """Return the positions of each client's examples, in ascending order.

    Args:
        of_example: The group of each example (n,), numbered from 0.
        groups: All groups (g,), in any order.
        clients_of_groups: The client of each group in `groups` (g,), numbered from 0.
        clients: The number of clients.
    """
    client_of = np.empty_like(clients_of_groups)
    client_of[groups] = clients_of_groups
    of_each = client_of[of_example]
    ends = np.bincount(of_each, minlength=clients).cumsum()
    return [torch.from_numpy(part) for part in np.split(np.argsort(of_each, kind="stable"), ends[:-1])]
