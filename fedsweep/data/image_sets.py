"""Functions that join image sets, or hold out a part of each set, without copying pixels."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.data.groups import TooFewGroupsError, held_out, linked, wanted
from fedsweep.types import ImageSet, PixelStack


def pool(sets: Sequence[ImageSet]) -> ImageSet:
    """Join image sets into one set without copying pixels. It has groups if all sets have groups."""
    if len(sets) == 1:
        return sets[0]
    parts, rows, start = list[Tensor](), [], 0
    for one in sets:
        parts += one.parts
        rows.append(start + (torch.arange(len(one)) if one.rows is None else one.rows))
        start += len(one.images)
    groups = [one.groups for one in sets if one.groups is not None]
    of_all = torch.cat(groups) if len(groups) == len(sets) else None
    return ImageSet(PixelStack(tuple(parts)), torch.cat([one.labels for one in sets]), torch.cat(rows), of_all)


def hold_out(
    sets: Mapping[str, ImageSet], share: float, seed: int, purpose: str, setting: str | None = None
) -> tuple[dict[str, ImageSet], dict[str, ImageSet]]:
    """Hold out a random `share` of the examples of each set, and return the held-out parts and the rests.

    No group has examples both in a held-out part and in a rest. Sets without groups of several examples are divided
    example by example, each with a random stream of its own. All other sets are divided together.

    Args:
        sets: The sets, keyed by the name of a client or a domain.
        share: The share of the examples of each set that is held out.
        seed: The seed of the run.
        purpose: The purpose of the held-out examples, which selects the random stream.
        setting: The setting that holds out the examples, for error messages; by default `partition.PURPOSE_share`.

    Returns:
        The held-out parts, and the rests. If `share` is 0, there are no held-out parts. All parts keep the original
        order.
    """
    if share == 0:
        return {}, dict(sets)
    asked = f"`{setting or f'partition.{purpose}_share'}` {share:g}"
    for name, whole in sets.items():
        if len(whole) < 2:
            raise UserError(f"{asked} needs at least 2 images, but {name} has {len(whole)}.")
    groups = {name: whole.groups.numpy() for name, whole in sets.items() if whole.groups is not None}
    together = {name: groups[name] for name in linked(groups)}
    try:
        chosen = held_out(together, share, stream(seed, purpose, "groups")) if together else np.array([])
    except TooFewGroupsError as error:
        raise UserError(
            f"{asked} holds out whole groups of images, such as the frames of a video, "
            f"but {error.name} has too few groups: {error.groups}."
        ) from None
    held, rest = {}, {}
    for name, whole in sets.items():
        if name in together:
            out = torch.from_numpy(np.isin(together[name], chosen))
        else:
            order = torch.from_numpy(stream(seed, purpose, name).permutation(len(whole)))
            out = torch.zeros(len(whole), dtype=torch.bool).index_fill(0, order[: wanted(share, len(whole))], True)
        held[name], rest[name] = (whole.select(part.nonzero().flatten()) for part in (out, ~out))
    return held, rest
