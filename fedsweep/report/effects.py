"""What each factor does, in sections and sentences: main effects of a grid, importances of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedsweep.report.factors import Effect, Factorial, Names, factorial
from fedsweep.report.importance import FORESTS, Share, importances
from fedsweep.report.intervals import LEVEL
from fedsweep.report.sections import Section
from fedsweep.report.statistics import ArmStatistics
from fedsweep.report.wording import NOTHING, Units, names, short_names, shown_p
from fedsweep.results import SweepManifest
from fedsweep.results.arms import setting

GRID = "grid"


@dataclass(frozen=True)
class Effects:
    """Of a grid with several factors its decomposition, of a sampled search the importances; else why there is none."""

    manifest: SweepManifest
    units: Units
    factorial: Factorial | None = None
    importances: tuple[Share, ...] = ()
    missing: str = ""

    @classmethod
    def of(cls, manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Effects:
        """From the finished trials."""
        units = Units.of(manifest.metric, arms)
        if manifest.search == GRID:
            found = factorial(names(manifest, arms), arms, manifest.baseline)
            several = len(names(manifest, arms)) > 1
            return (
                cls(manifest, units, missing=f"No main effects: {found}." if several else "")
                if isinstance(found, str)
                else cls(manifest, units, factorial=found)
            )
        drawn = importances(manifest, [trial for one in arms for trial in one.arm.trials])
        if isinstance(drawn, str):
            return cls(manifest, units, missing=f"No importances: {drawn}.")
        return cls(manifest, units, importances=tuple(drawn))

    def shares(self) -> list[Share]:
        """Of the variation between trials by factor, or of the importance; for a figure."""
        if self.factorial is None:
            return [*self.importances]
        known = [Share(effect_name(one), one.share) for one in self.factorial.effects]
        return [*known, *(Share(name, share) for name, share in _rest(self.factorial).items())]

    def findings(self) -> list[str]:
        """One sentence on all factors; nothing where there is one."""
        if self.factorial is not None:
            said = [f"{effect_name(one)} {100 * one.share:.0f}% ({_verdict(one)})" for one in self.factorial.effects]
            return [f"Of the variation between trials: {'; '.join(said)}."]
        if self.importances:
            said = [f"{one.name} {100 * one.share:.0f}%" for one in self.importances]
            return [f"Importance for {self.manifest.metric} by fANOVA: {'; '.join(said)}."]
        return []

    def sections(self) -> list[Section]:
        """Decomposition and marginal means, or importances."""
        if self.factorial is not None:
            return [_variation(self.factorial), _marginal(self.factorial, self.units)]
        return [_importance(self.importances)] if self.importances else []


def factor_name(names: Names) -> str:
    """Short where it can be: `rank`."""
    return ", ".join(short_names(names)[name] for name in names)


def effect_name(effect: Effect) -> str:
    """`rank`, or `rank x position`."""
    return " x ".join(map(factor_name, effect.factors))


def _verdict(effect: Effect) -> str:
    if effect.p_holm is None:
        return "not testable"
    return f"Holm p {shown_p(effect.p_holm)}" + ("" if effect.p_holm <= LEVEL else ", not detectable")


def _rest(found: Factorial) -> dict[str, float]:
    """The shares above zero of what is neither a factor's nor a pair's."""
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
    explained = (
        f"Analysis of variance with repeated measures over the {len(found.seeds)} seeds that every arm finished: each "
        "effect against its own interaction with the seeds, degrees of freedom by Greenhouse and Geisser, Holm's "
        "correction over all effects. Share: of all variation between trials, in percent; those of effects that are "
        "nothing but noise are above zero too."
    )
    head = ["effect", "share", "F", "degrees of freedom", "p", "Holm p"]
    return Section("Main effects and interactions", head, rows, 1, explained)


def _marginal(found: Factorial, units: Units) -> Section:
    rows = []
    for one in found.levels:
        value = ", ".join(setting(short_names(one.names)[name], given) for name, given in one.value.items())
        apart = [units.difference(one.difference), units.interval(one.difference_interval)]
        rows.append([value, units.value(one.mean), units.interval(one.interval), *apart])
    explained = (
        "Mean of every level over all values of the other factors; difference to the baseline's level over the same "
        "seeds. Where an interaction is large, a marginal mean says little of any single arm."
    )
    return Section("Marginal means", ["level", "mean", "95% interval", "difference", "95% of it"], rows, 1, explained)


def _importance(found: Sequence[Share]) -> Section:
    rows = [[one.name, f"{100 * one.share:.1f}", _forests(one)] for one in found]
    explained = (
        f"fANOVA: percent of a random forest's variance over the ranges searched that each hyperparameter explains "
        f"alone, mean of {FORESTS} forests, and their least and most. Trials that were pruned are in none."
    )
    return Section("Importance of hyperparameters", ["hyperparameter", "share", "forests"], rows, 1, explained)


def _forests(one: Share) -> str:
    return NOTHING if one.low is None or one.high is None else f"{100 * one.low:.1f} to {100 * one.high:.1f}"
