"""Mean, spread and paired comparisons of arms. Pruned, failed and unfinished trials enter none of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from fedsweep.arms import counterparts, identity
from fedsweep.history import mean_of_last, total_megabytes
from fedsweep.plain import Json
from fedsweep.report.arms import Arm, final, group, mean
from fedsweep.store import SweepManifest, TrialRecord

LEVEL = 0.05
"""Two-sided level of the tests after Holm's correction; intervals are at 1 - LEVEL, uncorrected."""

ROUNDING = 1e-12
"""Paired differences that spread less than this, relative to the values, differ by rounding only."""

MEAN_ACCURACY, MEAN_OUT_OF_DOMAIN = "accuracy/mean", "accuracy/out_of_domain_mean"

Verdict = Literal["higher", "lower", "no detectable difference", "constant", "too few seeds"]


@dataclass(frozen=True)
class Comparison:
    """An arm minus the baseline arm over the seeds that both finished; in the objective's own unit.

    `interval` and the p-values are None where they cannot be computed: fewer than two common seeds, or the same
    non-zero difference on every seed (a spread of zero makes t infinite whatever the truth is).
    """

    seeds: tuple[int, ...]
    difference: float | None
    interval: tuple[float, float] | None
    p: float | None
    p_holm: float | None

    @property
    def verdict(self) -> Verdict:
        """What may be said at level 0.05 after Holm's correction. `constant`: no test is possible."""
        if self.difference is None or len(self.seeds) < 2:
            return "too few seeds"
        if self.p_holm is None:
            return "constant"
        if self.p_holm > LEVEL:
            return "no detectable difference"
        return "higher" if self.difference > 0 else "lower"


@dataclass(frozen=True)
class ArmStatistics:
    """One arm. Everything numeric is over its finished trials and None where they are too few."""

    arm: Arm
    is_baseline: bool
    values: Mapping[int, float]
    """The objective at the last round, by seed."""
    mean: float | None
    sd: float | None
    """Over seeds, with n - 1."""
    mean_of_last: float | None
    """Mean over seeds of the objective's mean over the last four rounds."""
    worst_domain: float | None
    """Mean over seeds of the accuracy on the domain that is worst for that seed, 0 to 1."""
    worst_domain_name: str | None
    """The domain with the lowest accuracy on average over seeds."""
    worst_client: float | None
    """Mean over seeds of the accuracy of the client that is worst for that seed, each with its own model, 0 to 1."""
    held_out: tuple[str, ...]
    """Domains that no client of this arm has."""
    accuracies: Mapping[str, float | None]
    """Mean over seeds of each domain's accuracy and of their means in and out of domain, 0 to 1, by metric's name."""
    megabytes: float | None
    """Mean over seeds of the MB (10^6 bytes) sent in both directions in the whole run."""
    comparison: Comparison | None
    """None for a baseline itself and where there is none."""

    @property
    def n(self) -> int:
        """Finished trials."""
        return len(self.values)

    @property
    def marks(self) -> dict[str, str]:
        """What its trials say of themselves."""
        return {name: mark for trial in self.arm.trials for name, mark in trial.plan.marks.items()}

    def metric_on(self, domain: str) -> str:
        """The metric's name of this arm's accuracy on a domain."""
        return domain_metric(domain, domain in self.held_out)


def summarise(manifest: SweepManifest, trials: Sequence[TrialRecord]) -> list[ArmStatistics]:
    """Statistics of every arm: in the order of `group` where there is a baseline, otherwise best first.

    Without a baseline, arms without a finished trial follow, by the round they reached and their value there.
    """
    arms = {identity(arm.values): arm for arm in group(trials)}
    values = {key: _values(arm, manifest.metric) for key, arm in arms.items()}
    against = {} if manifest.baseline is None else _baselines(arms, manifest.baseline)
    if not against:
        found = [_describe(arm, values[key], None, manifest) for key, arm in arms.items()]
        return sorted(found, key=lambda one: _rank(one, manifest))
    pairs = {key: (values[key], values[other]) for key, other in against.items() if key != other}
    comparisons = dict(zip(pairs, compare(list(pairs.values())), strict=True))
    return [
        _describe(arm, values[key], comparisons.get(key), manifest, is_baseline=against.get(key) == key)
        for key, arm in arms.items()
    ]


def _baselines(arms: Mapping[str, Arm], baseline: Mapping[str, Json]) -> dict[str, str]:
    """By the key of an arm that of the one it is compared to, which may be itself; without those that have none."""
    found = counterparts([arm.values for arm in arms.values()], baseline)
    return {key: identity(found[key]) for key in arms if key in found}


def compare(pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float]]]) -> list[Comparison]:
    """Paired t-tests of arms (value by seed), each against its baseline, Holm-corrected over the testable ones."""
    paired = [_paired(arm, baseline) for arm, baseline in pairs]
    tested = [one.p for one in paired if one.p is not None]
    corrected = iter(holm(tested))
    return [
        one if one.p is None else Comparison(one.seeds, one.difference, one.interval, one.p, next(corrected))
        for one in paired
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: max over j <= i of min(1, (m - j + 1) p_(j)), in the order given.

    Source: S. Holm (1979), A simple sequentially rejective multiple test procedure.

    >>> [round(p, 3) for p in holm([0.04, 0.01, 0.03])]
    [0.06, 0.03, 0.06]
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(np.minimum(1, np.arange(len(p), 0, -1) * p[order]))
    return [float(value) for value in adjusted]


def _paired(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Comparison:
    seeds = tuple(sorted(arm.keys() & baseline.keys()))
    if not seeds:
        return Comparison((), None, None, None, None)
    ours, theirs = np.array([arm[seed] for seed in seeds]), np.array([baseline[seed] for seed in seeds])
    differences = ours - theirs
    difference = float(differences.mean())
    if len(seeds) < 2:
        return Comparison(seeds, difference, None, None, None)
    # Exact equality would miss 0.61 - 0.60 and 0.51 - 0.50, whose spread of 1e-17 would make any test significant.
    rounding = ROUNDING * max(np.abs(ours).max(), np.abs(theirs).max())
    if np.abs(differences).max() <= rounding:
        return Comparison(seeds, 0.0, None, 1.0, None)
    if np.ptp(differences) <= rounding:
        return Comparison(seeds, difference, None, None, None)
    test = stats.ttest_rel(ours, theirs)
    low, high = test.confidence_interval(1 - LEVEL)
    return Comparison(seeds, difference, (float(low), float(high)), float(test.pvalue), None)


def _values(arm: Arm, metric: str) -> dict[int, float]:
    """The objective at the end of each finished trial, by seed."""
    ends = {seed: final(trial, metric) for seed, trial in arm.finished(metric).items()}
    return {seed: value for seed, value in ends.items() if value is not None}


def _describe(
    arm: Arm,
    values: Mapping[int, float],
    comparison: Comparison | None,
    manifest: SweepManifest,
    is_baseline: bool = False,
) -> ArmStatistics:
    trials = arm.finished(manifest.metric).values()
    histories = [trial.history for trial in trials]
    smoothed = [mean_of_last(history, manifest.metric) for history in histories if history[-1].round > 0]
    held_out = _held_out(arm, manifest.domains)
    known = {name: _mean_final(trials, domain_metric(name)) for name in manifest.domains if name not in held_out}
    worst = {name: value for name, value in known.items() if value is not None}
    metrics = [*(domain_metric(name, name in held_out) for name in manifest.domains), MEAN_ACCURACY]
    metrics += [MEAN_OUT_OF_DOMAIN] * bool(held_out)
    return ArmStatistics(
        arm=arm,
        is_baseline=is_baseline,
        values=values,
        mean=mean(values.values()),
        sd=float(np.std(list(values.values()), ddof=1)) if len(values) > 1 else None,
        mean_of_last=mean(smoothed) if all(map(math.isfinite, smoothed)) else None,
        worst_domain=_mean_final(trials, "accuracy/worst_domain"),
        worst_domain_name=min(worst, key=lambda name: worst[name]) if worst else None,
        worst_client=_mean_final(trials, "accuracy/clients/worst"),
        held_out=held_out,
        accuracies={metric: _mean_final(trials, metric) for metric in metrics},
        megabytes=mean(total_megabytes(history) for history in histories),
        comparison=comparison,
    )


def domain_metric(domain: str, held_out: bool = False) -> str:
    """The metric's name of the accuracy on a domain that clients have, or that is held out of them."""
    return f"accuracy/{'out_of_domain' if held_out else 'domain'}/{domain}"


def _held_out(arm: Arm, domains: Sequence[str]) -> tuple[str, ...]:
    """The domains that its trials recorded as out of domain."""
    recorded = {name for trial in arm.trials for record in trial.history[:1] for name in record.metrics}
    return tuple(name for name in domains if domain_metric(name, held_out=True) in recorded)


def _mean_final(trials: Iterable[TrialRecord], metric: str) -> float | None:
    """Mean of a metric's last values; None if any trial lacks it, since a mean over other seeds would not compare."""
    ends = [final(trial, metric) for trial in trials]
    return None if None in ends else mean(end for end in ends if end is not None)


def _rank(one: ArmStatistics, manifest: SweepManifest) -> tuple[bool, int, float]:
    """Sorts best first: finished arms by their mean, the others by the round reached, then the value there."""
    sign = -1 if manifest.mode == "max" else 1
    if one.mean is not None:
        return False, 0, sign * one.mean
    furthest, value = one.arm.reached(manifest.metric)
    return True, -furthest, math.inf if value is None else sign * value
