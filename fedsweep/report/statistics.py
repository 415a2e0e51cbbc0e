"""Mean, spread and comparison of every arm. Pruned, failed and unfinished trials enter none of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedsweep.common.yaml_values import Json
from fedsweep.report.intervals import Interval, t_interval
from fedsweep.report.paired_comparison import Comparison, compare
from fedsweep.report.trials_by_arm import Arm, final, group, mean
from fedsweep.results import SweepManifest, TrialRecord
from fedsweep.results.arms import counterparts, identity
from fedsweep.results.columns import COLUMNS, Column, column
from fedsweep.results.history import mean_of_last, total_megabytes

MEAN_ACCURACY, MEAN_OUT_OF_DOMAIN = "accuracy/mean", "accuracy/out_of_domain_mean"


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
    interval: Interval | None
    """Of the mean: Student's t over seeds, 95%."""
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
    columns: Mapping[str, float | None]
    """Mean over seeds of every column that the table could show, by name; those that repetition changes where asked."""
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

    Arms without a finished trial follow, by the round they reached and their value there.
    """
    arms = {identity(arm.values): arm for arm in group(trials)}
    values = {key: _values(arm, manifest.metric) for key, arm in arms.items()}
    against = {} if manifest.baseline is None else _baselines(arms, manifest.baseline)
    if not against:
        found = [_describe(arm, values[key], None, manifest) for key, arm in arms.items()]
        return sorted(found, key=lambda one: _rank(one, manifest))
    pairs = {key: (values[key], values[other]) for key, other in against.items() if key != other}
    comparisons = dict(zip(pairs, compare(list(pairs.values())), strict=True))
    found = [
        _describe(arm, values[key], comparisons.get(key), manifest, is_baseline=against.get(key) == key)
        for key, arm in arms.items()
    ]
    lost = sorted((one for one in found if not one.n), key=lambda one: _rank(one, manifest))
    return [*(one for one in found if one.n), *lost]


def _baselines(arms: Mapping[str, Arm], baseline: Mapping[str, Json]) -> dict[str, str]:
    """By the key of an arm that of the one it is compared to, which may be itself; without those that have none."""
    found = counterparts([arm.values for arm in arms.values()], baseline)
    return {key: identity(found[key]) for key in arms if key in found}


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
        interval=t_interval(list(values.values())),
        mean_of_last=mean(smoothed) if all(map(math.isfinite, smoothed)) else None,
        worst_domain=_mean_final(trials, "accuracy/worst_domain"),
        worst_domain_name=min(worst, key=lambda name: worst[name]) if worst else None,
        worst_client=_mean_final(trials, "accuracy/clients/worst"),
        held_out=held_out,
        accuracies={metric: _mean_final(trials, metric) for metric in metrics},
        megabytes=mean(total_megabytes(history) for history in histories),
        columns={one.name: _mean(map(one.of, trials)) for one in recorded_columns(manifest)},
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
    return _mean(final(trial, metric) for trial in trials)


def _mean(ends: Iterable[float | None]) -> float | None:
    known = list(ends)
    return None if None in known else mean(end for end in known if end is not None)


def asked_columns(manifest: SweepManifest) -> list[Column]:
    """Those that the table is to show beside the objective, in order; none for the usual ones."""
    return [column(name, manifest.metric, manifest.mode) for name in manifest.columns]


def recorded_columns(manifest: SweepManifest) -> list[Column]:
    """Those with a value in full precision: what repetition does not change, and what is asked for."""
    always = {one.name: one for one in COLUMNS.values() if not one.measured}
    return list({**always, **{one.name: one for one in asked_columns(manifest)}}.values())


def _rank(one: ArmStatistics, manifest: SweepManifest) -> tuple[bool, int, float]:
    """Sorts best first: finished arms by their mean, the others by the round reached, then the value there."""
    sign = -1 if manifest.mode == "max" else 1
    if one.mean is not None:
        return False, 0, sign * one.mean
    furthest, value = one.arm.reached(manifest.metric)
    return True, -furthest, math.inf if value is None else sign * value
