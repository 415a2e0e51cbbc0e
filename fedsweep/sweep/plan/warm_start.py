"""Warm start of a search from an earlier sweep's finished trials, which the new sweep's folder keeps."""

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.results import Store, SweepStore
from fedsweep.results.arms import Arm
from fedsweep.results.folders import read_record, write_record
from fedsweep.sweep.plan.plan import Plan

FILE = "warm_start.json"


class Known(Config):
    """A finished trial of another sweep."""

    key: str = Field(description="the trial's key there")
    arm: Arm
    values: tuple[float, ...] = Field(description="of each objective")


class WarmStart(Config):
    """The finished trials of another sweep that a search starts from, as kept in the file `warm_start.json`."""

    name: str = Field(description="the other search space")
    id: str = Field(description="its sweep")
    rounds: int = Field(description="rounds of a whole trial there")
    known: tuple[Known, ...]
    unfinished: int = Field(description="trials left out because they did not finish, or without a finite objective")
    outside: int = Field(description="finished trials left out because their arms do not lie in the space's axes")

    def note(self, rounds: int) -> str:
        """Return a line for the user about a new sweep of `rounds` rounds."""
        reasons = (self.unfinished, "did not finish"), (self.outside, "do not lie in the axes of this space")
        left_out = "".join(f"; {count} left out that {why}" for count, why in reasons if count)
        other = f", of {self.rounds} round{'s' * (self.rounds != 1)} where this sweep has {rounds}"
        trials = f"{len(self.known)} trial{'s' * (len(self.known) != 1)}"
        return f"Warm start: {trials} of {self.name}@{self.id}{other * (self.rounds != rounds)}{left_out}."


def collect(plan: Plan, store: Store) -> WarmStart | None:
    """Return the finished trials of the sweep `search.warm_start`, if set; raise UserError unless one of them fits."""
    search, objective, axes = plan.space.search, plan.space.objective, plan.space.space
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
        why = f"none of its {len(trials)} trials has finished"
        if finished:
            why = f"none of its {len(finished)} finished trials lies in the axes {', '.join(axes)}"
        raise UserError(f"{where} has nothing for search space {plan.name}: {why}.")
    unfinished, outside = len(trials) - len(finished), len(finished) - len(known)
    return WarmStart(
        name=name, id=manifest.id, rounds=manifest.rounds, known=known, unfinished=unfinished, outside=outside
    )


def keep(found: WarmStart | None, sweep: SweepStore) -> None:
    """Write the known trials into the new sweep's folder."""
    if found is not None:
        write_record(sweep.folder / FILE, found)


def read(sweep: SweepStore) -> WarmStart | None:
    """Return the trials that a sweep's search started from, if any."""
    path = sweep.folder / FILE
    return read_record(WarmStart, path) if path.exists() else None


def known(sweep: SweepStore) -> list[tuple[Arm, tuple[float, ...]]]:
    """Return the arms, and their values by objective, that a sweep's search started from."""
    found = read(sweep)
    return [(one.arm, one.values) for one in found.known] if found else []
