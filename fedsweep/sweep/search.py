"""Samples as a Ray searcher. What it knows lies in the sweep's folder, so that a resumed search is the same."""

from __future__ import annotations

from typing import Any

from optuna.trial import FrozenTrial

from fedsweep.common.yaml_values import Json
from fedsweep.results import SweepStore, TrialPlan
from fedsweep.sweep import warm_start
from fedsweep.sweep.packing import Packing
from fedsweep.sweep.plan import Plan
from fedsweep.sweep.proposals import Proposals
from fedsweep.sweep.searcher import Announce, FolderSearcher, suggestion


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
