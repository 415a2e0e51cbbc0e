"""Ray Tune's searchers over a planned grid, Optuna's samples, arms and populations."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from optuna.trial import FrozenTrial
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from fedsweep.common.yaml_values import Json
from fedsweep.results import SweepStore, TrialPlan
from fedsweep.sweep.cluster.packing import Offer, Packing
from fedsweep.sweep.plan import warm_start
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.pruning.arm_state import Climb
from fedsweep.sweep.pruning.population_state import Generations
from fedsweep.sweep.search.proposals import Proposals

Announce = Callable[[TrialPlan], None]


class FolderSearcher(Searcher):
    """A searcher that knows only what lies in the sweep's folder, which is what a resume reads too."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing is Ray's to keep."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, see `save`."""


def suggestion(offer: Offer) -> dict[str, Json]:
    """A trial's Ray configuration: flat dotted hyperparameters, the key under which the whole plan is on disk.

    Also the round that it climbs to, and its part of a GPU; it may be handed out again to climb further, or with more.
    """
    plan = offer.plan
    return {"trial": plan.key, **plan.arm, "seed": plan.seed, "until": offer.until, "gpus": offer.gpus}


class SampledSearch(FolderSearcher):
    """Samples hyperparameters from the results on disk, whatever their order of arrival."""

    def __init__(self, plan: Plan, sweep: SweepStore, announce: Announce, packing: Packing) -> None:
        super().__init__()
        self._plan, self._sweep, self._announce, self._packing = plan, sweep, announce, packing
        self._proposals = Proposals(plan.space, plan.tentative, warm_start.known(sweep))
        self._samples: list[TrialPlan] = [trial.plan for trial in sweep.trials()]
        self._results: dict[int, FrozenTrial] = {}
        self._open = {trial.number for trial in self._samples}
        self._out: dict[str, int] = {}

    def suggest(self, trial_id: str) -> dict[str, Json] | str | None:  # type: ignore[override]
        """A sample that is out no more but has not ended, or else a new one.

        None while results for it are missing, or what samples take of a GPU is being measured.
        """
        self._learn()
        if left := sorted(self._open - {*self._out.values()}):
            trial = self._samples[left[0]]
        elif len(self._samples) == self._plan.sampled:
            return None if self._open else self.FINISHED
        elif self._open & {*self._proposals.needed(len(self._samples))}:
            return None
        else:
            trial = self._new()
        offer = self._packing.choose([(trial, self._plan.base.federation.rounds)])
        if offer is None:
            return None
        self._out[trial_id] = trial.number
        self._announce(trial)
        return suggestion(offer)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """The sample is out no more; how it ended is read from disk, where it is written before Ray asks again."""
        if (number := self._out.pop(trial_id, None)) is not None:
            self._packing.ended(self._samples[number], None if error else result)

    def _new(self) -> TrialPlan:
        number = len(self._samples)
        arm = self._proposals.arm(number, [one.arm for one in self._samples], self._results)
        trial = self._plan.trial(number, arm, self._plan.space.seeds[0])
        self._samples.append(trial)
        self._open.add(number)
        return trial

    def _learn(self) -> None:
        """Read the results of samples that have ended since."""
        for number in sorted(self._open):
            store = self._sweep.trial(self._samples[number].key)
            if store.outcome() is not None:
                self._results[number] = self._proposals.result(store.read())
                self._open.remove(number)


class PlannedSearch(FolderSearcher):
    """Replays a list of trials. One that comes back without an outcome on disk is handed out again.

    It was measured and goes on, it ran out of a GPU's memory, or its worker was lost.
    """

    def __init__(
        self, sweep: SweepStore, plans: Sequence[TrialPlan], rounds: int, announce: Announce, packing: Packing
    ) -> None:
        super().__init__()
        self._sweep, self._left, self._rounds = sweep, list(plans), rounds
        self._announce, self._packing = announce, packing
        self._out: dict[str, TrialPlan] = {}
        self._back: list[TrialPlan] = []

    def suggest(self, trial_id: str) -> dict[str, Json] | str | None:  # type: ignore[override]
        """The next trial of the plan, or nothing for now."""
        for plan in self._back:
            if self._sweep.trial(plan.key).outcome() is None:
                bisect.insort(self._left, plan, key=lambda one: one.number)
        self._back.clear()
        offer = self._packing.choose([(plan, self._rounds) for plan in self._left])
        if offer is None:
            return None if self._out else self.FINISHED
        self._left.remove(offer.plan)
        self._out[trial_id] = offer.plan
        self._announce(offer.plan)
        return suggestion(offer)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """How it ended is read from disk, where it is written before Ray asks again."""
        plan = self._out.pop(trial_id)
        self._packing.ended(plan, None if error else result)
        self._back.append(plan)


class ClimbingSearch(FolderSearcher):
    """A trial is handed out once for each rung that its arm climbs to; its checkpoint on disk is where it goes on."""

    def __init__(self, climb: Climb | Generations, announce: Announce, packing: Packing) -> None:
        super().__init__()
        self._climb, self._announce, self._packing = climb, announce, packing
        self._out: dict[str, str] = {}

    def suggest(self, trial_id: str) -> dict[str, Json] | str | None:  # type: ignore[override]
        """The most urgent climb, or one that may turn out to be in vain, or nothing for now."""
        wanted = self._climb.wanted()
        free = [(self._climb.plans[key], until) for key, until in wanted if key not in self._out.values()]
        offer = self._packing.choose(free)
        if offer is None:
            return None if self._out else self.FINISHED
        self._out[trial_id] = offer.plan.key
        self._announce(offer.plan)
        return suggestion(offer)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """It can be handed out again; what it recorded is read from disk."""
        key = self._out.pop(trial_id)
        self._packing.ended(self._climb.plans[key], None if error else result)
        self._climb.refresh(key)


class ClimbingScheduler(FIFOScheduler):
    """Stops what is played beyond a rung that its arm did not pass."""

    def __init__(self, climb: Climb) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.climb = climb

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Called by Ray in the driver for each report."""
        key = trial.config["trial"]
        if result["round"] in self.climb.milestones:
            self.climb.refresh(key)
        fallen = self.climb.fallen(key) and result["round"] >= self.climb.visible(key)
        return FIFOScheduler.STOP if fallen else FIFOScheduler.CONTINUE


class PopulationSearch(ClimbingSearch):
    """A member climbs to the end of its generation; its checkpoint on disk is where it goes on."""

    def __init__(self, population: Generations, announce: Announce, packing: Packing) -> None:
        super().__init__(population, announce, packing)
        self._population = population

    def suggest(self, trial_id: str) -> dict[str, Json] | str | None:  # type: ignore[override]
        """A member that has not come to the end of the generation, or nothing before all of them have."""
        for successor in self._population.unplanned():  # before a parent goes on
            self._announce(successor)
        if self._population.unplanned():  # no more can be written
            return Searcher.FINISHED
        return super().suggest(trial_id)
