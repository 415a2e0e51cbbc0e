"""Importance of the hyperparameters of a sampled search: Optuna's fANOVA over the finished trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedsweep.common.yaml_values import Json
from fedsweep.report.arm_statistics import ended, final
from fedsweep.results import SweepManifest, TrialRecord
from fedsweep.results.arms import identity

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

FORESTS = 5  # several, since with few trials the result depends on the random draw of a forest
LEAST = 10  # finished trials, at least, that a forest is fitted to


@dataclass(frozen=True)
class Share:
    """The share of the whole, 0 to 1, that one or several hyperparameters explain."""

    name: str
    share: float
    """The mean over forests for fANOVA; the shares of all hyperparameters and of their pairs would add up to 1."""
    spread: tuple[float, float] | None = None
    """Lowest and highest share of any forest. The range reflects the random forests only, not the choice of trials."""


def importances(manifest: SweepManifest, trials: Sequence[TrialRecord]) -> list[Share] | str:
    """Return the fANOVA of the finished trials, most important first, or a clause on why there is none.

    Ranges are those that the trials span, on a logarithmic scale if the search samples on one. Hyperparameters that
    only some trials have are left out.

    Source: F. Hutter, H. Hoos and K. Leyton-Brown (2014), An efficient approach for assessing hyperparameter
    importance.
    """
    ends = [(trial, final(trial, manifest.metric)) for trial in trials if ended(trial) == "finished"]
    known = [(trial, value) for trial, value in ends if value is not None]
    values = {}
    for name in manifest.varied:
        if known and all(name in trial.plan.arm for trial, _ in known):
            axis = _coordinates([trial.plan.arm[name] for trial, _ in known], name in manifest.logarithmic)
            if len(set(axis)) > 1:
                values[name] = axis
    if len(known) < LEAST:
        return f"{len(known)} trials finished, and it takes {LEAST}"
    if len(values) < 2:
        return "fewer than two hyperparameters vary in every trial"
    if len({value for _, value in known}) < 2:
        return "all trials ended alike"
    drawn = _forests(values, [value for _, value in known])
    by_name = {name: [one[name] for one in drawn] for name in values}
    found = [Share(name, float(np.mean(shares)), (min(shares), max(shares))) for name, shares in by_name.items()]
    return sorted(found, key=lambda one: -one.share)


def _forests(values: Mapping[str, Sequence[float | str]], ends: Sequence[float]) -> list[dict[str, float]]:
    import optuna

    axes = {name: _axis(found) for name, found in values.items()}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    for place, end in enumerate(ends):
        params = {name: found[place] for name, found in values.items()}
        study.add_trial(optuna.create_trial(params=params, distributions=axes, value=end))
    return [
        optuna.importance.FanovaImportanceEvaluator(seed=seed).evaluate(study, params=list(axes))
        for seed in range(FORESTS)
    ]


def _axis(values: Sequence[float | str]) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        return CategoricalDistribution(list(dict.fromkeys(map(str, values))))
    return FloatDistribution(min(numbers), max(numbers))


def _coordinates(values: Sequence[Json], log: bool) -> list[float | str]:
    """Return numbers, or their logarithms, since Optuna's forests ignore logarithmic axes; other values as strings."""
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        return [identity(value) for value in values]
    return [math.log(number) for number in numbers] if log and min(numbers) > 0 else [*numbers]
