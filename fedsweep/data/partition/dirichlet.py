"""Dirichlet label skew (Hsu, Qi and Brown, 2019; FedRA's and FedMS's experiments)."""

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedsweep.common.errors import UserError

TRIES = 1000
Alpha = Annotated[float, Field(gt=0, le=1e6, description="Dirichlet concentration; small: few classes per client")]
MinSize = Annotated[
    int, Field(gt=0, description="images that every client has at least; shares are drawn anew until it is so")
]


def deal_by_dirichlet(
    labels: Tensor, clients: int, alpha: float, min_size: int, rng: np.random.Generator, whose: str
) -> list[Tensor]:
    """Positions of each client's examples, ascending. `whose` names the images in the sentence of a refusal.

    Class by class, the examples in random order are cut at the cumulative shares p ~ Dirichlet(alpha, ..., alpha).
    All shares are drawn anew until every client has `min_size` examples.

    Raises:
        UserError: there are too few examples, or no draw out of many gave every client enough.
    """
    if clients * min_size > len(labels):
        raise UserError(
            f"`partition.min_size` {min_size} for each of {clients} clients needs {clients * min_size} images, "
            f"but {whose} has {len(labels)}."
        )
    of_example = labels.numpy()
    classes = [rng.permutation(np.flatnonzero(of_example == label)) for label in np.unique(of_example)]
    counts = np.array([len(positions) for positions in classes])[:, None]
    best = 0
    for _ in range(TRIES):
        shares = rng.dirichlet(np.full(clients, alpha), size=len(classes))
        ends = np.rint(shares.cumsum(axis=1) * counts).astype(np.int64)  # (classes, clients)
        ends[:, -1] = counts[:, 0]  # whatever the sum's last digits
        smallest = int(np.diff(ends, prepend=0, axis=1).sum(axis=0).min())
        if smallest >= min_size:
            parts = [np.split(positions, end[:-1]) for positions, end in zip(classes, ends, strict=True)]
            return [torch.from_numpy(np.sort(np.concatenate(mine))) for mine in zip(*parts, strict=True)]
        best = max(best, smallest)
    raise UserError(
        f"`partition.alpha` {alpha:g} leaves one of the {clients} clients of {whose} with fewer images than "
        f"`partition.min_size` {min_size} in each of {TRIES} draws (at best {best} of {len(labels)}); "
        "a larger alpha, fewer clients or a smaller minimum would do."
    )
