"""The same numbers after a round: how far the tensors of the two sides are apart."""

import math
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from .ours import Fedsweep
from .released import Comparison, Released
from .setting import BATCH, PLAYED, TOLERANCE, UNEQUAL, Batch, normalised

Groups = dict[str, dict[str, float]]
"""By group of tensors: their number, the largest difference, and how far they moved from the start."""


def agreement(code: Path, comparison: Comparison) -> list[Groups]:
    """Both sides through the same rounds: what is found after each."""
    ours = Fedsweep(comparison.method, 0.0, UNEQUAL)
    theirs = Released(code, comparison, ours.weights(), 0.0)
    start = ours.state.adapter
    theirs.load(start)
    found = []
    for number in PLAYED:
        parts, matrix = theirs.deal(number)
        loaders = [_whole_epoch(*one) for one in zip(ours.play(number, matrix), UNEQUAL, strict=True)]
        for place, part in enumerate(parts):
            theirs.train(place, number, part, loaders)
        theirs.aggregate()
        groups: Groups = {}
        for name, tensor in theirs.adapter(list(start)).items():
            group = groups.setdefault(_group(name), {"tensors": 0, "difference": 0.0, "moved": 0.0})
            group["tensors"] += 1
            # Not by max(a, b), which a NaN would pass.
            for key, other in (("difference", ours.state.adapter[name]), ("moved", start[name])):
                group[key] = np.maximum(group[key], (tensor - other).abs().max().item()).item()
        found.append(groups)
    return found


def _whole_epoch(seen: list[Batch], images: int) -> list[Batch]:
    """A loader of what a client of ours saw; what lies beyond the cap on steps would spoil whoever looks at it."""
    epoch = math.ceil(images / BATCH)
    if len(seen) != min(epoch, math.ceil(min(UNEQUAL) / BATCH) + 1):
        raise RuntimeError(f"{len(seen)} batches of a client with {images} images were seen")
    batches = normalised(seen)
    beyond = torch.full_like(batches[0][0], math.nan), batches[0][1]
    return batches + [beyond] * (epoch - len(seen))


def _group(name: str) -> str:
    """The tensor's place in any block, e.g. `attn.proj.lora_A`."""
    parts = name.removesuffix(".weight").removesuffix(".default").removeprefix("backbone.").split(".")
    return ".".join(part for part in parts if part != "blocks" and not part.isdigit())


def agree(groups: Groups) -> bool:
    """Whether all differences are within the tolerance, of tensors that moved by far more than that."""
    return all(one["difference"] <= TOLERANCE and one["moved"] > 10 * TOLERANCE for one in groups.values())


def table(compared: dict[str, list[Groups]]) -> Table:
    """The largest differences, by method and group."""
    made = Table("method", "tensors", "", *(f"round {n}" for n in PLAYED), "moved", title="Largest differences")
    for method, rounds in compared.items():
        for group, last in rounds[-1].items():
            differences = [f"{one[group]['difference']:.1e}" for one in rounds]
            made.add_row(method, group, str(last["tensors"]), *differences, f"{last['moved']:.1e}")
        made.add_section()
    return made
