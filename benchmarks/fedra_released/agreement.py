"""The largest differences between the tensors of FedRA's released code and those of fedsweep after a round."""

import math
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from .ours import Fedsweep
from .released import Comparison, Released
from .setting import BATCH, PLAYED, TOLERANCE, UNEQUAL, Batch, normalised

Groups = dict[str, dict[str, float]]
"""For each group of tensors: their number, their largest difference, and their largest change from the start."""


def agreement(code: Path, comparison: Comparison) -> list[Groups]:
    """Return the largest differences between the tensors of the released code and of fedsweep after each round."""
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
            # Not with max(a, b), which can ignore a NaN.
            for key, other in (("difference", ours.state.adapter[name]), ("moved", start[name])):
                group[key] = np.maximum(group[key], (tensor - other).abs().max().item()).item()
        found.append(groups)
    return found


def _whole_epoch(seen: list[Batch], images: int) -> list[Batch]:
    """Return an epoch of batches for a client of the released code: the batches `seen`, then batches of NaN.

    fedsweep's client trained on the batches `seen`, up to the limit on local steps. If the released code reads more
    batches, its tensors become NaN, and the comparison fails.
    """
    epoch = math.ceil(images / BATCH)
    if len(seen) != min(epoch, math.ceil(min(UNEQUAL) / BATCH) + 1):
        raise RuntimeError(f"{len(seen)} batches of a client with {images} images were seen")
    batches = normalised(seen)
    beyond = torch.full_like(batches[0][0], math.nan), batches[0][1]
    return batches + [beyond] * (epoch - len(seen))


def _group(name: str) -> str:
    """Return the name of a tensor without the number of its block, e.g. `attn.proj.lora_A`."""
    parts = name.removesuffix(".weight").removesuffix(".default").removeprefix("backbone.").split(".")
    return ".".join(part for part in parts if part != "blocks" and not part.isdigit())


def agree(groups: Groups) -> bool:
    """Return whether all tensors differ by at most the tolerance and changed by more than ten times the tolerance."""
    return all(one["difference"] <= TOLERANCE and one["moved"] > 10 * TOLERANCE for one in groups.values())


def table(compared: dict[str, list[Groups]]) -> Table:
    """Return a table of the largest differences between tensors, with a row for each method and group of tensors."""
    made = Table("method", "tensors", "", *(f"round {n}" for n in PLAYED), "change", title="Largest differences")
    for method, rounds in compared.items():
        for group, last in rounds[-1].items():
            differences = [f"{one[group]['difference']:.1e}" for one in rounds]
            made.add_row(method, group, str(last["tensors"]), *differences, f"{last['moved']:.1e}")
        made.add_section()
    return made
