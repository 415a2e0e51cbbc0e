"""Statistics of each arm: mean and spread over its finished trials, and the comparison with its baseline."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedsweep.common.yaml_values import Json
from fedsweep.report.family_of_tests import DeclaredTest, tests_of_family
from fedsweep.report.holm_corrected_tests import Comparison, paired_tests
from fedsweep.report.intervals_and_power import Interval, t_interval
from fedsweep.report.other_images import with_images
from fedsweep.report.seeds_until_decided import judged
from fedsweep.results import SweepManifest, TrialRecord
from fedsweep.results.arms import identity
from fedsweep.results.declared_comparisons import baselines
from fedsweep.results.history import MEAN_ACCURACY, RoundRecord, mean_of_last, over_the_run
from fedsweep.results.table_columns import COLUMNS, Column, column, requested

MEAN_OUT_OF_DOMAIN = "accuracy/out_of_domain_mean"


@dataclass(frozen=True)
class ArmTrials:
    """An arm (one setting of the varied hyperparameters) and its trials.

    The trials are in the order of the plan. There is usually one trial per seed.
    """

    values: Mapping[str, Json]
    trials: tuple[TrialRecord, ...]

    def finished(self, metric: str) -> dict[int, TrialRecord]:
        """Return a dict from seed to finished trial, without trials whose last value of `metric` is not finite.

        Means and tests use only these trials.
        """
        return {
            trial.plan.seed: trial
            for trial in self.trials
            if ended(trial) == "finished" and final(trial, metric) is not None
        }

    def finals(self, objective: str, metric: str) -> dict[int, float]:
        """Return a dict from seed to the last value of `metric`, for trials that finished with a finite `objective`.

        Values that are missing or not finite are left out.
        """
        ends = {seed: final(trial, metric) for seed, trial in self.finished(objective).items()}
        return {seed: value for seed, value in ends.items() if value is not None}

    def reached(self, metric: str) -> tuple[int, float | None]:
        """Return the arm's last recorded round, and the mean of `metric` over the trials that reached that round.

        Trials without a finite value at that round are left out. If no trial has such a value, the mean is None.
        """
        furthest = max(trial.last_round for trial in self.trials)
        ends = (final(trial, metric) for trial in self.trials if trial.last_round == furthest)
        return furthest, mean(end for end in ends if end is not None)


@dataclass(frozen=True)
class ArmStatistics:
    """The statistics of one arm over its finished trials.

    A statistic is None if the arm has too few finished trials to compute it.
    """

    arm: ArmTrials
    values: Mapping[int, float]
    """Dict from seed to the objective at the last round."""
    mean: float | None
    sd: float | None
    """Standard deviation over seeds, with n - 1."""
    interval: Interval | None
    """The 95% interval of the mean: Student's t over seeds. None with seeds until decided, where it is not valid."""
    mean_of_last: float | None
    """Mean over seeds of the objective's mean over the last four rounds."""
    worst_domain_name: str | None
    """The domain with the lowest accuracy on average over seeds."""
    domains: tuple[str, ...]
    """Domains on which this arm is tested, whether or not they are held out."""
    held_out: tuple[str, ...]
    """Domains that are held out of all clients of this arm."""
    accuracies: Mapping[str, float | None]
    """Dict from metric to its mean over seeds, from 0 to 1: accuracy on each domain, and means in and out of domain."""
    second: float | None
    """Mean over seeds of the second objective; None without a second objective, or if a seed has no value."""
    columns: Mapping[str, float | None]
    """Dict from column to its mean over seeds, for the deterministic columns in `COLUMNS` and the requested columns."""
    counterpart: str | None = None
    """The `key` of the arm's baseline; a baseline has its own `key`, and an arm without a baseline has None."""
    comparison: Comparison | None = None
    """The comparison with the baseline; None for baselines, and in sweeps without a baseline."""
    declared: tuple[DeclaredTest, ...] = ()
    """The declared comparisons of this arm with other arms."""

    @cached_property
    def key(self) -> str:
        """A string that identifies the arm by its hyperparameter values."""
        return identity(self.arm.values)

    @property
    def is_baseline(self) -> bool:
        """True if the arm is a baseline, that is, if other arms are compared with it."""
        return self.counterpart == self.key

    @property
    def n(self) -> int:
        """The number of finished trials."""
        return len(self.values)

    @cached_property
    def marks(self) -> dict[str, str]:
        """The provenance tags of the arm's trials, such as the source of their synthetic images."""
        return {name: mark for trial in self.arm.trials for name, mark in trial.plan.marks.items()}

    def metric_on(self, domain: str) -> str:
        """Return the name of the metric for this arm's accuracy on `domain`.

        The accuracy on a held-out domain, of which no client has images, is a separate metric.
        """
        return domain_metric(domain, domain in self.held_out)


def summarise(manifest: SweepManifest, trials: Sequence[TrialRecord]) -> list[ArmStatistics]:
    """Return the statistics of every arm, in the order of the report's table.

    Arms with a finished trial come first. If the sweep has a baseline, these arms are sorted by the values of
    their hyperparameters. Otherwise, they are sorted by their means, best first.

    Arms without a finished trial follow. They are sorted by their last recorded round, latest first. Arms with the same
    last round are sorted by their mean objective at this round, best first.
    """
    grouped = group_by_arm(trials)
    against = baselines([one.values for one in grouped], manifest.baseline)
    verdicts, counted = judged(manifest, grouped, against)
    arms = {one.key: one for one in (_describe(arm, manifest) for arm in counted)}
    comparisons, declared = tests_of_family(manifest, {key: one.arm for key, one in arms.items()}, against, verdicts)
    found = [
        replace(
            one,
            counterpart=against.get(key),
            comparison=comparisons.get(key),
            declared=tuple(test for test in declared if test.pair.arm == key),
        )
        for key, one in arms.items()
    ]
    ranked = sorted(found, key=lambda one: _rank(one, manifest))
    return [*(one for one in found if one.n), *(one for one in ranked if not one.n)] if against else ranked


def compared_by(manifest: SweepManifest, arms: Sequence[ArmStatistics], metric: str) -> list[ArmStatistics]:
    """Return the arms with the statistics and comparisons of `metric` in place of those of the objective.

    Holm's correction covers only the tests of `metric`. An arm is not compared with a baseline whose `metric` was
    computed on images of other domains.
    """
    values = {one.key: one.arm.finals(manifest.metric, metric) for one in arms}
    by_key, pairs = {one.key: one for one in arms}, dict[str, tuple[ArmTrials, ArmTrials]]()
    for one in arms:
        other = None if one.is_baseline or one.counterpart is None else by_key[one.counterpart]
        if other is not None and same_images(metric, [one, other]):
            pairs[one.key] = one.arm, other.arm
    comparisons = _compared(manifest, metric, pairs)
    return [
        replace(
            one,
            values=values[one.key],
            mean=mean(values[one.key].values()),
            sd=_deviation(values[one.key]),
            interval=t_interval(list(values[one.key].values())),
            comparison=comparisons.get(one.key),
            declared=(),
        )
        for one in arms
    ]


def _compared(
    manifest: SweepManifest, metric: str, pairs: Mapping[str, tuple[ArmTrials, ArmTrials]]
) -> dict[str, Comparison]:
    own = manifest.metric
    tested = paired_tests([(one.finals(own, metric), other.finals(own, metric)) for one, other in pairs.values()])
    trials = [(one.finished(own), other.finished(own)) for one, other in pairs.values()]
    return dict(zip(pairs, with_images(metric, tested, trials), strict=True))


def _deviation(values: Mapping[int, float]) -> float | None:
    return float(np.std(list(values.values()), ddof=1)) if len(values) > 1 else None


def _describe(arm: ArmTrials, manifest: SweepManifest) -> ArmStatistics:
    """Return the statistics of an arm, except for the comparison with its baseline."""
    values = arm.finals(manifest.metric, manifest.metric)
    trials = arm.finished(manifest.metric).values()
    histories = [trial.history for trial in trials]
    smoothed = [mean_of_last(history, manifest.metric) for history in histories if history[-1].round > 0]
    recorded_names = {name for trial in arm.trials for record in trial.history[:1] for name in record.metrics}
    held_out = tuple(name for name in manifest.domains if domain_metric(name, held_out=True) in recorded_names)
    on_domain = {name: domain_metric(name, name in held_out) for name in manifest.domains}
    domains = tuple(name for name, metric in on_domain.items() if metric in recorded_names)
    means = [MEAN_ACCURACY, MEAN_OUT_OF_DOMAIN] if held_out else [MEAN_ACCURACY]
    accuracies = {metric: mean(final(trial, metric) for trial in trials) for metric in [*on_domain.values(), *means]}
    inside = {name: accuracies[metric] for name, metric in on_domain.items() if name not in held_out}
    known = {name: value for name, value in inside.items() if value is not None}
    second = manifest.against.metric if manifest.against else None
    columns = [*(one for one in COLUMNS.values() if not one.measured), *asked_columns(manifest)]
    return ArmStatistics(
        arm=arm,
        values=values,
        mean=mean(values.values()),
        sd=_deviation(values),
        interval=t_interval(list(values.values())) if manifest.until_decided is None else None,
        mean_of_last=mean(smoothed) if all(map(math.isfinite, smoothed)) else None,
        worst_domain_name=min(known, key=lambda name: known[name]) if known else None,
        domains=domains,
        held_out=held_out,
        accuracies=accuracies,
        second=None if second is None else mean(over_the_run(history, second) for history in histories),
        columns={one.name: mean(map(one.of, trials)) for one in columns},
    )


def domain_metric(domain: str, held_out: bool = False) -> str:
    """Return the name of the metric for the accuracy on a domain; `held_out` means that no client has images of it.

    >>> domain_metric("sketch"), domain_metric("sketch", held_out=True)
    ('accuracy/domain/sketch', 'accuracy/out_of_domain/sketch')
    """
    return f"accuracy/{'out_of_domain' if held_out else 'domain'}/{domain}"


def same_images(metric: str, arms: Iterable[ArmStatistics]) -> bool:
    """Return whether the values of `metric` were computed on images of the same domains in all `arms`.

    If not, arms cannot be compared by `metric`. The result is always True for the accuracy on a single domain. Arms
    without a recorded round are ignored.
    """
    one_domain = metric.startswith(("accuracy/domain/", "accuracy/out_of_domain/"))
    return one_domain or len({(one.domains, one.held_out) for one in arms if one.arm.reached(metric)[0] >= 0}) < 2


def printed(manifest: SweepManifest, one: ArmStatistics, metric: str) -> float | None:
    """Return the value of `metric` that the reference paper reports for an arm, or None if the paper reports no value.

    Accuracies range from 0 to 1.
    """
    return manifest.reference.value(one.arm.values, metric) if manifest.reference else None


def asked_columns(manifest: SweepManifest) -> list[Column]:
    """Return the table columns that the search space requests, or an empty list if it requests no columns."""
    names = requested(manifest.columns, manifest.varied)
    return [column(name, manifest.metric, manifest.mode, manifest.titles) for name in names]


def _rank(one: ArmStatistics, manifest: SweepManifest) -> tuple[bool, int, float]:
    sign = -1 if manifest.mode == "max" else 1
    if one.mean is not None:
        return False, 0, sign * one.mean
    furthest, value = one.arm.reached(manifest.metric)
    return True, -furthest, math.inf if value is None else sign * value


def group_by_arm(trials: Iterable[TrialRecord]) -> list[ArmTrials]:
    """Group trials by arm, and sort the arms by the values of their hyperparameters.

    The values of a numeric hyperparameter are sorted in ascending order. The values of any other hyperparameter keep
    the order in which they first occur in the plan.
    """
    grouped: dict[str, list[TrialRecord]] = {}
    for trial in sorted(trials, key=lambda one: one.plan.number):
        grouped.setdefault(identity(trial.plan.arm), []).append(trial)
    arms = [ArmTrials(members[0].plan.arm, tuple(members)) for members in grouped.values()]
    places = {name: _places(name, arms) for name in dict.fromkeys(name for arm in arms for name in arm.values)}
    return sorted(arms, key=lambda arm: [place[identity(arm.values.get(name))] for name, place in places.items()])


def _places(name: str, arms: Sequence[ArmTrials]) -> dict[str, int]:
    values = [arm.values.get(name) for arm in arms]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    ordered = sorted(numbers) if len(numbers) == len(values) else values
    return {key: place for place, key in enumerate(dict.fromkeys(map(identity, ordered)))}


def ended(trial: TrialRecord) -> str:
    """Return the outcome of a trial: `finished`, `pruned`, `diverged`, `failed` or `unfinished`."""
    return trial.outcome.outcome if trial.outcome else "unfinished"


def recorded(history: Sequence[RoundRecord], metric: str) -> dict[int, float]:
    """Return a dict from round to the value of a metric.

    Rounds in which the metric is missing or not finite are left out. For example, `loss/train` is missing in round 0
    (the untuned model).
    """
    values = {record.round: record.metrics.get(metric, math.nan) for record in history}
    return {number: value for number, value in values.items() if math.isfinite(value)}


def final(trial: TrialRecord, metric: str) -> float | None:
    """Return the value of a metric at a trial's last recorded round, or None if the value is missing or not finite."""
    return recorded(trial.history[-1:], metric).get(trial.last_round)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the arithmetic mean, or None if `values` is empty or contains None (a seed without a value)."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(listed) else None


def notes(arm: ArmTrials, metric: str, show: Callable[[float], str] | None = None) -> list[str]:
    """Return notes on the trials that are not part of the arm's mean, such as `seeds 0, 2 pruned at round 3`.

    Seeds that ended in the same way at the same round share a note. If the function `show` is given, each note also
    states the mean of the last values of `metric`, formatted by `show`, as in `seeds 0, 2 pruned at round 3 (48.12)`.
    """
    finished, fates = arm.finished(metric), dict[str, dict[int, TrialRecord]]()
    for trial in arm.trials:
        # A search may draw an arm twice. The same seed gives the same numbers, so one trial suffices.
        if trial.plan.seed not in finished:
            fates.setdefault(_fate(trial, metric), {})[trial.plan.seed] = trial
    found = []
    for fate, trials in fates.items():
        ends = (final(trial, metric) for trial in trials.values())
        reached = mean(end for end in ends if end is not None)
        value = f" ({show(reached)})" if show and reached is not None else ""
        found.append(f"seed{'s' * (len(trials) > 1)} {', '.join(map(str, trials))} {fate}{value}")
    return found


def _fate(trial: TrialRecord, metric: str) -> str:
    if trial.missing:
        return "missing: its recorded rounds are not on disk, and a resume runs it again"
    if trial.outcome is None:
        return f"unfinished at round {trial.last_round}" if trial.history else "not started"
    if (how := trial.outcome.outcome) == "pruned":
        return f"pruned at round {trial.outcome.round}"
    if how != "finished":
        return f"{how} after round {trial.outcome.round}" if trial.outcome.round > 0 else how
    return f"finished without a finite {metric}"
