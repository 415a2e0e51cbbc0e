"""The CPU time and the peak memory of a FedRA round with the released code and with fedsweep."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedsweep.types import ClientId, ClientUpdate, LayerAllocation

from .ours import Fedsweep
from .released import COMPARISONS, EVERYONE, Released
from .setting import BATCH, DEPTHS, DROPOUT, EQUAL, EVALUATIONS, TESTED, normalised

SIDES = ("released", "fedsweep", "fedsweep, paper")
"""The compared programs. The last one has no LoRA in the patch embedding, like the paper and fedsweep's default."""

LABELS = {
    "training_ms_per_layer_sample": "training, ms / (layer x image)",
    "server_ms_per_round": "server, ms per round",
    "evaluation_ms_per_image": "evaluation, ms / image",
}

ROUNDS, EVALUATED = 100, 8
"""The number of rounds of the released main loop, and of the rounds after which it evaluates the model."""
TRAINED, HELD_OUT = sum(EQUAL), sum(EQUAL) * 3 // 7
"""The number of training images and of test images of a run, in DomainNet's proportion of about 7 to 3."""

Step = tuple[str, Callable[[], object]]
"""The kind of a step of a round (server, training or evaluation), and a function that runs the step."""


def player(side: str, code: Path) -> Callable[[int], Iterator[Step]]:
    """Return a function that yields the steps of a round of the program `side`. All programs have the same steps."""
    ours = Fedsweep(COMPARISONS["fedra"].method, DROPOUT, EQUAL, patch_embed=side != "fedsweep, paper")
    return _player_released(code, ours) if side == "released" else partial(_play_ours, ours)


def _play_ours(ours: Fedsweep, number: int) -> Iterator[Step]:
    rows: dict[ClientId, LayerAllocation] = {}
    updates: list[ClientUpdate] = []
    yield "server", lambda: rows.update(ours.allocate(number))
    for client in ours.clients:
        yield "training", partial(lambda one: updates.extend(ours.train(number, rows, [one])), client)
    yield "server", lambda: ours.aggregate(updates)
    yield from [("evaluation", ours.evaluate)] * EVALUATIONS


def _player_released(code: Path, ours: Fedsweep) -> Callable[[int], Iterator[Step]]:
    theirs = Released(code, COMPARISONS["fedra"], ours.weights(), DROPOUT)
    theirs.load(ours.state.adapter)
    test = normalised(ours.test.batches(BATCH))
    loaders = [normalised(client.train.batches(BATCH)) for client in ours.clients]

    def play(number: int) -> Iterator[Step]:
        parts: list[dict[str, Tensor]] = []
        yield "server", lambda: parts.extend(theirs.deal(number)[0])
        for place in EVERYONE:
            yield "training", partial(lambda one: theirs.train(one, number, parts[one], loaders), place)
        yield "server", theirs.aggregate
        yield from [("evaluation", lambda: theirs.evaluate(test))] * EVALUATIONS

    return play


def time_in_turn(code: Path, repeats: int, console: Console) -> dict[str, dict[str, dict[str, float]]]:
    """Return the median and the least CPU time of each program, per image or round, for each kind of step.

    Each program runs `repeats` timed rounds after a first round that is not timed. The programs take turns at every
    step, so that other load on the machine affects all of them equally.
    """
    sides = {side: player(side, code) for side in SIDES}
    seconds: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    kinds: list[str] = []
    for number in range(repeats + 1):
        rounds: dict[str, list[float]] = {side: [] for side in SIDES}
        kinds = []
        for steps in zip(*(play(number) for play in sides.values()), strict=True):
            kinds.append(steps[0][0])
            for side, (kind, step) in zip(SIDES, steps, strict=True):
                with console.status(f"round {number}, {kind}: {side}"):
                    begun = time.process_time()
                    step()
                    rounds[side].append(time.process_time() - begun)
        if number:
            for side in SIDES:
                seconds[side].append(rounds[side])
    return {
        name: {side: _times(kinds, of(np.array(found), axis=0)) for side, found in seconds.items()}
        for name, of in (("median", np.median), ("least", np.min))
    }


def _times(kinds: list[str], seconds: np.ndarray) -> dict[str, float]:
    spent = {kind: float(seconds[np.array(kinds) == kind].sum()) for kind in kinds}
    return {
        "training_ms_per_layer_sample": 1000 * spent["training"] / sum(map(mul, DEPTHS, EQUAL)),
        "server_ms_per_round": 1000 * spent["server"],
        "evaluation_ms_per_image": 1000 * spent["evaluation"] / (TESTED * EVALUATIONS),
    }


def whole_runs(cpu: Mapping[str, Mapping[str, float]], reading: Mapping[str, float]) -> dict[str, float]:
    """Return the CPU seconds of a whole run of each program, put together from the times of its parts.

    The run has the released main loop's numbers of rounds and evaluations. It reads its images from JPEG files, which
    fedsweep decodes only once.

    Args:
        cpu: The median CPU milliseconds of each program, for each kind of step.
        reading: The CPU milliseconds of reading an image, and of fedsweep's preparation of an image (`once`).
    """
    found = {}
    for side, spent in cpu.items():
        first = side if side == "released" else "fedsweep"
        training = spent["training_ms_per_layer_sample"] * sum(map(mul, DEPTHS, EQUAL)) + spent["server_ms_per_round"]
        testing = (spent["evaluation_ms_per_image"] + reading[first]) * HELD_OUT
        once = reading.get(f"{first}, once", 0.0) * (TRAINED + HELD_OUT)
        found[side] = (ROUNDS * (training + reading[first] * TRAINED) + EVALUATED * testing + once) / 1000
    return found


def memory(code: Path) -> dict[str, float]:
    """Return the peak memory in MiB of a round with each program, and of a process that runs no round (`nothing`)."""
    peaks = {}
    for side in ("nothing", "released", "fedsweep"):
        command = [sys.executable, "-m", str(__package__), "--code", str(code), "--peak-of", side]
        peaks[side] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return peaks


def peak(side: str, code: Path) -> float:
    """Run a round of the program `side`, or no round for `nothing`; return the peak memory of this process in MiB."""
    if side != "nothing":
        for _, step in player(side, code)(0):
            step()
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024


def table(timed: dict[str, Any]) -> Table:
    """Return a table of CPU times and peak memory, with a column for each program."""
    made = Table("median (minimum)", *SIDES, title="CPU time on one thread, and memory")
    median, least = timed["cpu"]["median"], timed["cpu"]["least"]
    for key, label in LABELS.items():
        made.add_row(label, *(f"{median[side][key]:.2f} ({least[side][key]:.2f})" for side in SIDES))
    read, whole = timed["reading_ms_per_image"], timed["whole_run_seconds"]
    made.add_row(
        "reading, ms / image", *(f"{read['released' if side == 'released' else 'fedsweep']:.2f}" for side in SIDES)
    )
    made.add_row("whole run with reading and 8 evaluations, s", *(f"{whole[side]:.0f}" for side in SIDES))
    peaks = timed["peak_mib"]
    above = [f"{peaks[side] - peaks['nothing']:.0f}" if side in peaks else "" for side in SIDES]
    made.add_row("peak memory above imports, MiB", *above)
    return made
