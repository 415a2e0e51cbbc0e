"""Ray Tune searchers for planned grids, sampled searches, successive halving of arms, and populations."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from typing import Any

from optuna.trial import FrozenTrial
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from fedsweep.common.yaml_values import Json
from fedsweep.results import SweepStore, TrialPlan
from fedsweep.sweep.cluster.packing import Packing
from fedsweep.sweep.plan import warm_start
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.pruning.arm_state import ArmState
from fedsweep.sweep.pruning.population_replacement import Generations
from fedsweep.sweep.pruning.seed_state import SeedState
from fedsweep.sweep.pruning.trial_state import TrialState
from fedsweep.sweep.search.proposals import Proposals

Announce = Callable[[TrialPlan], None]
Joint = ArmState | TrialState | Generations | SeedState
"""The states of sweeps in which what runs next depends on several trials."""


class FolderSearcher(Searcher):
    """The base class of the searchers, which choose the next trial from the records in the sweep's folder.

    The driver writes each outcome to the folder before Ray asks for the next trial. A trial can be suggested several
    times: to continue it, to give it more GPU memory, or because its worker was lost.
    """

    def __init__(self, announce: Announce, packing: Packing) -> None:
        super().__init__()
        self._announce, self._packing = announce, packing
        self._running: dict[str, TrialPlan] = {}
        self.is_paused: Callable[[], bool] = bool
        """A function that returns whether no further trial may start; by default, it returns False."""
        self.look: Callable[[], object] = bool
        """A function that calls `notice` for each trial that other processes have changed; by default, a null one."""
        self.taken: Collection[str] = ()
        """The keys of the trials that other processes are running."""

    @property
    def running(self) -> set[str]:
        """The keys of the trials that this process is running."""
        return {plan.key for plan in self._running.values()}

    def wanted(self) -> Iterable[tuple[TrialPlan, int]]:
        """Return the trials to run, the most urgent first, each with the round that the trial must reach."""
        raise NotImplementedError

    def returned(self, plan: TrialPlan) -> None:
        """React to a trial that has stopped running. By default, nothing happens."""

    def notice(self, plan: TrialPlan) -> bool:
        """Read a trial that another process has changed, and return whether it belongs to the sweep."""
        raise NotImplementedError

    def suggest(self, trial_id: str) -> dict[str, Json] | str | None:  # type: ignore[override]
        """Return the next trial's hyperparameters, key, target round and share of a GPU.

        The result is None if no trial can start now, and `FINISHED` if no trial is left or the search is paused.
        """
        self.look()
        if self.is_paused():
            return self.FINISHED
        busy = {*self.running, *self.taken}
        offer = self._packing.choose([(plan, until) for plan, until in self.wanted() if plan.key not in busy])
        if offer is None:
            return None if busy else self.FINISHED
        plan = self._running[trial_id] = offer.plan
        self._announce(plan)
        return {"trial": plan.key, **plan.arm, "seed": plan.seed, "until": offer.until, "gpus": offer.gpus}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Record that a trial has stopped running. If `error` is true, its worker was lost."""
        plan = self._running.pop(trial_id)
        self._packing.ended(plan, None if error else result)
        self.returned(plan)

    def save(self, checkpoint_path: str) -> None:
        """Do nothing. The sweep's folder already contains the whole state."""


class PlannedSearch(FolderSearcher):
    """The searcher for a list of planned trials. It suggests each trial until the trial has an outcome."""

    def __init__(
        self, sweep: SweepStore, plans: Sequence[TrialPlan], rounds: int, announce: Announce, packing: Packing
    ) -> None:
        super().__init__(announce, packing)
        self._sweep, self._rounds = sweep, rounds
        self._left, self._returned = list(plans), list(plans)
        self._keys = {plan.key for plan in plans}

    def wanted(self) -> Iterable[tuple[TrialPlan, int]]:
        """Return the trials without an outcome, in the order of the plan."""
        ended = {plan.key for plan in self._returned if self._sweep.trial(plan.key).outcome() is not None}
        self._left = [plan for plan in self._left if plan.key not in ended]
        self._returned.clear()
        return [(plan, self._rounds) for plan in self._left]

    def returned(self, plan: TrialPlan) -> None:
        """Mark the trial, so that its outcome is read before the next trial is chosen."""
        self._returned.append(plan)

    def notice(self, plan: TrialPlan) -> bool:
        """Mark a trial that another process has changed, like one that has stopped running."""
        self._returned.append(plan)
        return plan.key in self._keys


class SampledSearch(PlannedSearch):
    """The searcher that samples hyperparameters at random or with TPE.

    The samples depend on the results on disk, but not on the order in which the results arrived.
    """

    def __init__(self, plan: Plan, sweep: SweepStore, announce: Announce, packing: Packing) -> None:
        self._samples = Samples(plan, sweep)
        super().__init__(sweep, self._samples.plans, plan.base.federation.rounds, announce, packing)

    def wanted(self) -> Iterable[tuple[TrialPlan, int]]:
        """Return the unfinished samples.

        A new sample is added if all unfinished samples are running and all results that are needed to propose the new
        sample are available.
        """
        left = {plan.number: plan.key for plan, _ in super().wanted()}
        if {*left.values()} <= {*self.running, *self.taken} and (sample := self._samples.next(left)) is not None:
            self._left.append(sample)
            self._keys.add(sample.key)
        return [(plan, self._rounds) for plan in self._left]

    def notice(self, plan: TrialPlan) -> bool:
        """Add a sample that another process has proposed, or mark a known one."""
        if self._samples.add(plan):
            self._left.append(plan)
            self._keys.add(plan.key)
        return super().notice(plan)


class Samples:
    """The samples of a search so far, and the proposal of the next one."""

    def __init__(self, plan: Plan, sweep: SweepStore) -> None:
        self._plan, self._sweep = plan, sweep
        self._samples = {trial.plan.number: trial.plan for trial in sweep.trials()}
        self._proposals = Proposals(plan.space, plan.tentative, warm_start.known(sweep))
        self._results: dict[int, FrozenTrial] = {}

    @property
    def plans(self) -> list[TrialPlan]:
        """The plans of the samples so far."""
        return [*self._samples.values()]

    def add(self, plan: TrialPlan) -> bool:
        """Add a sample that another process has proposed, and return whether it was unknown."""
        return self._samples.setdefault(plan.number, plan) is plan

    def next(self, unfinished: Collection[int]) -> TrialPlan | None:
        """Return a new sample, or None if all samples were proposed or a result that the proposal needs is missing.

        Args:
            unfinished: Numbers of the samples without an outcome on disk.
        """
        # A number is missing in between if the folder of a damaged trial was deleted.
        number = next(one for one in count() if one not in self._samples)
        needed = self._proposals.needed(number)
        if number == self._plan.sampled or not {*needed}.isdisjoint(unfinished):
            return None
        for one in needed:
            if one not in self._results:
                self._results[one] = self._proposals.result(self._sweep.trial(self._samples[one].key).read())
        earlier = [self._samples[one].arm for one in range(number)]
        arm = self._proposals.arm(number, earlier, self._results)
        sample = self._samples[number] = self._plan.trial(number, arm, self._plan.space.planned_seeds[0])
        return sample


class JointSearch(FolderSearcher):
    """The searcher for successive halving, and for population-based training.

    If arms are halved, a trial runs to the next rung (a round after which arms are compared). If trials are halved, a
    trial runs until it has to wait at a rung. In population-based training, a trial runs to the end of the generation
    (a round after which the worst members of the population are replaced). Once the trial may continue, the searcher
    suggests it again.
    """

    def __init__(self, state: Joint, announce: Announce, packing: Packing) -> None:
        super().__init__(announce, packing)
        self._state = state

    def wanted(self) -> Iterable[tuple[TrialPlan, int]]:
        """Return the trials that must still train, most urgent first, each with the round that it must reach.

        In population-based training, this round is the last round of the current generation. If arms are halved, it
        depends on the decisions about the trial's arm. If trials are halved, it is the last round of the trial.
        """
        return [(self._state.plans[key], until) for key, until in self._state.wanted()]

    def returned(self, plan: TrialPlan) -> None:
        """Read the rounds that the trial has recorded."""
        self._state.refresh(plan.key)

    def notice(self, plan: TrialPlan) -> bool:
        """Read a trial that another process has changed, if it belongs to the sweep."""
        if known := plan.key in self._state.plans:
            self._state.refresh(plan.key)
        return known

    def suggest(self, trial_id: str) -> dict[str, Json] | str | None:  # type: ignore[override]
        """Write the plans of new members of the population, and then return the next trial.

        A new member copies its parent's checkpoint, so its plan must be written before the parent continues.
        """
        for successor in self._state.unplanned():
            self._announce(successor)
        if self._state.unplanned():  # a plan could not be written, e.g. because the disk is full
            return Searcher.FINISHED
        return super().suggest(trial_id)


class HalvedSamples(JointSearch):
    """The searcher for a sampled search whose trials are halved.

    Neither the samples nor the pruned trials depend on the order in which results arrive.
    """

    def __init__(self, plan: Plan, sweep: SweepStore, state: TrialState, announce: Announce, packing: Packing) -> None:
        super().__init__(state, announce, packing)
        self._sweep, self._trials, self._samples = sweep, state, Samples(plan, sweep)
        self._ended: set[str] = set()

    def wanted(self) -> Iterable[tuple[TrialPlan, int]]:
        """Return the trials that may train now, and a new sample if all of these trials are running."""
        found, busy = [*super().wanted()], {*self.running, *self.taken}
        if all(plan.key in busy for plan, _ in found) and (sample := self._samples.next(self._unfinished())):
            self._trials.add(sample)
            found.append((sample, self._trials.rounds))
        return found

    def notice(self, plan: TrialPlan) -> bool:
        """Add a sample that another process has proposed, or read what it has recorded."""
        self._samples.add(plan)
        self._trials.add(plan)
        return True

    def _unfinished(self) -> list[int]:
        """Return the numbers of the samples without an outcome on disk."""
        for key in self._trials.plans:
            if key not in self._ended and self._sweep.trial(key).outcome() is not None:
                self._ended.add(key)
        return [plan.number for key, plan in self._trials.plans.items() if key not in self._ended]


class JointScheduler(FIFOScheduler):
    """The scheduler that stops a running trial if the state of the sweep says so.

    The trial was pruned, has to wait for other trials at a rung, or belongs to an arm that needs no further seed. The
    searcher suggests a waiting trial again.
    """

    def __init__(self, state: ArmState | TrialState | SeedState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = state

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Stop the trial if the state says so. The state first reads the trial if it has reached a rung."""
        key = trial.config["trial"]
        if result["round"] in self.state.milestones:
            self.state.refresh(key)
        return FIFOScheduler.STOP if self.state.stops(key, result["round"]) else FIFOScheduler.CONTINUE
