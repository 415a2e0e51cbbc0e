"""Effects of factors in a full grid (repeated-measures ANOVA), and importances of hyperparameters in a search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedsweep.common.yaml_values import Json
from fedsweep.report.arm_statistics import ArmStatistics, group_by_arm
from fedsweep.report.holm_corrected_tests import holm
from fedsweep.report.importance import FORESTS, Share, importances
from fedsweep.report.intervals_and_power import LEVEL, Interval, t_interval
from fedsweep.report.text_tables import Section, texts
from fedsweep.report.units_and_labels import NOTHING, Units, names, shown_p
from fedsweep.results import SweepManifest
from fedsweep.results.arms import agrees, identity, setting, short_names

Names = tuple[str, ...]  # one factor: a dotted name, or several that vary together
Array = NDArray[np.float64]
SHAKY = 1e-12  # a sum of squares below this share of the total is a rounding error
GRID = "grid"  # the search over all combinations


@dataclass(frozen=True)
class Effect:
    """The main effect of one factor, or the interaction of two factors."""

    factors: tuple[Names, ...]
    share: float
    """Share of the variation between all trials, 0 to 1 (eta squared)."""
    f: float | None
    """Mean square of the effect divided by that of its interaction with the seeds; None if the divisor is 0."""
    degrees: tuple[float, float]
    """Degrees of freedom of F, after the correction for unequal variances."""
    p: float | None
    p_holm: float | None = None

    @property
    def name(self) -> str:
        """The names of the factors: `rank` for a main effect, `rank x position` for an interaction."""
        return " x ".join(", ".join(short_names(factor).values()) for factor in self.factors)

    @property
    def verdict(self) -> str:
        """The p-value after Holm's correction as text, for example `p 0.400, not detectable`, or `not testable`."""
        if self.p_holm is None:
            return "not testable"
        return f"p {shown_p(self.p_holm)}" + ", not detectable" * (self.p_holm > LEVEL)


@dataclass(frozen=True)
class Level:
    """One value of a factor, with its marginal mean: the objective averaged over all values of the other factors."""

    value: Mapping[str, Json]
    mean: float
    interval: Interval | None
    """95% interval of the mean over seeds."""
    difference: float | None
    """Difference from the baseline's level over the same seeds; None for the baseline's level or without a baseline."""
    difference_interval: Interval | None


@dataclass(frozen=True)
class Factorial:
    """The analysis of variance of a full grid: effects, marginal means, and shares of the variation."""

    seeds: tuple[int, ...]
    effects: tuple[Effect, ...]
    """Main effects in the order of the grid, then the interactions of pairs."""
    levels: tuple[Level, ...]
    higher: float
    """Share of the variation from interactions of three or more factors."""
    of_seeds: float
    """Share of the variation between seeds that all arms have in common."""
    rest: float
    """Residual share of the variation: differences between arms that change from seed to seed."""

    @property
    def unexplained(self) -> list[Share]:
        """The rest of the variation, after all single factors and pairs of factors, without shares of zero.

        The rest consists of interactions of three or more factors, of effects of the seed, and of noise.
        """
        rest = {"three or more factors": self.higher, "seed": self.of_seeds, "arm by seed": self.rest}
        return [Share(name, share) for name, share in rest.items() if share > 0]


@dataclass(frozen=True)
class _Grid:
    """The objective for every seed and every combination of the factors' levels."""

    levels: Mapping[Names, Sequence[dict[str, Json]]]
    """The levels of each factor; a level is a dict with the values of the factor's hyperparameters."""
    seeds: tuple[int, ...]
    values: Array  # of shape (seeds, levels of the first factor, levels of the second factor, ...)


def decompose(
    names: Sequence[str], arms: Sequence[ArmStatistics], baseline: Mapping[str, Json] | None
) -> Factorial | str:
    """Split the variation of the objective in a full grid among the factors. If this is impossible, return the reason.

    All arms share the seeds (repeated measures), so each effect is tested against its own interaction with the seeds.
    The degrees of freedom are corrected by the method of Greenhouse and Geisser (1959), since the differences between
    arms may have unequal variances. Holm's correction covers all tested effects.

    Args:
        names: The dotted names of the varied hyperparameters.
        arms: The arms of the grid, which must cover all combinations of at least two factors.
        baseline: The hyperparameter values of the baseline, or None. For each factor, the marginal mean of each level
            is compared with the marginal mean of the baseline's level.
    """
    grid = _grid(names, arms)
    if isinstance(grid, str):
        return grid
    centre = grid.values.mean()
    total = float(((grid.values - centre) ** 2).sum())
    if total <= SHAKY * float((grid.values**2).sum()):
        return "all trials have the same final value"
    effects = [_effect(grid, chosen, total) for size in (1, 2) for chosen in combinations(grid.levels, size)]
    corrected = iter(holm([one.p for one in effects if one.p is not None]))
    flat = grid.values.reshape(len(grid.seeds), -1)  # (seed, cell)
    of_seeds = flat.shape[1] * float(((flat.mean(1) - centre) ** 2).sum()) / total
    between = flat.shape[0] * float(((flat.mean(0) - centre) ** 2).sum()) / total
    return Factorial(
        seeds=grid.seeds,
        effects=tuple(one if one.p is None else replace(one, p_holm=next(corrected)) for one in effects),
        levels=tuple(_levels(grid, baseline or {})),
        higher=max(0.0, between - sum(one.share for one in effects)) if len(grid.levels) > 2 else 0.0,
        of_seeds=of_seeds,
        rest=max(0.0, 1 - between - of_seeds),
    )


def _grid(names: Sequence[str], arms: Sequence[ArmStatistics]) -> _Grid | str:
    if any(name not in one.arm.values for one in arms for name in names):
        return "some arms lack a hyperparameter that other arms have"
    by_key = {one.key: one for one in arms}
    ordered = [by_key[identity(one.values)] for one in group_by_arm(trial for arm in arms for trial in arm.arm.trials)]
    # The key of a name lists, for each arm, the first arm with the same value; names with equal keys vary together.
    factors: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        values = [identity(one.arm.values[name]) for one in ordered]
        if len(set(values)) > 1:
            factors.setdefault(tuple(map(values.index, values)), []).append(name)
    if len(factors) < 2:
        return "only one factor varies"
    levels = {
        tuple(together): [{name: ordered[place].arm.values[name] for name in together} for place in sorted(set(places))]
        for places, together in factors.items()
    }
    shape = [len(found) for found in levels.values()]
    if len(arms) != math.prod(shape):
        return "the arms do not cover all combinations of their values"
    # The cells of an array with one axis per factor, in which the level of the last factor changes fastest.
    places = sorted(range(len(ordered)), key=lambda place: [one[place] for one in factors])
    cells = [ordered[place].values for place in places]
    seeds = tuple(sorted(set.intersection(*map(set, cells))))
    if len(seeds) < 2:
        return "fewer than two seeds finished in every arm"
    values_by_seed = np.array([[cell[seed] for cell in cells] for seed in seeds])
    return _Grid(levels, seeds, values_by_seed.reshape(len(seeds), *shape))


def _effect(grid: _Grid, chosen: tuple[Names, ...], total: float) -> Effect:
    contrast = grid.values
    for axis, factor in enumerate(grid.levels, 1):
        mean = contrast.mean(axis, keepdims=True)
        contrast = contrast - mean if factor in chosen else mean
    own = contrast.reshape(len(grid.seeds), -1)  # (seeds, levels): every seed's own effect
    n, others = len(own), grid.values[0].size // own.shape[1]
    squares = n * others * float((own.mean(0) ** 2).sum())
    error = others * float(((own - own.mean(0)) ** 2).sum())
    free = math.prod(len(grid.levels[factor]) - 1 for factor in chosen)
    if error <= SHAKY * total:
        return Effect(chosen, squares / total, None, (free, free * (n - 1)), None)
    f = (squares / free) / (error / (free * (n - 1)))
    degrees = (free * _sphericity(own, free), free * (n - 1) * _sphericity(own, free))
    return Effect(chosen, squares / total, f, degrees, float(stats.f.sf(f, *degrees)))


def _sphericity(own: Array, free: int) -> float:
    """Return Greenhouse and Geisser's epsilon, the factor that corrects degrees of freedom for unequal variances.

    Epsilon is 1 if all contrasts of the effect have equal variances, and 1 / `free` if only one contrast varies.

    Args:
        own: The effect in each seed, of shape (seeds, combinations of levels).
        free: The degrees of freedom of the effect before the correction.
    """
    deviations = own - own.mean(0)
    # A (seeds, seeds) matrix with the non-zero eigenvalues of the covariance, up to a factor that cancels below.
    gram = deviations @ deviations.T
    return float(np.trace(gram) ** 2 / (free * (gram**2).sum()))


def _levels(grid: _Grid, baseline: Mapping[str, Json]) -> Iterator[Level]:
    for place, (factor, levels) in enumerate(grid.levels.items(), 1):
        others = tuple(axis for axis in range(1, grid.values.ndim) if axis != place)
        means = grid.values.mean(others)  # (seeds, levels)
        wanted = {name: baseline[name] for name in factor if name in baseline}
        held = [bool(wanted) and agrees(wanted, level) for level in levels]
        base = means[:, held.index(True)] if any(held) else None
        for number, level in enumerate(levels):
            apart = None if base is None or held[number] else means[:, number] - base
            yield Level(
                value=level,
                mean=float(means[:, number].mean()),
                interval=t_interval(means[:, number].tolist()),
                difference=None if apart is None else float(apart.mean()),
                difference_interval=None if apart is None else t_interval(apart.tolist()),
            )


@dataclass(frozen=True)
class Effects:
    """The shares of the variation that the factors of a grid, or the hyperparameters of a search, explain."""

    shares: Sequence[Share] = ()
    findings: Sequence[str] = ()
    """One sentence on all factors."""
    sections: Sequence[Section] = ()
    missing: str = ""
    """The reason why there are no shares, as a sentence; empty if there are shares or if only one factor varies."""
    decomposed: bool = False
    """True for shares of the variation between the trials of a grid, False for the importances of a search."""

    @classmethod
    def of(cls, manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Effects:
        """Compute the effects of a grid's factors, or the importances of a search's hyperparameters."""
        if manifest.search != GRID:
            drawn = importances(manifest, [trial for one in arms for trial in one.arm.trials])
            if isinstance(drawn, str):
                return cls(missing=f"No importances: {drawn}.")
            said = "; ".join(f"{100 * one.share:.0f}% for {one.name}" for one in drawn)
            finding = f"Importance of each hyperparameter for {manifest.metric} (fANOVA): {said}."
            return cls(drawn, [finding], [_importance(drawn)])
        dotted = names(manifest, arms)
        found = decompose(dotted, arms, manifest.baseline)
        if manifest.until_decided is not None:
            found = "the numbers of seeds depend on the results"
        if isinstance(found, str):
            return cls(missing=f"Main effects are not computed, because {found}." if len(dotted) > 1 else "")
        shares = [*(Share(one.name, one.share) for one in found.effects), *found.unexplained]
        # After a name such as `rank`, the percentage would look like a value of the hyperparameter.
        said = "; ".join(f"{100 * one.share:.0f}% for {one.name} ({one.verdict})" for one in found.effects)
        sections = [_variation(found), _marginal(found, Units.of(manifest.metric, arms))]
        finding = f"Shares of the variation between trials, with p-values after Holm's correction: {said}."
        return cls(shares, [finding], sections, decomposed=True)


def _variation(found: Factorial) -> Section:
    rows = [
        {
            "effect": one.name,
            "share": f"{100 * one.share:.1f}",
            "F": NOTHING if one.f is None else f"{one.f:.2f}",
            "degrees of freedom": f"{one.degrees[0]:.1f}, {one.degrees[1]:.1f}",
            "p": shown_p(one.p),
            "Holm p": shown_p(one.p_holm),
        }
        for one in found.effects
    ]
    nothing = dict.fromkeys(rows[0], NOTHING)
    rows += [nothing | {"effect": one.name, "share": f"{100 * one.share:.1f}"} for one in found.unexplained]
    return Section.of("Main effects and interactions", rows, 1, texts("variation", seeds=len(found.seeds)))


def _marginal(found: Factorial, units: Units) -> Section:
    rows = [
        {
            "level": ", ".join(setting(short_names([*one.value])[name], value) for name, value in one.value.items()),
            "mean": units.value(one.mean),
            "95% interval": units.interval(one.interval),
            "difference": units.difference(one.difference),
            "95% of difference": units.interval(one.difference_interval),
        }
        for one in found.levels
    ]
    return Section.of("Marginal means", rows, 1, texts("marginal_means"))


def _importance(found: Sequence[Share]) -> Section:
    rows = [
        {
            "hyperparameter": one.name,
            "share": f"{100 * one.share:.1f}",
            "forests": " to ".join(f"{100 * end:.1f}" for end in one.spread or ()) or NOTHING,
        }
        for one in found
    ]
    return Section.of("Importance of hyperparameters", rows, 1, texts("importance", forests=FORESTS))
