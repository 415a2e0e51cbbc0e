"""Warm start of a search from the finished trials of an earlier sweep.

The trials of the earlier sweep are copied to a file in the folder of the new sweep.
"""

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.results import Store, SweepStore
from fedsweep.results.arms import Arm
from fedsweep.results.folders import read_record, write_record
from fedsweep.sweep.plan.plan import Plan

FILE = "warm_start.json"


class Known(Config):
    """A trial that finished in an earlier sweep and that a search learns from."""

    key: str = Field(description="the trial's key in the earlier sweep")
    arm: Arm
    values: tuple[float, ...] = Field(description="the value of each objective")


class WarmStart(Config):
    """The contents of `warm_start.json`: the trials of an earlier sweep that a search learns from."""

    name: str = Field(description="name of the earlier search space")
    id: str = Field(description="id of the earlier sweep")
    rounds: int = Field(description="number of rounds of a complete trial in the earlier sweep")
    known: tuple[Known, ...]
    unfinished: int = Field(
        description="number of trials left out because they did not finish or have no finite objective"
    )
    outside: int = Field(description="number of finished trials left out because their arms are outside the axes")

    def note(self, rounds: int) -> str:
        """Return a line for the user: how many trials the search learns from, and how many trials were left out.

        `rounds` is the number of rounds of the new sweep.
        """
        reasons = (self.unfinished, "that did not finish"), (self.outside, "outside the axes of this search space")
        left_out = ", ".join(f"{count} {why}" for count, why in reasons if count)
        also = f"; left out: {left_out}" if left_out else ""
        other = f", with {self.rounds} round{'s' * (self.rounds != 1)} instead of {rounds}"
        trials = f"{len(self.known)} trial{'s' * (len(self.known) != 1)}"
        return f"Warm start: {trials} of {self.name}@{self.id}{other * (self.rounds != rounds)}{also}."


def collect(plan: Plan, store: Store) -> WarmStart | None:
    """Return the finished trials of the sweep that `search.warm_start` names, or None if this setting is empty.

    Finished trials whose arms are outside the new search space are left out.

    Raises:
        UserError: The named sweep has a different objective, or no trial is left.
    """
    search, objective, axes = plan.space.search, plan.space.goal, plan.space.space
    if search.name != "tpe" or search.warm_start is None:
        return None
    name, _, sweep_id = search.warm_start.partition("@")
    sweep = store.find(name, sweep_id or None)
    manifest = sweep.manifest()
    where = f"`search.warm_start` {name}@{manifest.id}"
    if (manifest.metric, manifest.mode) != (objective.metric, objective.mode):
        ours = f"search space {plan.name} has {objective.metric} ({objective.mode})"
        raise UserError(f"{where} has the objective {manifest.metric} ({manifest.mode}), but {ours}.")
    trials = sweep.trials()
    finished = [
        (trial.plan, values)
        for trial in trials
        if trial.outcome is not None and trial.outcome.outcome == "finished"
        if (values := objective.values(trial.history)) is not None
    ]
    known = tuple(
        Known(key=one.key, arm=one.arm, values=values)
        for one, values in finished
        if one.arm.keys() == axes.keys() and all(axis.has(one.arm[name]) for name, axis in axes.items())
    )
    if not known:
        why = f"none of its {len(trials)} trials has finished" if len(trials) > 1 else "no trial has finished"
        if finished:
            which = f"none of its {len(finished)} finished trials" if len(finished) > 1 else "no finished trial"
            why = f"{which} is within the axes {', '.join(axes)}"
        raise UserError(f"{where} has no trial that search space {plan.name} can use: {why}.")
    unfinished, outside = len(trials) - len(finished), len(finished) - len(known)
    return WarmStart(
        name=name, id=manifest.id, rounds=manifest.rounds, known=known, unfinished=unfinished, outside=outside
    )


def keep(found: WarmStart | None, sweep: SweepStore) -> None:
    """Write the warm start `found` to the folder of a new sweep. If `found` is None, nothing is written."""
    if found is not None:
        write_record(sweep.folder / FILE, found)


def read(sweep: SweepStore) -> WarmStart | None:
    """Return the warm start that is stored in a sweep's folder, or None if the sweep has no warm start."""
    path = sweep.folder / FILE
    return read_record(WarmStart, path) if path.exists() else None


def known(sweep: SweepStore) -> list[tuple[Arm, tuple[float, ...]]]:
    """Return the arm and the objective values of each trial in a sweep's warm start."""
    found = read(sweep)
    return [(one.arm, one.values) for one in found.known] if found else []
