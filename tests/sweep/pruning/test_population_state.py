"""The state of a population, which does not depend on workers, on the order of arrival or on killed processes."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fedsweep.results import Outcome, Start, TrialPlan
from fedsweep.results.arms import Arm, identity
from fedsweep.results.history import RoundRecord
from fedsweep.sweep.cluster.packing import Packing
from fedsweep.sweep.pruning.population_replacement import Generations, numbers
from fedsweep.sweep.search.ray_searchers import JointSearch
from fedsweep.sweep.space.axes import Axis
from fedsweep.sweep.space.settings import Goal, PopulationScheduler, RandomSearch

ROUNDS, INTERVAL = 9, 2
AXES = {"optimizer.lr": Axis(uniform=(0.0, 1.0)), "optimizer.momentum": Axis(uniform=(0.0, 1.0))}


@dataclass
class Trial:
    """The records of a trial in memory. Each value depends on the previous value and on the hyperparameters."""

    plan: TrialPlan | None = None
    values: list[float] = field(default_factory=list)
    ended: Outcome | None = None

    @property
    def planned(self) -> bool:
        return self.plan is not None

    def recorded(self) -> list[RoundRecord]:
        return [RoundRecord(round, {"accuracy/mean": value}, 0.0) for round, value in enumerate(self.values)]

    def outcome(self) -> Outcome | None:
        return self.ended

    def error(self) -> None:
        return None

    def step(self, breaks: float) -> bool:
        """Run a round, and return False if it diverges because the learning rate exceeds `breaks`."""
        assert self.plan is not None
        lr, momentum = numbers(self.plan.arm).values()
        if len(self.values) > 1 and lr > breaks:
            return False
        self.values.append(0.7 * (self.values or [0.0])[-1] + lr * (1 - lr) + 0.1 * momentum * len(self.values))
        return True


@dataclass
class Folder:
    trials: dict[str, Trial] = field(default_factory=dict)

    def trial(self, key: str) -> Trial:
        return self.trials.setdefault(key, Trial())


def plan_of(size: int, seed: int, **changes: Any) -> Any:
    """Return a made-up plan of a population with `size` members, in which the key of a trial encodes its content."""

    def trial(number: int, arm: Arm, seed: int, start: Start | None = None) -> TrialPlan:
        key = identity([number, arm, start.model_dump() if start else None])
        return TrialPlan(key=key, number=number, arm=arm, seed=seed, config={}, start=start)

    space = SimpleNamespace(
        scheduler=PopulationScheduler(**{"interval": INTERVAL, "quantile": 0.5, **changes}),
        search=RandomSearch(samples=size, seed=seed),
        goal=Goal("accuracy/mean", "max", None),
        space=AXES,
        planned_seeds=(0,),
    )
    base = SimpleNamespace(federation=SimpleNamespace(rounds=ROUNDS))
    return SimpleNamespace(space=space, base=base, trial=trial)


def announce(folder: Folder, plan: TrialPlan) -> None:
    """Write the plan of a trial like `Recording.announce`."""
    trial = folder.trial(plan.key)
    if plan.start is not None and not trial.planned:
        parent = folder.trial(plan.start.key)
        assert len(parent.values) == plan.start.round + 1, "the parent ran another round before it was copied"
        trial.values = list(parent.values)
    trial.plan = plan


def play(
    population: Generations, folder: Folder, workers: int, chance: random.Random, breaks: float, steps: int
) -> int:
    """Run trials on workers of random speed for at most `steps` rounds, and return the number of rounds."""
    search = JointSearch(population, lambda plan: announce(folder, plan), Packing(0, 1, folder))  # type: ignore[arg-type]
    out: dict[str, tuple[str, int]] = {}
    for played in range(steps):
        while len(out) < workers and isinstance(told := search.suggest(name := f"{played}-{len(out)}"), dict):
            out[name] = str(told["trial"]), int(str(told["until"]))
        if not out:
            assert told == JointSearch.FINISHED
            return played
        name = chance.choice(sorted(out))
        key, until = out[name]
        trial = folder.trial(key)
        broke = not trial.step(breaks)
        if broke or len(trial.values) > until:
            del out[name]
            search.on_trial_complete(name)
        if broke:  # the error is reported first and written to disk afterwards
            error = Outcome(outcome="diverged", round=len(trial.values) - 1, error="it diverged")
            population.record_error(key, error)
            trial.ended = error
    return steps


def result(population: Generations, folder: Folder) -> dict[int, Any]:
    """Return the arm, start, history and outcome of each trial, keyed by the trial's number."""
    assert population.wanted() == []
    assert set(folder.trials) == set(population.plans)
    return {
        plan.number: (plan.arm, plan.start, folder.trial(key).values, population.outcome(key))
        for key, plan in population.plans.items()
    }


WAYS = ("finished", "pruned", "diverged", "failed")
SIZES, SEEDS, BREAKS = st.integers(1, 6), st.integers(0, 50), st.sampled_from([0.0, 0.5, 0.9, 1.0])


def straight(size: int, seed: int, breaks: float) -> dict[int, Any]:
    folder = Folder()
    population = Generations(plan_of(size, seed), folder)  # type: ignore[arg-type]
    assert play(population, folder, 1, random.Random(0), breaks, 10_000) < 10_000
    return result(population, folder)


@given(size=SIZES, seed=SEEDS, breaks=BREAKS, workers=st.integers(2, 7), order=st.integers(0, 1000))
def test_the_result_does_not_depend_on_workers_or_arrival(
    size: int, seed: int, breaks: float, workers: int, order: int
) -> None:
    folder = Folder()
    population = Generations(plan_of(size, seed), folder)  # type: ignore[arg-type]
    play(population, folder, workers, random.Random(order), breaks, 10_000)
    assert result(population, folder) == straight(size, seed, breaks)


@settings(max_examples=20)
@given(size=SIZES, seed=SEEDS, breaks=BREAKS, kills=st.lists(st.integers(0, 20), max_size=6), order=st.integers(0, 99))
def test_a_new_process_has_the_same_result(size: int, seed: int, breaks: float, kills: list[int], order: int) -> None:
    """The process is killed several times, and the next process reads only the records on disk."""
    folder, chance = Folder(), random.Random(order)
    for steps in [*kills, 10_000]:
        population = Generations(plan_of(size, seed), folder)  # type: ignore[arg-type]
        play(population, folder, 3, chance, breaks, steps)
        for trial in folder.trials.values():  # killed after a state was copied and before the plan was written
            if trial.plan is not None and trial.plan.start and len(trial.values) == trial.plan.start.round + 1:
                standing = len(folder.trial(trial.plan.start.key).values)
                trial.plan = None if standing == len(trial.values) and chance.random() < 0.5 else trial.plan
    assert result(Generations(plan_of(size, seed), folder), folder) == straight(size, seed, breaks)  # type: ignore[arg-type]


@given(size=SIZES, seed=SEEDS, breaks=BREAKS)
def test_every_member_ends_once_and_continues_the_history_of_its_parent(size: int, seed: int, breaks: float) -> None:
    folder = Folder()
    population = Generations(plan_of(size, seed), folder)  # type: ignore[arg-type]
    play(population, folder, 2, random.Random(seed), breaks, 10_000)
    ends = {plan.number: population.outcome(key) for key, plan in population.plans.items()}
    assert None not in ends.values()
    ways = {name: [number for number, end in ends.items() if end and end.outcome == name] for name in WAYS}
    assert len({number % size for number in ways["finished"]}) == len(ways["finished"])
    assert len(ways["finished"]) == size or ways["diverged"]
    for number in ways["pruned"]:
        end = ends[number]
        assert end is not None
        assert end.round in range(INTERVAL, ROUNDS, INTERVAL)
        successor = end.round // INTERVAL * size + number % size
        assert successor in ends
        assert (end.reason or "").startswith(
            f"replaced after round {end.round} by trial {successor}, which continues from"
        )
    for key, plan in population.plans.items():
        assert (plan.start is None) == (plan.number < size)
        if plan.start is not None:
            shared = plan.start.round + 1
            assert folder.trial(key).values[:shared] == folder.trial(plan.start.key).values[:shared]
    assert len({identity(plan.arm) for plan in population.plans.values()}) == len(population.plans)


def test_one_member_or_one_generation_is_a_plain_random_search() -> None:
    assert [start for _, start, *_ in straight(1, 0, 1.0).values()] == [None]
    folder = Folder()
    population = Generations(plan_of(6, 0, interval=ROUNDS), folder)  # type: ignore[arg-type]
    play(population, folder, 2, random.Random(0), 1.0, 10_000)
    alone = {}
    for number, plan in enumerate(population.plans.values()):
        trial = Trial(plan)
        while len(trial.values) <= ROUNDS:
            trial.step(1.0)
        alone[number] = (plan.arm, None, trial.values, Outcome(outcome="finished", round=ROUNDS))
    assert result(population, folder) == alone
    assert len(alone) == 6


def test_the_last_generation_ends_with_the_last_round() -> None:
    ends = []
    for rounds in (3, 4, 9):
        plan = plan_of(1, 0, interval=3)
        plan.base.federation.rounds = rounds
        ends.append(Generations(plan, Folder())._ends)  # type: ignore[arg-type]
    assert ends == [[3], [3, 4], [3, 6, 9]]


def test_the_sweep_ends_if_all_members_break() -> None:
    found = straight(4, 0, 0.0)
    assert [outcome.outcome for *_, outcome in found.values()] == ["diverged"] * 4


def test_a_worker_lost_after_its_last_round_is_no_failure() -> None:
    folder = Folder()
    population = Generations(plan_of(2, 0), folder)  # type: ignore[arg-type]
    (first, until), _ = population.wanted()
    announce(folder, population.plans[first])
    while len(folder.trial(first).values) <= until:
        folder.trial(first).step(1.0)
    population.record_error(first, Outcome(outcome="failed", round=until, error="lost"))
    assert population.outcome(first) is None


def test_first_points_are_members_and_their_missing_values_are_drawn() -> None:
    plan = plan_of(3, 0)
    drawn = [one.arm for one in Generations(plan, Folder()).plans.values()]  # type: ignore[arg-type]
    plan.space.search = RandomSearch(samples=3, seed=0, first=({"optimizer.lr": 0.25},))
    found = [one.arm for one in Generations(plan, Folder()).plans.values()]  # type: ignore[arg-type]
    assert found == [{**drawn[0], "optimizer.lr": 0.25}, *drawn[1:]]


def test_a_minimised_objective_makes_the_smallest_value_the_parent() -> None:
    found = {}
    for mode in ("max", "min"):
        plan, folder = plan_of(2, 3, interval=8), Folder()
        plan.space.goal = Goal("accuracy/mean", mode, None)
        population = Generations(plan, folder)
        play(population, folder, 1, random.Random(0), 1.0, 10_000)
        (child,) = [one for one in population.plans.values() if one.start]
        found[mode] = population.plans[child.start.key].number if child.start else None
    assert sorted(found.values(), key=str) == [0, 1]
