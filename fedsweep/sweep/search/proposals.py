"""What to try next: a sample is a function of its number and of the results that it may know, of nothing else.

Optuna proposes. Its study is made anew for each sample from what is given, so that it remembers no order of arrival.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from fedsweep.common.randomness import derived_seed
from fedsweep.common.yaml_values import Json
from fedsweep.results import OutcomeName, TrialRecord
from fedsweep.results.arms import Arm, identity
from fedsweep.sweep.space.axes import Axis
from fedsweep.sweep.space.conditions import Resolve
from fedsweep.sweep.space.search_space import SearchSpace

STATES: dict[OutcomeName, TrialState] = {
    "finished": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "diverged": TrialState.FAIL,
    "failed": TrialState.FAIL,
}


class Proposals:
    """The samples of a search space, in order."""

    def __init__(
        self, space: SearchSpace, resolve: Resolve, known: Sequence[tuple[Arm, tuple[float, ...]]] = ()
    ) -> None:
        """`resolve` gives what conditions are asked of; `known` are arms of another sweep with their values, by
        objective (a warm start).
        """
        if space.search.name == "grid":
            raise ValueError("a grid is not sampled")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.search, self.space, self._resolve = space.search, space, resolve
        self._distributions = {name: distribution(axis) for name, axis in space.space.items()}
        self._known = [self._frozen(arm, TrialState.COMPLETE, values) for arm, values in known]

    def consulted(self, number: int) -> bool:
        """Whether the estimator proposes this sample; otherwise it is random, and independent of any result."""
        return self.search.name == "tpe" and number + len(self._known) >= self.search.startup

    def needed(self, number: int) -> range:
        """The samples whose results this one is proposed from."""
        if self.search.name != "tpe" or not self.consulted(number):
            return range(0)
        return range(max(number - self.search.in_flight + 1, 0))

    def arm(self, number: int, samples: Sequence[Arm], results: Mapping[int, FrozenTrial]) -> Arm:
        """A sample, given all those before it; of their results only the needed ones are looked at.

        Those whose results it may not know are running as far as it is concerned, whether they have ended or not.
        """
        needed = self.needed(number)
        study = optuna.create_study(
            directions=["maximize" if mode == "max" else "minimize" for mode in self.space.objective.modes],
            sampler=self._sampler(number),
        )
        if self.consulted(number):
            study.add_trials(self._known)
            study.add_trials(results[place] for place in needed)
            study.add_trials(self._frozen(arm, TrialState.RUNNING) for arm in samples[len(needed) : number])
        if number < len(self.search.first):
            study.enqueue_trial(self._encoded(self.search.first[number]))
        return self._drawn(study.ask())

    def result(self, trial: TrialRecord) -> FrozenTrial:
        """A trial that has ended as Optuna shall know it; without a finite objective it counts as failed.

        The estimator ranks pruned trials behind finished ones, by round and value, and leaves failed ones out.
        """
        if trial.outcome is None:
            raise ValueError(f"trial {trial.plan.key} has not ended")
        arm, state, objective = trial.plan.arm, STATES[trial.outcome.outcome], self.space.objective
        if state == TrialState.COMPLETE:
            values = objective.values(trial.history)
            return self._frozen(arm, state, values) if values else self._frozen(arm, TrialState.FAIL)
        if state == TrialState.PRUNED:
            reported = {record.round: record.metrics.get(objective.metric) for record in trial.history}
            return self._frozen(arm, state, rounds={one: value for one, value in reported.items() if value is not None})
        return self._frozen(arm, state)

    def _drawn(self, trial: optuna.Trial) -> Arm:
        """Names are drawn one after the other; whether an axis is there may depend on those before."""
        arm: Arm = {}
        while (name := self.space.next_name(arm, self._resolve)) is not None:
            arm[name] = decoded(self.space.space[name], drawn(trial, name, self._distributions[name]))
        return self.space.exact(arm)

    def _sampler(self, number: int) -> BaseSampler:
        seed = derived_seed(self.search.seed, "search", number) % 2**32
        if not self.consulted(number):
            return RandomSampler(seed=seed)
        two = self.space.objective.against is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # As Optuna has it by default, hyperparameters are modelled jointly for one objective, apart for two.
            return TPESampler(n_startup_trials=1, seed=seed, multivariate=not two, group=not two, constant_liar=True)

    def _encoded(self, arm: Arm) -> dict[str, str | int | float]:
        return {name: encoded(self.space.space[name], value) for name, value in arm.items()}

    def _frozen(
        self,
        arm: Arm,
        state: TrialState,
        values: tuple[float, ...] | None = None,
        rounds: Mapping[int, float] | None = None,
    ) -> FrozenTrial:
        return create_trial(
            state=state,
            params=self._encoded(arm),
            distributions={name: self._distributions[name] for name in arm},
            values=values,
            intermediate_values=dict(rounds or {}),
        )


def encoded(axis: Axis, value: Json) -> str | int | float:
    """A hyperparameter for Optuna, whose categories are scalars; ours may be lists (depths) or objects (a method)."""
    if axis.choice is not None:
        return identity(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value} is not of a range")
    return value


def decoded(axis: Axis, value: str | int | float) -> Json:
    """The inverse of `encoded`."""
    return json.loads(value) if axis.choice is not None and isinstance(value, str) else value


def drawn(trial: optuna.Trial, name: str, one: BaseDistribution) -> str | int | float:
    """A value of a distribution, which the trial remembers."""
    if isinstance(one, CategoricalDistribution):
        return trial.suggest_categorical(name, one.choices)  # type: ignore[return-value]
    if isinstance(one, IntDistribution):
        return trial.suggest_int(name, one.low, one.high, step=one.step, log=one.log)
    if isinstance(one, FloatDistribution):
        return trial.suggest_float(name, one.low, one.high, step=one.step, log=one.log)
    raise ValueError(f"{one} cannot be drawn from")


def distribution(axis: Axis) -> BaseDistribution:
    """Optuna's distribution of an axis."""
    if axis.choice is not None:
        return CategoricalDistribution([identity(one) for one in axis.choice])
    if axis.uniform is not None:
        return FloatDistribution(*axis.uniform, step=axis.step)
    if axis.loguniform is not None:
        return FloatDistribution(*axis.loguniform, log=True)
    if axis.integer is not None:
        return IntDistribution(*axis.integer, step=int(axis.step or 1))
    if axis.loginteger is not None:
        return IntDistribution(*axis.loginteger, log=True)
    raise ValueError("a grid is not sampled")
