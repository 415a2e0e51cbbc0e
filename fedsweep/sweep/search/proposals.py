"""The hyperparameter values that Optuna proposes for the samples of a search.

A new Optuna study is created for each sample, so the values do not depend on the order in which results arrive.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from fedsweep.common.randomness import derived_seed
from fedsweep.results import TrialRecord
from fedsweep.results.arms import Arm, equality, identity
from fedsweep.results.pareto import Mode
from fedsweep.sweep.space.axes import Axis, Resolve
from fedsweep.sweep.space.search_space import SearchSpace
from fedsweep.sweep.space.settings import RandomSearch

Distribution = CategoricalDistribution | FloatDistribution | IntDistribution
DIRECTIONS: dict[Mode, StudyDirection] = {"max": StudyDirection.MAXIMIZE, "min": StudyDirection.MINIMIZE}

REPEATED = 100  # at most this many draws per sample, until all samples are different


class Proposals:
    """The samples of a search space, as proposed by Optuna.

    A sample depends only on the search space, on its own number, and on the results of the samples that `needed`
    returns. For a warm start, `known` contains the arms of an earlier sweep, each with its objective values.
    """

    def __init__(
        self, space: SearchSpace, resolve: Resolve, known: Sequence[tuple[Arm, tuple[float, ...]]] = ()
    ) -> None:
        if space.search.name == "grid":
            raise ValueError("a grid is not sampled")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.search, self.space, self._resolve = space.search, space, resolve
        self._distributions = {name: distribution(axis) for name, axis in space.space.items()}
        self._known = [self._frozen(arm, TrialState.COMPLETE, values=values) for arm, values in known]

    def consulted(self, number: int) -> bool:
        """Return whether TPE proposes sample `number` from earlier results. Otherwise, the sample is random."""
        return self.search.name == "tpe" and number + len(self._known) >= self.search.startup

    def needed(self, number: int) -> range:
        """Return the numbers of the samples whose results are used to propose sample `number`."""
        if self.search.name != "tpe" or not self.consulted(number):
            return range(0)
        return range(max(number - self.search.in_flight + 1, 0))

    def arm(self, number: int, samples: Sequence[Arm], results: Mapping[int, FrozenTrial]) -> Arm:
        """Return the arm of sample `number`.

        Earlier samples whose results are not needed (see `needed`) count as running, even if they have ended.

        Args:
            number: Number of the sample, from 0.
            samples: The arms of all earlier samples.
            results: The results of earlier samples by number, including all samples that `needed` returns.
        """
        needed = self.needed(number)
        directions = [DIRECTIONS[mode] for mode in self.space.goal.modes]
        study = optuna.create_study(directions=directions, sampler=self._sampler(number))
        if self.consulted(number):
            study.add_trials(self._known)
            study.add_trials(results[place] for place in needed)
            study.add_trials(self._frozen(arm, TrialState.RUNNING) for arm in samples[len(needed) : number])
        if number < len(self.search.first):
            study.enqueue_trial(self._encoded(self.search.first[number]))
        return self._complete(study.ask())

    def result(self, trial: TrialRecord) -> FrozenTrial:
        """Return an ended trial in Optuna's format. A trial without a finite objective counts as failed.

        TPE ranks pruned trials below finished trials, and sorts pruned trials by their last round and value. It ignores
        failed trials.
        """
        if trial.outcome is None:
            raise ValueError(f"trial {trial.plan.key} has not ended")
        arm, objective = trial.plan.arm, self.space.goal
        if trial.outcome.outcome == "pruned":
            reported = [one for one in trial.history if objective.metric in one.metrics]
            values_by_round = {one.round: one.metrics[objective.metric] for one in reported}
            return self._frozen(arm, TrialState.PRUNED, intermediate_values=values_by_round)
        values = objective.values(trial.history) if trial.outcome.outcome == "finished" else None
        return self._frozen(arm, TrialState.COMPLETE if values else TrialState.FAIL, values=values)

    def _complete(self, trial: optuna.Trial) -> Arm:
        arm: Arm = {}
        while (name := self.space.next_name(arm, self._resolve)) is not None:
            value = _drawn(trial, name, self._distributions[name])
            arm[name] = value if self.space.space[name].choice is None else json.loads(value)
        return self.space.exact(arm)

    def _sampler(self, number: int) -> BaseSampler:
        seed = derived_seed(self.search.seed, "search", number) % 2**32
        if not self.consulted(number):
            return RandomSampler(seed=seed)
        two = self.space.goal.against is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # Hyperparameters are modelled jointly for one objective, and independently for two, as is Optuna's default.
            return TPESampler(n_startup_trials=1, seed=seed, multivariate=not two, group=not two, constant_liar=True)

    def _encoded(self, arm: Arm) -> dict[str, Any]:
        """Return an arm in the form that Optuna accepts.

        Choices are converted to text, because they may be lists or objects.
        """
        axes = self.space.space
        return {name: value if axes[name].choice is None else identity(value) for name, value in arm.items()}

    def _frozen(self, arm: Arm, state: TrialState, **told: Any) -> FrozenTrial:
        distributions: dict[str, BaseDistribution] = {name: self._distributions[name] for name in arm}
        return create_trial(state=state, params=self._encoded(arm), distributions=distributions, **told)


def _drawn(trial: optuna.Trial, name: str, one: Distribution) -> Any:
    if isinstance(one, CategoricalDistribution):
        return trial.suggest_categorical(name, one.choices)
    if isinstance(one, IntDistribution):
        return trial.suggest_int(name, one.low, one.high, step=one.step, log=one.log)
    return trial.suggest_float(name, one.low, one.high, step=one.step, log=one.log)


def distribution(axis: Axis) -> Distribution:
    """Return the Optuna distribution from which the values of an axis are drawn."""
    if axis.choice is not None:
        return CategoricalDistribution([identity(one) for one in axis.choice])
    if (bounds := axis.uniform or axis.loguniform) is not None:
        return FloatDistribution(*bounds, log=axis.loguniform is not None, step=axis.step)
    if (whole := axis.integer or axis.loginteger) is not None:
        return IntDistribution(*whole, log=axis.loginteger is not None, step=int(axis.step or 1))
    raise ValueError("a grid is not sampled")


def drawn_values(axes: Mapping[str, Axis], number: int, seed: int) -> list[Arm]:
    """Return `number` different random samples of the axes, the same for the same axes and seed.

    Fewer samples are returned if the axes have fewer different values. The first samples do not depend on `number`.
    """
    search = RandomSearch(samples=max(number, 1), seed=seed)
    proposals = Proposals(SearchSpace(experiment="", space=dict(axes), search=search, seeds=(0,)), lambda arm: {})
    found: dict[str, Arm] = {}
    for place in range(REPEATED * number):
        arm = proposals.arm(place, [], {})
        found.setdefault(equality(arm), arm)
        if len(found) == number:
            break
    return [*found.values()]
