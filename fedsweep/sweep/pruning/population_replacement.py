"""Population-based training (Jaderberg et al., 2017) in synchronous generations.

A generation depends only on the recorded metrics and the seed of the search, not on the number or speed of workers.

This module does not import ray.
"""

import math
from collections.abc import Collection, Mapping

from numpy.random import Generator

from fedsweep.common.randomness import stream
from fedsweep.results import Outcome, Start, SweepStore
from fedsweep.results.arms import Arm, identity
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.pruning.arm_state import RecordedTrials
from fedsweep.sweep.space.axes import Axis
from fedsweep.sweep.space.settings import PopulationScheduler

Values = Mapping[str, float]
Axes = Mapping[str, Axis]

TRIES = 8
"""Number of perturbations to try before all values are drawn anew."""


def first_generation(axes: Axes, size: int, seed: int) -> list[dict[str, float]]:
    """Draw the hyperparameter values of the `size` members of a population.

    Each value is drawn from its own random stream, which is derived from `seed`, the number of the member and the name
    of the axis.
    """
    return [
        {name: _drawn(axis, stream(seed, "population", 0, member, name)) for name, axis in axes.items()}
        for member in range(size)
    ]


def successors(
    members: Mapping[int, Values],
    scores: Mapping[int, float],
    generation: int,
    axes: Axes,
    scheduler: PopulationScheduler,
    seed: int,
    used: Collection[str] = (),
) -> dict[int, tuple[int, Values]]:
    """Map each member that is replaced at the start of a generation to its parent and its new values.

    Let k be the share `quantile` of all members, rounded down. All members with an error are replaced. If fewer than k
    members have an error, the worst of the other members are also replaced, until k members are replaced. The parent of
    a replaced member is drawn at random from the k best members, but only from members that are better than the
    replaced member. If no member is better, the member is not replaced.

    Args:
        members: The hyperparameter values of each member.
        scores: The score of each member without an error; a larger score is better.
        generation: Number of the new generation. The first generation has the number 0.
        axes: The axis of each hyperparameter.
        scheduler: The settings of population-based training.
        seed: The seed of the search.
        used: All earlier combinations of values, as JSON text (see `identity`). They are not used again, because
            repeating a trial adds no information.
    """
    ranked = sorted(scores, key=lambda place: (-scores[place], place))
    broken = sorted(set(members) - set(scores))
    count = math.floor(scheduler.quantile * len(members))
    best, worst = ranked[: max(1, count)], ranked[len(ranked) - max(0, count - len(broken)) :]
    taken, found = set(used), dict[int, tuple[int, Values]]()
    for place in sorted([*broken, *worst]):
        better = [one for one in best if place not in scores or scores[one] > scores[place]]
        if not better:
            continue
        parent = better[int(stream(seed, "population", generation, place).integers(len(better)))]
        chances = {name: stream(seed, "population", generation, place, name) for name in axes}
        values = _explored(members[parent], axes, scheduler, chances, taken)
        taken.add(identity(values))
        found[place] = parent, values
    return found


def _explored(
    values: Values, axes: Axes, scheduler: PopulationScheduler, chances: Mapping[str, Generator], taken: Collection[str]
) -> dict[str, float]:
    """Perturb the values of a parent until no earlier trial has the same values, and return the result."""
    for _ in range(TRIES + 1):
        found = {name: _perturbed(values[name], axis, scheduler, chances[name]) for name, axis in axes.items()}
        if identity(found) not in taken:
            return found
    while identity(found) in taken:
        found = {name: _drawn(axis, chances[name]) for name, axis in axes.items()}
    return found


def _perturbed(value: float, axis: Axis, scheduler: PopulationScheduler, chance: Generator) -> float:
    if chance.random() < scheduler.resample:
        return _drawn(axis, chance)
    return _within(value * scheduler.factors[int(chance.integers(len(scheduler.factors)))], axis)


def _drawn(axis: Axis, chance: Generator) -> float:
    low, high = map(math.log, axis.loguniform) if axis.loguniform else _range(axis)
    value = low + (high - low) * chance.random()
    return _within(math.exp(value) if axis.loguniform else value, axis)


def _within(value: float, axis: Axis) -> float:
    low, high = _range(axis)
    return min(max(value, low), high)


def _range(axis: Axis) -> tuple[float, float]:
    bounds = axis.uniform or axis.loguniform
    if bounds is None:
        raise ValueError("population-based training needs axes with a uniform or loguniform range")
    return bounds


def numbers(arm: Arm) -> dict[str, float]:
    """Return the numeric hyperparameters of an arm as floats, by dotted name."""
    return {name: float(value) for name, value in arm.items() if isinstance(value, int | float)}


class Generations(RecordedTrials):
    """The trials of a population so far, their recorded metrics, and the replacements that follow from the metrics.

    A new trial takes the place of each replaced member. The new trial continues from the checkpoint that its parent has
    at the end of the generation. Therefore, no member runs beyond the end of a generation before all members have
    reached it.
    """

    def __init__(self, plan: Plan, sweep: SweepStore) -> None:
        super().__init__(plan, sweep)
        search = plan.space.search
        if search.name != "random" or plan.space.scheduler.name != "pbt":
            found = f"search {search.name} and scheduler {plan.space.scheduler.name}"
            raise ValueError(f"a population needs search random and scheduler pbt, but the plan has {found}")
        self._plan, self._scheduler, self._seed = plan, plan.space.scheduler, search.seed
        self._ends: list[int] = [*range(self._scheduler.interval, self.rounds, self._scheduler.interval), self.rounds]
        self._generation, self._over = 0, False
        self._replaced: dict[str, Outcome] = {}
        first = first_generation(plan.space.space, search.samples, search.seed)
        for values, point in zip(first, search.first, strict=False):
            values.update(numbers(point))
        self._members = [self._new(number, values) for number, values in enumerate(first)]
        self._advance()

    @property
    def until(self) -> int:
        """The last round of the current generation."""
        return self._ends[self._generation]

    def refresh(self, key: str) -> None:
        """Read a trial's recorded rounds and any error. If the generation is now complete, start the next one."""
        self._read(self.plans[key])
        self._advance()

    def record_error(self, key: str, error: Outcome) -> None:
        """Record that a trial diverged or failed, unless the trial had already reached the end of the generation."""
        self._read(self.plans[key])
        if self._last[key] < self.until:
            self._errors[key] = error
        self._advance()

    def wanted(self) -> list[tuple[str, int]]:
        """Return the key of each unfinished trial of the current generation, with the last round of the generation."""
        return [] if self._over else [(key, self.until) for key in self._members if not self._settled(key)]

    def visible(self, key: str) -> int:
        """Return the last round of a trial that is shown to the user.

        No round is hidden, so the result is the number of rounds of a complete trial.
        """
        return self.rounds

    def outcome(self, key: str) -> Outcome | None:
        """Return a trial's outcome, or None while the trial runs."""
        finished = Outcome(outcome="finished", round=self.rounds) if self._last[key] >= self.rounds else None
        return self._errors.get(key) or self._replaced.get(key) or finished

    def _new(self, number: int, values: Values, start: Start | None = None) -> str:
        plan = self._plan.trial(number, dict(values), self._plan.space.planned_seeds[0], start)
        self._read(plan)
        return plan.key

    def _settled(self, key: str) -> bool:
        return self._last[key] >= self.until or key in self._errors

    def _advance(self) -> None:
        while not self._over and all(map(self._settled, self._members)):
            values = {place: self._values[key].get(self.until, math.nan) for place, key in enumerate(self._members)}
            scores = {place: value for place, value in values.items() if math.isfinite(value)}
            self._over = self.until == self.rounds or not scores
            if not self._over:
                self._replace(scores)
                self._generation += 1

    def _replace(self, scores: Mapping[int, float]) -> None:
        plans, size, round = [self.plans[key] for key in self._members], len(self._members), self.until
        members = {place: numbers(plan.arm) for place, plan in enumerate(plans)}
        used, after = [identity(plan.arm) for plan in self.plans.values()], self._generation + 1
        found = successors(members, scores, after, self._plan.space.space, self._scheduler, self._seed, used)
        for place, (parent_place, values) in found.items():
            parent, number = plans[parent_place], after * size + place
            reason = f"replaced after round {round} by trial {number}, which continues from trial {parent.number}"
            self._replaced[plans[place].key] = Outcome(outcome="pruned", round=round, reason=reason)
            self._members[place] = self._new(number, values, Start(key=parent.key, round=round))
