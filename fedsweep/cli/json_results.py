"""The parts of the JSON documents about recorded sweeps: arms, trials, failures and changes, in JSON types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedsweep.results import SweepManifest, SweepStore, TrialRecord
from fedsweep.results.arms import arm_label
from fedsweep.results.records import Change

if TYPE_CHECKING:
    from fedsweep.report import ArmStatistics
    from fedsweep.report.compare_sweeps import Pairing

ARM = {
    "arm": "object from dotted name to value",
    "label": "name of the arm, which `drop` and `compare` accept",
    "baseline": "true if other arms are compared with this arm",
    "n": "number of finished trials that count",
    "mean": "mean of the objective over these trials",
    "sd": "standard deviation over these trials",
    "mean_low": "lower end of the 95% interval of the mean",
    "mean_high": "upper end of the 95% interval of the mean",
    "difference": "mean of the differences arm minus baseline over the seeds that both have finished",
    "interval_low": "lower end of the 95% interval of the difference",
    "interval_high": "upper end of the 95% interval of the difference",
    "simultaneous_low": "lower end of the "
    "[simultaneous 95% interval](../concepts/statistics.md#simultaneous-intervals) of the difference; null for a "
    "single test",
    "simultaneous_high": "upper end of this interval",
    "images_low": "lower end of the 95% interval of the difference "
    "[over seeds and images](../concepts/statistics.md#other-images); null if there is none",
    "images_high": "upper end of this interval",
    "p": "p-value of the difference; null with seeds until decided",
    "p_holm": "p-value after Holm's correction; null with seeds until decided",
    "verdict": "one of the [verdicts](#verdicts); null for a baseline and without a baseline",
}
"""The fields of an arm with its statistics."""
TRIAL = {
    "key": "key of the trial, which is the name of its folder in the folder `trials` of the sweep",
    "arm": "object from dotted name to value",
    "label": "name of the arm",
    "seed": "seed of the trial",
    "outcome": "`finished`, `pruned`, `diverged` or `failed`, or null if the trial has not ended",
    "round": "last recorded round; round 0 evaluates the untrained model",
    "value": "latest recorded value of the objective, or null",
}
"""The fields of a trial."""
FAILURE = {**TRIAL, "error": "last line of the traceback", "traceback": "the whole traceback"}
"""The fields of a trial that has failed or diverged."""
COMPARISON = {
    "space_a, sweep_a, arm_a": "search space, id of the sweep and name of arm A; the same with `_b` for arm B",
    "values_a, values_b": "the arm as an object from dotted name to value",
    "n_a, mean_a, sd_a": "number of finished trials of arm A, mean and standard deviation; the same with `_b`",
    "same_images": "true if both arms were tested on the same images",
    "n_common": "number of seeds that both arms have finished",
    "difference": "mean of the differences B minus A over these seeds",
    "interval_low, interval_high": "ends of the 95% interval of the difference",
    "simultaneous_low, simultaneous_high": "ends of the "
    "[simultaneous 95% interval](../concepts/statistics.md#simultaneous-intervals) of the difference; null unless the "
    "sweep has declared comparisons, and this comparison is declared or with the baseline",
    "images_low, images_high": "ends of the 95% interval of the difference "
    "[over seeds and images](../concepts/statistics.md#other-images); null if there is none",
    "p": "p-value of the difference; null with seeds until decided",
    "p_corrected": "p-value after the correction",
    "correction": "`Holm` or `Bonferroni`, which is used for two arms that were picked from several",
    "verdict": "one of the [verdicts](#verdicts)",
}
"""The main fields of a comparison. The others are columns of the report's `table.csv`."""
VERDICTS = {
    "higher, lower": "the difference is significant after the correction",
    "no detectable difference": "the difference is not significant",
    "constant": "all seeds have the same difference, which is not zero, so no test is possible",
    "too few seeds": "fewer than two seeds have finished in both arms",
    "within": "only with seeds until decided: the difference is smaller than `smallest_effect`",
    "open": "only with seeds until decided: further seeds will run",
    "out of reach": "only with seeds until decided: a decision within the limit has a probability below 5%",
    "open at the limit": "only with seeds until decided: the largest number of seeds brought no decision",
}
"""The verdicts of a comparison."""
CHANGE = {
    "kind": "`extended`, `dropped` or `stopped`",
    "time": "time in UTC, as in ISO 8601",
    "ended": "number of trials that had ended before the change",
    "seeds": "list of the added seeds; empty for other changes",
    "arm": "the dropped arm, an object from dotted name to value; null for other changes",
    "sentence": "the change in words",
}
"""The fields of a change that was made to a sweep by hand."""


def arm(one: ArmStatistics) -> dict[str, Any]:
    """Return the fields of an arm with its statistics (see `ARM`)."""
    found, values = one.comparison, one.arm.values
    low, high = one.interval or (None, None)
    difference_low, difference_high = (found.interval if found else None) or (None, None)
    all_low, all_high = (found.simultaneous if found else None) or (None, None)
    images_low, images_high = (found.images if found else None) or (None, None)
    return {
        "arm": values,
        "label": arm_label(values),
        "baseline": one.is_baseline,
        "n": one.n,
        "mean": one.mean,
        "sd": one.sd,
        "mean_low": low,
        "mean_high": high,
        "difference": found.difference if found else None,
        "interval_low": difference_low,
        "interval_high": difference_high,
        "simultaneous_low": all_low,
        "simultaneous_high": all_high,
        "images_low": images_low,
        "images_high": images_high,
        "p": found.p if found else None,
        "p_holm": found.p_holm if found else None,
        "verdict": found.verdict if found else None,
    }


def comparisons(pairing: Pairing) -> list[dict[str, Any]]:
    """Return the fields of each compared pair of arms (see `COMPARISON`)."""
    rows = zip(pairing.records(), pairing.pairs, pairing.comparisons, strict=True)
    return [
        {
            "simultaneous_low": None,
            "simultaneous_high": None,
            **row,
            "values_a": one.arm.values,
            "values_b": other.arm.values,
            "p_corrected": found.p_holm,
            "correction": found.correction,
        }
        for row, (one, other), found in rows
    ]


def trial(one: TrialRecord, metric: str) -> dict[str, Any]:
    """Return the fields of a trial (see `TRIAL`). `metric` is the objective."""
    return {
        "key": one.plan.key,
        "arm": one.plan.arm,
        "label": one.plan.label,
        "seed": one.plan.seed,
        "outcome": one.outcome.outcome if one.outcome else None,
        "round": max(one.last_round, 0),
        "value": next((done.metrics[metric] for done in reversed(one.history) if metric in done.metrics), None),
    }


def failures(trials: Sequence[TrialRecord], metric: str) -> list[dict[str, Any]]:
    """Return the fields of each trial that has failed or diverged (see `FAILURE`)."""
    found = []
    for one in trials:
        if one.outcome is not None and one.outcome.outcome in ("failed", "diverged"):
            traceback = one.outcome.error or ""
            last = traceback.strip().rpartition("\n")[2] or one.outcome.reason
            found.append({**trial(one, metric), "error": last, "traceback": traceback or None})
    return found


def change(one: Change) -> dict[str, Any]:
    """Return the fields of a change (see `CHANGE`)."""
    return {**one.model_dump(mode="json"), "sentence": one.sentence}


def counts(manifest: SweepManifest, trials: Sequence[TrialRecord]) -> dict[str, int | None]:
    """Return the numbers of trials that have ended, of trials that have only begun, and of planned trials."""
    ended = sum(one.outcome is not None for one in trials)
    return {"ended": ended, "begun": len(trials) - ended, "planned": manifest.trials}


def status(manifest: SweepManifest, trials: Sequence[TrialRecord], running: bool) -> str:
    """Return `running`, `interrupted` if trials are left, `failed` if a trial has failed, or else `complete`."""
    numbers = counts(manifest, trials)
    if running:
        return "running"
    if numbers["begun"] or (manifest.trials is not None and (numbers["ended"] or 0) < manifest.trials):
        return "interrupted"
    return "failed" if any(one.outcome and one.outcome.outcome == "failed" for one in trials) else "complete"


def recorded(sweep: SweepStore, running: bool) -> dict[str, Any]:
    """Return the fields `status`, `trials` and `changes_made` of a sweep, as its files record them now."""
    manifest, trials = sweep.manifest(), sweep.trials()
    return {
        "status": status(manifest, trials, running),
        "trials": counts(manifest, trials),
        "changes_made": [change(one) for one in manifest.changes],
    }
