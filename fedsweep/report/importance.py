"""Which hyperparameters of a sampled search matter: fANOVA by Optuna, over the trials that finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsweep.arms import identity
from fedsweep.plain import Json
from fedsweep.report.arms import ended, final
from fedsweep.store import SweepManifest, TrialRecord

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

FORESTS = 8
"""The forest is drawn so often, because one of few trials depends on its draw."""
LEAST = 10
"""Finished trials from which on a forest says anything."""


@dataclass(frozen=True)
class Importance:
    """The share of a forest's variance over the space that one hyperparameter explains alone."""

    name: str
    share: float
    """Mean over forests, 0 to 1; the shares of all hyperparameters, with those of their pairs, would add up to 1."""
    low: float
    high: float
    """Least and most of the forests: how much depends on their draw. It says nothing of other trials."""


def importances(manifest: SweepManifest, trials: Sequence[TrialRecord]) -> list[Importance] | str:
    """fANOVA of what every finished trial has, most important first, or in a clause why there is none.

    Ranges are those that the trials span, over a logarithm where the search draws them so. A hyperparameter that is
    there in some trials only is left out.

    Source: F. Hutter, H. Hoos and K. Leyton-Brown (2014), An efficient approach for assessing hyperparameter
    importance.
    """
    ends = [(trial, final(trial, manifest.metric)) for trial in trials if ended(trial) == "finished"]
    known = [(trial, value) for trial, value in ends if value is not None]
    names = [name for name in manifest.varied if known and all(name in trial.plan.arm for trial, _ in known)]
    axes = {name: axis for name in names if (axis := _axis(name, [trial for trial, _ in known], manifest))}
    if len(known) < LEAST:
        return f"{len(known)} trials finished, and it takes {LEAST}"
    if len(axes) < 2:
        return "fewer than two hyperparameters vary in every trial"
    if len({value for _, value in known}) < 2:
        return "all trials ended alike"
    drawn = _forests(axes, known)
    found = [
        Importance(name, float(np.mean(shares)), min(shares), max(shares))
        for name in axes
        for shares in [[one[name] for one in drawn]]
    ]
    return sorted(found, key=lambda one: -one.share)


def _forests(axes: dict[str, BaseDistribution], known: Sequence[tuple[TrialRecord, float]]) -> list[dict[str, float]]:
    """The shares by each of several forests."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    for trial, value in known:
        study.add_trial(
            optuna.create_trial(
                params={name: _coordinate(axis, trial.plan.arm[name]) for name, axis in axes.items()},
                distributions=axes,
                value=value,
            )
        )
    return [
        optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=seed), params=list(axes), normalize=False
        )
        for seed in range(FORESTS)
    ]


def _axis(name: str, trials: Sequence[TrialRecord], manifest: SweepManifest) -> BaseDistribution | None:
    """The range of numbers, or the different values, that trials have; None where it is one."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    values = [trial.plan.arm[name] for trial in trials]
    if len({identity(value) for value in values}) < 2:
        return None
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        return CategoricalDistribution(list(dict.fromkeys(map(identity, values))))
    log = name in manifest.logarithmic and min(numbers) > 0
    return FloatDistribution(min(numbers), max(numbers), log=log)


def _coordinate(axis: BaseDistribution, value: Json) -> Any:
    """A value as Optuna takes it on that axis."""
    return identity(value) if hasattr(axis, "choices") else float(value)  # type: ignore[arg-type]
