"""What to try next, as Ray searchers: a planned list, or samples from Optuna's ask-and-tell interface.

Ray's OptunaSearch tells a pruned trial as complete, leaves a failed one running and draws from one running generator,
so that a resumed search differs from an undisturbed one. Here each sample is asked with a sampler seeded by its number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from ray.tune.search import Searcher

from fedsweep.arms import Arm
from fedsweep.plain import Json
from fedsweep.seeding import derived_seed
from fedsweep.store import Outcome, OutcomeName, SweepStore, TrialPlan
from fedsweep.sweep.plan import Plan
from fedsweep.sweep.space import Axis

Announce = Callable[[TrialPlan], None]


def suggestion(plan: TrialPlan) -> dict[str, Json]:
    """A trial's Ray configuration: flat dotted hyperparameters, and the key under which the whole plan is on disk."""
    return {"trial": plan.key, **plan.arm, "seed": plan.seed}


class PlannedSearch(Searcher):
    """Replays a list of trials."""

    def __init__(self, plans: Sequence[TrialPlan], announce: Announce) -> None:
        super().__init__()
        self._plans = iter(plans)
        self._announce = announce

    def suggest(self, trial_id: str) -> dict[str, Json] | str:  # type: ignore[override]
        """The next trial of the plan."""
        plan = next(self._plans, None)
        if plan is None:
            return Searcher.FINISHED
        self._announce(plan)
        return suggestion(plan)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing to learn."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the sweep's own folder is what a resume reads."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, see `save`."""


class SampledSearch(Searcher):
    """Samples hyperparameters by Optuna; the study's journal lies in the sweep's folder."""

    def __init__(self, plan: Plan, sweep: SweepStore, announce: Announce) -> None:
        super().__init__()
        self._plan, self._sweep, self._announce = plan, sweep, announce
        self._distributions = {name: distribution(axis) for name, axis in plan.space.space.items()}
        self._asked: dict[str, tuple[int, TrialPlan]] = {}
        self._study = open_study(sweep.folder / "study.journal", plan.space.objective.mode)
        self._pending = self._settle()

    def suggest(self, trial_id: str) -> dict[str, Json] | str:  # type: ignore[override]
        """A trial that an earlier session left unfinished, or else a new sample."""
        if self._pending:
            trial = self._pending.pop(0)
            number, arm = trial.number, decoded(trial.params)
        elif len(self._study.get_trials(deepcopy=False)) < (self._plan.sampled or 0):
            number = len(self._study.get_trials(deepcopy=False))
            self._study.sampler = self._sampler(number)
            arm = decoded(self._study.ask(self._distributions).params)
        else:
            return Searcher.FINISHED
        plan = self._trial(number, arm)
        self._asked[trial_id] = (number, plan)
        self._announce(plan)
        return suggestion(plan)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Hand each round's value to the study, once."""
        number, _ = self._asked[trial_id]
        self._report(number, result["round"], result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tell the study how the trial ended, and its last round, which Ray does not report when it stops a trial."""
        number, _ = self._asked.pop(trial_id)
        if error or result is None:
            self._study.tell(number, state=TrialState.FAIL)
            return
        self._report(number, result["round"], result)
        if result["round"] < self._plan.base.federation.rounds:
            self._study.tell(number, state=TrialState.PRUNED)  # with its last reported value
        else:
            self._study.tell(number, result[self._plan.space.objective.metric])

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the study's journal is what a resume reads."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, see `save`."""

    def _trial(self, number: int, arm: Arm) -> TrialPlan:
        return self._plan.trial(number, arm, self._plan.space.seeds[0])

    def _report(self, number: int, round: int, metrics: Mapping[str, float]) -> None:
        metric = self._plan.space.objective.metric
        frozen = self._study.get_trials(deepcopy=False)[number]
        # The untuned model (round 0) reports no training loss, for one.
        if metric in metrics and round not in frozen.intermediate_values:
            self._study._storage.set_trial_intermediate_value(frozen._trial_id, round, metrics[metric])

    def _settle(self) -> list[FrozenTrial]:
        """Bring study and disk to the same knowledge after a crash; return the trials that were left unfinished.

        Ray tells the study how a trial ended before the outcome is on disk, so either of the two may lack it.
        """
        unfinished = []
        for trial in self._study.get_trials():
            store = self._sweep.trial(self._trial(trial.number, decoded(trial.params)).key)
            outcome, history = store.outcome(), store.history()
            if trial.state != TrialState.RUNNING:
                if outcome is None:
                    store.end(_outcome_of(trial.state, history[-1].round if history else 0))
            elif outcome is None:
                unfinished.append(trial)
            else:
                for record in history:
                    self._report(trial.number, record.round, record.metrics)
                value = history[-1].metrics[self._plan.space.objective.metric] if history else None
                whole = outcome.outcome == "finished"
                self._study.tell(trial.number, value if whole else None, state=STATES[outcome.outcome])
        return unfinished

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        search = self._plan.space.search
        if search.name == "tpe":
            seed = derived_seed(search.seed, "search", number) % 2**32
            return optuna.samplers.TPESampler(n_startup_trials=search.startup, seed=seed)
        if search.name == "random":
            return optuna.samplers.RandomSampler(seed=derived_seed(search.seed, "search", number) % 2**32)
        raise ValueError(f"search {search.name} does not sample")


STATES: dict[OutcomeName, TrialState] = {
    "finished": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}


def _outcome_of(state: TrialState, round: int) -> Outcome:
    name = next(name for name, one in STATES.items() if one == state)
    error = "the session ended before it could keep the traceback" if name == "failed" else None
    return Outcome(outcome=name, round=round, error=error)


def decoded(params: Mapping[str, Any]) -> Arm:
    """Optuna's parameters as hyperparameters: categories are kept as JSON."""
    return {name: json.loads(value) if isinstance(value, str) else value for name, value in params.items()}


def open_study(journal: Path, mode: str) -> optuna.Study:
    """The sweep's study, made on first use."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal.parent.mkdir(parents=True, exist_ok=True)
    return optuna.create_study(
        study_name=journal.parent.name,
        storage=JournalStorage(JournalFileBackend(str(journal))),
        direction="maximize" if mode == "max" else "minimize",
        load_if_exists=True,
    )


def distribution(axis: Axis) -> BaseDistribution:
    """Optuna's distribution of an axis."""
    if axis.choice is not None:
        # As JSON, because Optuna's categories are scalars and ours may be lists (depths) or whole objects (a method).
        return CategoricalDistribution([json.dumps(one) for one in axis.choice])
    if axis.uniform is not None:
        return FloatDistribution(*axis.uniform)
    if axis.loguniform is not None:
        return FloatDistribution(*axis.loguniform, log=True)
    if axis.integer is not None:
        return IntDistribution(*axis.integer)
    raise ValueError("a grid is not sampled")
