"""A search that begins with what an earlier sweep has found: its finished trials, kept in the new sweep's folder."""

from __future__ import annotations

import json

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.common.files import write_atomically
from fedsweep.results import Store, SweepStore, TrialRecord
from fedsweep.results.arms import Arm
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.space.axes import holds
from fedsweep.sweep.space.search_space import SearchSpace

FILE = "warm_start.json"


class Known(Config):
    """A finished trial of another sweep."""

    key: str = Field(description="the trial's key there")
    arm: Arm
    values: tuple[float, ...] = Field(description="of each objective")


class WarmStart(Config):
    """What a sweep was given of another one when it was opened; a resume reads it from here."""

    name: str = Field(description="the other search space")
    id: str = Field(description="its sweep")
    rounds: int = Field(description="rounds of a whole trial there")
    known: tuple[Known, ...]
    unfinished: int = Field(description="trials left out because they did not finish, or without a finite objective")
    outside: int = Field(description="finished trials left out because their arms do not lie in the space's axes")

    def note(self, rounds: int) -> str:
        """One line for the user; `rounds` are those of the new sweep."""
        left_out = [
            f"{count} left out that {why}"
            for count, why in (
                (self.unfinished, "did not finish"),
                (self.outside, "do not lie in the axes of this space"),
            )
            if count
        ]
        played = (
            f", of {self.rounds} round{'s' * (self.rounds != 1)} where this sweep has {rounds}"
            if self.rounds != rounds
            else ""
        )
        trials = f"{len(self.known)} trial{'s' * (len(self.known) != 1)}"
        return f"Warm start: {trials} of {self.name}@{self.id}{played}" + "".join(f"; {one}" for one in left_out) + "."


def collect(plan: Plan, store: Store) -> WarmStart | None:
    """What the sweep named by `search.warm_start` has found, or None where none is named.

    Raises:
        UserError: there is no such sweep, it has another objective, or none of its trials fits.
    """
    search, objective = plan.space.search, plan.space.objective
    if search.name != "tpe" or search.warm_start is None:
        return None
    name, _, sweep_id = search.warm_start.partition("@")
    sweep = store.find(name, sweep_id or None)
    manifest = sweep.manifest()
    where = f"`search.warm_start` {name}@{manifest.id}"
    if (manifest.metric, manifest.mode) != (objective.metric, objective.mode):
        raise UserError(
            f"{where} has the objective {manifest.metric} ({manifest.mode}), "
            f"but search space {plan.name} has {objective.metric} ({objective.mode})."
        )
    trials = sweep.trials()
    ends = [(trial, objective.values(trial.history)) for trial in trials if _finished(trial)]
    finished = [(trial, values) for trial, values in ends if values is not None]
    known = tuple(
        Known(key=trial.plan.key, arm=trial.plan.arm, values=values)
        for trial, values in finished
        if inside(plan.space, trial.plan.arm)
    )
    if not known:
        why = (
            f"none of its {len(finished)} finished trials lies in the axes {', '.join(plan.space.space)}"
            if finished
            else f"none of its {len(trials)} trials has finished"
        )
        raise UserError(f"{where} has nothing for search space {plan.name}: {why}.")
    return WarmStart(
        name=name,
        id=manifest.id,
        rounds=manifest.rounds,
        known=known,
        unfinished=len(trials) - len(finished),
        outside=len(finished) - len(known),
    )


def keep(taken: WarmStart | None, sweep: SweepStore) -> None:
    """Write what was taken into the new sweep's folder."""
    if taken is not None:
        write_atomically(sweep.folder / FILE, taken.model_dump_json(indent=2).encode())


def read(sweep: SweepStore) -> WarmStart | None:
    """What the sweep was given when it was opened."""
    path = sweep.folder / FILE
    return WarmStart.of(json.loads(path.read_text()), str(path)) if path.exists() else None


def known(sweep: SweepStore) -> list[tuple[Arm, tuple[float, ...]]]:
    """Arms and values that the sweep's search knows from the start."""
    taken = read(sweep)
    return [(one.arm, one.values) for one in taken.known] if taken else []


def inside(space: SearchSpace, arm: Arm) -> bool:
    """Whether a sample of the space could be this arm."""
    return arm.keys() == space.space.keys() and all(holds(axis, arm[name]) for name, axis in space.space.items())


def _finished(trial: TrialRecord) -> bool:
    return trial.outcome is not None and trial.outcome.outcome == "finished"
