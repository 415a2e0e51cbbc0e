"""Main effects and interactions of a crossed grid (repeated-measures ANOVA over seeds), and importances of a search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedsweep.common.yaml_values import Json
from fedsweep.report.arm_statistics import ArmStatistics, group_by_arm
from fedsweep.report.holm_corrected_tests import holm
from fedsweep.report.importance import FORESTS, Share, importances
from fedsweep.report.intervals_and_power import LEVEL, Interval, t_interval
from fedsweep.report.text_tables import Section, texts
from fedsweep.report.units_and_labels import NOTHING, Units, names, short_names, shown_p
from fedsweep.results import SweepManifest
from fedsweep.results.arms import agrees, identity, setting

Names = tuple[str, ...]  # one factor: a dotted name, or several that vary together
Array = NDArray[np.float64]
SHAKY = 1e-12  # sums of squares below this share of the total are rounding errors
GRID = "grid"  # the search over all combinations


@dataclass(frozen=True)
class Effect:
    """A main effect of one factor, or the interaction of two."""

    factors: tuple[Names, ...]
    share: float
    """Share of the variation between all trials, 0 to 1 (eta squared)."""
    f: float | None
    """Mean square of the effect over that of its interaction with the seeds; None where that is zero."""
    degrees: tuple[float, float]
    """Degrees of freedom of F, after the correction for unequal variances."""
    p: float | None
    p_holm: float | None = None


@dataclass(frozen=True)
class Level:
    """The marginal mean of one value of a factor, over all values of the other factors."""

    names: Names
    value: Mapping[str, Json]
    mean: float
    interval: Interval | None
    """95% interval of the mean over seeds."""
    difference: float | None
    """The difference from the baseline's level over the same seeds; None for this level itself, or without it."""
    difference_interval: Interval | None


@dataclass(frozen=True)
class Factorial:
    """The effects of all factors of a crossed grid."""

    seeds: tuple[int, ...]
    effects: tuple[Effect, ...]
    """Main effects in the order of the grid, then the interactions of pairs."""
    levels: tuple[Level, ...]
    higher: float
    """Share of the variation from interactions of three or more factors."""
    of_seeds: float
    """Share of the variation between seeds that all arms have in common."""
    rest: float
    """Residual share of the variation: arms differ from seed to seed."""


@dataclass(frozen=True)
class _Grid:
    """The objective in every cell, as an array of shape (seeds, levels of each factor)."""

    factors: tuple[Names, ...]
    levels: tuple[tuple[dict[str, Json], ...], ...]
    seeds: tuple[int, ...]
    values: Array


def decompose(
    names: Sequence[str], arms: Sequence[ArmStatistics], baseline: Mapping[str, Json] | None
) -> Factorial | str:
    """Decompose a grid of at least two factors, or return a clause on why this is impossible.

    Each effect is tested against its own interaction with the seeds, which pairs the arms (repeated measures). Degrees
    of freedom follow Greenhouse and Geisser (1959), since variances of differences need not be equal. Holm's correction
    covers all tested effects.
    """
    grid = _grid(names, arms)
    if isinstance(grid, str):
        return grid
    centre = grid.values.mean()
    total = float(((grid.values - centre) ** 2).sum())
    if total <= SHAKY * float((grid.values**2).sum()):
        return "all trials ended alike"
    places = range(len(grid.factors))
    effects = [_effect(grid, chosen, total) for size in (1, 2) for chosen in combinations(places, size)]
    tested = [place for place, one in enumerate(effects) if one.p is not None]
    corrected = dict(zip(tested, holm([effects[place].p or 0.0 for place in tested]), strict=True))
    flat = grid.values.reshape(len(grid.seeds), -1)  # (seed, cell)
    of_seeds = flat.shape[1] * float(((flat.mean(1) - centre) ** 2).sum()) / total
    between = flat.shape[0] * float(((flat.mean(0) - centre) ** 2).sum()) / total
    return Factorial(
        seeds=grid.seeds,
        effects=tuple(replace(one, p_holm=corrected.get(place)) for place, one in enumerate(effects)),
        levels=tuple(_levels(grid, baseline or {})),
        higher=max(0.0, between - sum(one.share for one in effects)) if len(grid.factors) > 2 else 0.0,
        of_seeds=of_seeds,
        rest=max(0.0, 1 - between - of_seeds),
    )


def _grid(names: Sequence[str], arms: Sequence[ArmStatistics]) -> _Grid | str:
    if any(name not in one.arm.values for one in arms for name in names):
        return "a hyperparameter is there in some arms only"
    factors = _factors(names, arms)
    if len(factors) < 2:
        return "one factor varies"
    canonical = [arm.values for arm in group_by_arm(trial for one in arms for trial in one.arm.trials)]
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
    values = np.array([[values[seed] for values in there] for seed in seeds])
    return _Grid(tuple(factors), tuple(levels), seeds, values.reshape(len(seeds), *map(len, levels)))


def _factors(names: Sequence[str], arms: Sequence[ArmStatistics]) -> list[Names]:
    """Group names that determine each other into one factor; leave out names with one value in all arms."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        values = [identity(one.arm.values[name]) for one in arms]
        if len(set(values)) > 1:
            found.setdefault(tuple(values.index(value) for value in values), []).append(name)
    return [tuple(together) for together in found.values()]


def _parts(arms: Sequence[Mapping[str, Json]], factor: Names) -> list[dict[str, Json]]:
    return [{name: arm[name] for name in factor} for arm in arms]


def _effect(grid: _Grid, chosen: tuple[int, ...], total: float) -> Effect:
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
    """Return Greenhouse and Geisser's epsilon: 1 if the effect varies equally in all directions, 1 / free if in one."""
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


@dataclass(frozen=True)
class Effects:
    """The decomposition of a grid with several factors, the importances of a search, or the reason for neither."""

    manifest: SweepManifest
    units: Units
    factorial: Factorial | None = None
    importances: tuple[Share, ...] = ()
    missing: str = ""

    @classmethod
    def of(cls, manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Effects:
        """Compute the effects or importances from the finished trials."""
        units = Units.of(manifest.metric, arms)
        if manifest.search == GRID:
            found = decompose(dotted := names(manifest, arms), arms, manifest.baseline)
            if isinstance(found, str):
                return cls(manifest, units, missing=f"No main effects: {found}." if len(dotted) > 1 else "")
            return cls(manifest, units, factorial=found)
        drawn = importances(manifest, [trial for one in arms for trial in one.arm.trials])
        if isinstance(drawn, str):
            return cls(manifest, units, missing=f"No importances: {drawn}.")
        return cls(manifest, units, importances=tuple(drawn))

    def shares(self) -> list[Share]:
        """Return the shares of the variation between trials by factor, or the importances."""
        if self.factorial is None:
            return [*self.importances]
        known = [Share(effect_name(one), one.share) for one in self.factorial.effects]
        return [*known, *(Share(name, share) for name, share in _rest(self.factorial).items())]

    def findings(self) -> list[str]:
        """Return one sentence on all factors, or nothing without effects or importances."""
        if self.factorial is not None:
            said = [f"{effect_name(one)} {100 * one.share:.0f}% ({_verdict(one)})" for one in self.factorial.effects]
            return [f"Of the variation between trials: {'; '.join(said)}."]
        if self.importances:
            said = [f"{one.name} {100 * one.share:.0f}%" for one in self.importances]
            return [f"Importance for {self.manifest.metric} by fANOVA: {'; '.join(said)}."]
        return []

    def sections(self) -> list[Section]:
        """Return the decomposition and the marginal means, or the importances."""
        if self.factorial is not None:
            return [_variation(self.factorial), _marginal(self.factorial, self.units)]
        return [_importance(self.importances)] if self.importances else []


def effect_name(effect: Effect) -> str:
    """Return the name of an effect, such as `rank` or `rank x position`."""
    return " x ".join(", ".join(short_names(factor).values()) for factor in effect.factors)


def _verdict(effect: Effect) -> str:
    if effect.p_holm is None:
        return "not testable"
    return f"Holm p {shown_p(effect.p_holm)}" + ("" if effect.p_holm <= LEVEL else ", not detectable")


def _rest(found: Factorial) -> dict[str, float]:
    """Return the non-zero shares that neither single factors nor pairs explain."""
    rest = {"three and more together": found.higher, "seed": found.of_seeds, "arm by seed": found.rest}
    return {name: share for name, share in rest.items() if share > 0}


def _variation(found: Factorial) -> Section:
    rows = [
        [
            effect_name(one), f"{100 * one.share:.1f}", NOTHING if one.f is None else f"{one.f:.2f}",
            f"{one.degrees[0]:.1f}, {one.degrees[1]:.1f}", shown_p(one.p), shown_p(one.p_holm),
        ]
        for one in found.effects
    ]  # fmt: skip
    rows += [[name, f"{100 * share:.1f}", *[NOTHING] * 4] for name, share in _rest(found).items()]
    head = ["effect", "share", "F", "degrees of freedom", "p", "Holm p"]
    return Section("Main effects and interactions", head, rows, 1, *texts("variation", seeds=len(found.seeds)))


def _marginal(found: Factorial, units: Units) -> Section:
    rows = []
    for one in found.levels:
        value = ", ".join(setting(short_names(one.names)[name], given) for name, given in one.value.items())
        apart = [units.difference(one.difference), units.interval(one.difference_interval)]
        rows.append([value, units.value(one.mean), units.interval(one.interval), *apart])
    head = ["level", "mean", "95% interval", "difference", "95% of it"]
    return Section("Marginal means", head, rows, 1, *texts("marginal_means"))


def _importance(found: Sequence[Share]) -> Section:
    rows = [
        [one.name, f"{100 * one.share:.1f}", " to ".join(f"{100 * end:.1f}" for end in one.spread or ()) or NOTHING]
        for one in found
    ]
    return Section(
        "Importance of hyperparameters",
        ["hyperparameter", "share", "forests"],
        rows,
        1,
        *texts("importance", forests=FORESTS),
    )
