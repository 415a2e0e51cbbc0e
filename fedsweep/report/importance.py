"""The importance of each hyperparameter in a search, computed from the finished trials by Optuna's fANOVA."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsweep.common.yaml_values import Json
from fedsweep.report.arm_statistics import ended, final
from fedsweep.results import SweepManifest, TrialRecord
from fedsweep.results.arms import identity

FORESTS = 5  # several, since with few trials the result depends on the random seed of the forest
LEAST = 10  # a forest is fitted to at least this many finished trials


@dataclass(frozen=True)
class Share:
    """The share of the objective's variation, from 0 to 1, that one or several hyperparameters explain."""

    name: str
    share: float
    """The mean over forests for fANOVA; the shares of all hyperparameters and of their pairs would add up to 1."""
    spread: tuple[float, float] | None = None
    """Lowest and highest share of any forest. The range reflects the random forests only, not the choice of trials."""


def importances(manifest: SweepManifest, trials: Sequence[TrialRecord]) -> list[Share] | str:
    """Return the fANOVA share of each hyperparameter, largest first, or the reason why shares cannot be computed.

    The shares apply to the range of values that each hyperparameter has in the finished trials. If the search samples
    a hyperparameter on a logarithmic scale, the logarithms of its values are used. A hyperparameter is left out if a
    finished trial has no value for it.

    Source: F. Hutter, H. Hoos and K. Leyton-Brown (2014), An efficient approach for assessing hyperparameter
    importance.
    """
    ended_well = [trial for trial in trials if ended(trial) == "finished" and final(trial, manifest.metric) is not None]
    arms = [trial.plan.arm for trial in ended_well]
    ends = [final(trial, manifest.metric) for trial in ended_well]
    if len(arms) < LEAST:
        return f"{len(arms)} trial{'s' * (len(arms) != 1)} finished, but at least {LEAST} are needed"
    names = [name for name in manifest.varied if all(name in arm for arm in arms)]
    axes = {name: _axis([arm[name] for arm in arms], name in manifest.logarithmic) for name in names}
    axes = {name: values for name, values in axes.items() if len(set(values)) > 1}
    if len(axes) < 2:
        return "fewer than two hyperparameters vary in every trial"
    if len(set(ends)) < 2:
        return "all trials have the same final value"

    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    ranges: dict[str, BaseDistribution] = {
        name: CategoricalDistribution([*dict.fromkeys(values)])
        if isinstance(values[0], str)
        else FloatDistribution(min(values), max(values))
        for name, values in axes.items()
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    for place, end in enumerate(ends):
        params = {name: values[place] for name, values in axes.items()}
        study.add_trial(optuna.create_trial(params=params, distributions=ranges, value=end))
    forests = (optuna.importance.FanovaImportanceEvaluator(seed=seed) for seed in range(FORESTS))
    drawn = [forest.evaluate(study, params=[*axes]) for forest in forests]
    by_name = {name: [one[name] for one in drawn] for name in axes}
    found = [Share(name, float(np.mean(shares)), (min(shares), max(shares))) for name, shares in by_name.items()]
    return sorted(found, key=lambda one: -one.share)


def _axis(values: Sequence[Json], log: bool) -> list[float] | list[str]:
    """Return the values of a hyperparameter as numbers, or as strings if any value is not a number.

    If `log` is true and all numbers are positive, return the logarithms of the numbers, since Optuna's fANOVA treats
    every range as linear.
    """
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        return [identity(value) for value in values]
    return [math.log(number) for number in numbers] if log and min(numbers) > 0 else numbers
