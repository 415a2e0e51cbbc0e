"""The importance of the hyperparameters of a sampled search: fANOVA by Optuna, over the trials that finished."""

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

FORESTS = 5
"""The forest is drawn so often, because one of few trials depends on its draw."""
LEAST = 10
"""Finished trials from which on a forest says anything."""


@dataclass(frozen=True)
class Share:
    """The share, 0 to 1, of the whole that a hyperparameter, or several together, explain."""

    name: str
    share: float
    """The mean over forests for fANOVA; the shares of all hyperparameters and of their pairs would add up to 1."""
    low: float | None = None
    high: float | None = None
    """Least and most of the forests: how much depends on their draw. It says nothing of other trials."""

    @property
    def spread(self) -> tuple[float, float] | None:
        """Least and most of the forests in percent."""
        return None if self.low is None or self.high is None else (100 * self.low, 100 * self.high)


def importances(manifest: SweepManifest, trials: Sequence[TrialRecord]) -> list[Share] | str:
    """Return the fANOVA of the finished trials, most important first, or a clause on why there is none.

    Ranges are those that the trials span, over a logarithm where the search draws them so. A hyperparameter that is
    there in some trials only is left out.

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
    found = [Share(name, float(np.mean(shares)), min(shares), max(shares)) for name, shares in by_name.items()]
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
    """Numbers, or their logarithms, because Optuna's forests know no logarithmic axis; anything else as words."""
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        return [identity(value) for value in values]
    return [math.log(number) for number in numbers] if log and min(numbers) > 0 else [*numbers]
