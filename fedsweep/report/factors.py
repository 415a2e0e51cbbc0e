"""Main effects and interactions of a crossed grid, from repeated measures over common seeds. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedsweep.common.yaml_values import Json
from fedsweep.report.intervals import Interval, t_interval
from fedsweep.report.paired_comparison import holm
from fedsweep.report.statistics import ArmStatistics
from fedsweep.report.trials_by_arm import group
from fedsweep.results.arms import agrees, identity

Names = tuple[str, ...]
"""One factor: a dotted name, or several that vary together."""
Array = NDArray[np.float64]
SHAKY = 1e-12
"""Sums of squares below this part of the whole are rounding."""


@dataclass(frozen=True)
class Effect:
    """A factor's main effect, or what the combination of two factors adds to both main effects."""

    factors: tuple[Names, ...]
    share: float
    """Of all variation between trials, 0 to 1 (eta squared)."""
    f: float | None
    """Mean square of the effect over that of its interaction with the seeds; None where that is zero."""
    degrees: tuple[float, float]
    """Degrees of freedom of F, after the correction for unequal variances."""
    p: float | None
    p_holm: float | None = None


@dataclass(frozen=True)
class Level:
    """A factor's value, over all values of the others."""

    names: Names
    value: Mapping[str, Json]
    mean: float
    interval: Interval | None
    """Of the mean over seeds, 95%."""
    difference: float | None
    """To the baseline's level over the same seeds; None of that level itself, and where the baseline names none."""
    difference_interval: Interval | None


@dataclass(frozen=True)
class Factorial:
    """What each factor of a crossed grid does."""

    seeds: tuple[int, ...]
    effects: tuple[Effect, ...]
    """Main effects in the order of the grid, then those of pairs."""
    levels: tuple[Level, ...]
    higher: float
    """Share of the variation that is of three and more factors together."""
    of_seeds: float
    """Share of the variation between seeds, the same in all arms."""
    rest: float
    """Share of the variation that neither explains: arms differ from seed to seed."""


@dataclass(frozen=True)
class _Grid:
    """Values by (seed, level of each factor), every cell of them."""

    factors: tuple[Names, ...]
    levels: tuple[tuple[dict[str, Json], ...], ...]
    seeds: tuple[int, ...]
    values: Array


def factorial(
    names: Sequence[str], arms: Sequence[ArmStatistics], baseline: Mapping[str, Json] | None
) -> Factorial | str:
    """Decompose a grid of two factors or more, or say in a clause why that cannot be done.

    Each effect is tested against its own interaction with the seeds, which pairs the arms (repeated measures); the
    degrees of freedom are those of Greenhouse and Geisser (1959), since variances of differences need not be equal.
    Holm's correction is over all effects tested.
    """
    grid = _grid(names, arms)
    if isinstance(grid, str):
        return grid
    total = float(((grid.values - grid.values.mean()) ** 2).sum())
    if total <= SHAKY * float((grid.values**2).sum()):
        return "all trials ended alike"
    places = range(len(grid.factors))
    effects = [_effect(grid, chosen, total) for size in (1, 2) for chosen in combinations(places, size)]
    tested = [place for place, one in enumerate(effects) if one.p is not None]
    corrected = dict(zip(tested, holm([effects[place].p or 0.0 for place in tested]), strict=True))
    n, cells = len(grid.seeds), grid.values[0].size
    of_seeds = cells * float(((_flat(grid).mean(1) - grid.values.mean()) ** 2).sum()) / total
    between = n * float(((_flat(grid).mean(0) - grid.values.mean()) ** 2).sum()) / total
    return Factorial(
        seeds=grid.seeds,
        effects=tuple(
            Effect(one.factors, one.share, one.f, one.degrees, one.p, corrected.get(place))
            for place, one in enumerate(effects)
        ),
        levels=tuple(_levels(grid, baseline or {})),
        higher=max(0.0, between - sum(one.share for one in effects)) if len(grid.factors) > 2 else 0.0,
        of_seeds=of_seeds,
        rest=max(0.0, 1 - between - of_seeds),
    )


def _grid(names: Sequence[str], arms: Sequence[ArmStatistics]) -> _Grid | str:
    """The values of all cells over the seeds that all of them finished."""
    if any(name not in one.arm.values for one in arms for name in names):
        return "a hyperparameter is there in some arms only"
    factors = _factors(names, arms)
    if len(factors) < 2:
        return "one factor varies"
    canonical = [arm.values for arm in group(trial for one in arms for trial in one.arm.trials)]
    levels = [tuple({identity(level): level for level in _parts(canonical, factor)}.values()) for factor in factors]
    if any(len(found) < 2 for found in levels):
        return "one factor varies"
    by_cell = {
        tuple(identity(part) for factor in factors for part in _parts([one.arm.values], factor)): one for one in arms
    }
    cells = [by_cell.get(key) for key in product(*([identity(level) for level in found] for found in levels))]
    if None in cells:
        return "the arms are not all combinations of their values"
    there = [one.values for one in cells if one is not None]
    seeds = tuple(sorted(set.intersection(*(set(values) for values in there))))
    if len(seeds) < 2:
        return "fewer than two seeds finished in every arm"
    shape = [len(seeds), *map(len, levels)]
    values = np.array([[values[seed] for values in there] for seed in seeds]).reshape(shape)
    return _Grid(tuple(factors), tuple(levels), seeds, values)


def _factors(names: Sequence[str], arms: Sequence[ArmStatistics]) -> list[Names]:
    """Names that determine each other are one factor, those with one value in all arms none."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        values = [identity(one.arm.values[name]) for one in arms]
        if len(set(values)) > 1:
            found.setdefault(tuple(values.index(value) for value in values), []).append(name)
    return [tuple(together) for together in found.values()]


def _parts(arms: Sequence[Mapping[str, Json]], factor: Names) -> list[dict[str, Json]]:
    """What each arm has of a factor."""
    return [{name: arm[name] for name in factor} for arm in arms]


def _flat(grid: _Grid) -> Array:
    """Values by (seed, cell)."""
    return grid.values.reshape(len(grid.seeds), -1)


def _effect(grid: _Grid, chosen: tuple[int, ...], total: float) -> Effect:
    """Sums of squares of an effect and of its interaction with the seeds."""
    contrast = grid.values
    for place in range(len(grid.factors)):
        mean = contrast.mean(place + 1, keepdims=True)
        contrast = contrast - mean if place in chosen else mean
    own = contrast.reshape(len(grid.seeds), -1)  # (seeds, levels): every seed's own effect
    n, others = len(own), grid.values[0].size // own.shape[1]
    squares = n * others * float((own.mean(0) ** 2).sum())
    error = others * float(((own - own.mean(0)) ** 2).sum())
    free = int(np.prod([len(grid.levels[place]) - 1 for place in chosen]))
    factors = tuple(grid.factors[place] for place in chosen)
    if error <= SHAKY * total:
        return Effect(factors, squares / total, None, (free, free * (n - 1)), None)
    f = (squares / free) / (error / (free * (n - 1)))
    degrees = (free * _sphericity(own, free), free * (n - 1) * _sphericity(own, free))
    return Effect(factors, squares / total, f, degrees, float(stats.f.sf(f, *degrees)))


def _sphericity(own: Array, free: int) -> float:
    """Greenhouse and Geisser's epsilon: 1 where the effect varies alike in all directions, 1 / free where in one."""
    deviations = own - own.mean(0)
    gram = deviations @ deviations.T  # has the covariance's eigenvalues, and is as small as there are seeds
    return float(np.trace(gram) ** 2 / (free * (gram**2).sum()))


def _levels(grid: _Grid, baseline: Mapping[str, Json]) -> Iterator[Level]:
    for place, factor in enumerate(grid.factors):
        others = tuple(axis for axis in range(1, grid.values.ndim) if axis != place + 1)
        means = grid.values.mean(others)  # (seeds, levels)
        wanted = {name: baseline[name] for name in factor if name in baseline}
        held = [bool(wanted) and agrees(wanted, level) for level in grid.levels[place]]
        base = means[:, held.index(True)] if any(held) else None
        for number, level in enumerate(grid.levels[place]):
            apart = None if base is None or held[number] else means[:, number] - base
            yield Level(
                names=factor,
                value=level,
                mean=float(means[:, number].mean()),
                interval=t_interval(means[:, number].tolist()),
                difference=None if apart is None else float(apart.mean()),
                difference_interval=None if apart is None else t_interval(apart.tolist()),
            )
