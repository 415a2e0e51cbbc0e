"""Check the coverage of the report's intervals and the error rates of its tests on simulated metrics.

    python benchmarks/honesty.py [--repetitions 1000] [--residuals normal] [--to benchmarks/results/honesty.md]

Each repetition simulates a sweep of a baseline and three arms. The accuracy of a trial is the sum of the arm's true
value, an effect of the seed and a residual. The effect of a seed is the same for all arms. The statistics come from the
same code as in a report.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy import stats

from fedsweep.report.arm_statistics import ArmStatistics, summarise
from fedsweep.report.holm_corrected_tests import holm
from fedsweep.results import Outcome, SweepManifest, TrialPlan, TrialRecord
from fedsweep.results.history import RoundRecord

METRIC = "accuracy/mean"
TRUE, SEEDS, REST = 0.70, 0.02, 0.01
"""The baseline's true accuracy, and the standard deviations of the seeds' shared effect and of the residual."""
APART = (0.0, 0.015, 0.03)
"""The true differences of the arms from the baseline, in the repetitions in which they differ."""
SHAPE = 4.0
"""The shape of a gamma distribution with a skewness of 1."""
SIGMA = 0.9889
"""The standard deviation of the logarithm of a lognormal distribution with a skewness of 6."""
MANIFEST = SweepManifest(
    id="simulated",
    name="simulated",
    experiment="none",
    created="2026-01-01T00:00:00Z",
    metric=METRIC,
    mode="max",
    rounds=1,
    varied=("arm",),
    baseline={"arm": 0},
    seeds=(0,),
    scheduler="none",
    search="grid",
    domains=("one",),
    digests={},
)


Draw = Callable[[np.random.Generator, int], np.ndarray]


def normal(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return normal residuals of the arms, with the same standard deviation as those of the baseline."""
    return rng.normal(0, REST, n)


def gamma(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return residuals with a skewness of 1 and the same standard deviation as those of the baseline."""
    return (rng.gamma(SHAPE, 1, n) - SHAPE) / SHAPE**0.5 * REST


def lognormal(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return residuals with a skewness of 6 and the same standard deviation as those of the baseline."""
    mean, growth = np.exp(SIGMA**2 / 2), np.exp(SIGMA**2)
    return (rng.lognormal(0, SIGMA, n) - mean) / (mean * np.sqrt(growth - 1)) * REST


def wide_lognormal(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return residuals with a skewness of 6 and three times the standard deviation of the baseline's residuals."""
    return 3 * lognormal(rng, n)


RESIDUALS: Mapping[str, tuple[Draw, int]] = {
    "normal": (normal, 0),
    "skewness 1": (gamma, 100),
    "skewness 6": (lognormal, 200),
    "skewness 6, 3 points": (wide_lognormal, 300),
}
"""The distributions of the arms' residuals, each with a number that is added to the seed of its simulations."""


def sweep(rng: np.random.Generator, n: int, apart: tuple[float, ...], draw: Draw) -> list[TrialRecord]:
    """Simulate the trials of a baseline and its arms with `n` common seeds.

    Args:
        rng: The generator of all random numbers.
        n: The number of seeds.
        apart: The true difference of each arm from the baseline.
        draw: The function that draws the residuals of an arm. The residuals of the baseline are always normal.
    """
    shared = rng.normal(0, SEEDS, n)
    records = []
    for arm, more in enumerate((0.0, *apart)):
        rest = rng.normal(0, REST, n)
        if arm and draw is not normal:
            rest = draw(rng, n)
        for seed, value in enumerate(TRUE + more + shared + rest):
            plan = TrialPlan(key=f"{arm}-{seed}", number=len(records), arm={"arm": arm}, seed=seed, config={})
            history = [RoundRecord(0, {METRIC: 0.5}, 0.0), RoundRecord(1, {METRIC: float(value)}, 0.0)]
            records.append(TrialRecord(plan, Outcome(outcome="finished", round=1), history))
    return records


@dataclass
class Tally:
    """A record of named events, such as a false alarm: whether each event occurred in each repetition."""

    hits: dict[str, list[bool]] = field(default_factory=dict)

    def add(self, name: str, hit: bool) -> None:
        """Record whether the event `name` occurred in one repetition."""
        self.hits.setdefault(name, []).append(hit)

    def shares(self) -> Mapping[str, float]:
        """Return, for each event, the percentage of repetitions in which the event occurred."""
        return {name: 100 * sum(hits) / len(hits) for name, hits in self.hits.items()}


def covers(interval: tuple[float, float] | None, truth: float) -> bool:
    """Return whether an interval contains the true value."""
    return interval is not None and interval[0] <= truth <= interval[1]


def unpaired(arms: list[ArmStatistics]) -> list[float]:
    """Return the Holm-corrected p-value of Welch's test for each arm against the baseline, the first of the `arms`.

    Welch's test ignores that the arms share seeds.
    """
    baseline, *others = [list(one.values.values()) for one in arms]
    return holm([float(stats.ttest_ind(one, baseline, equal_var=False).pvalue) for one in others])


def judge(tally: Tally, records: list[TrialRecord], apart: tuple[float, ...]) -> None:
    """Compare the statistics of one simulated sweep with its true values, and record the events in `tally`.

    `apart` contains the true difference of each arm from the baseline.
    """
    baseline, *others = arms = summarise(MANIFEST, records)
    tally.add("mean", covers(baseline.interval, TRUE))
    compared = [one.comparison for one in others if one.comparison is not None]
    for one, truth in zip(compared, apart, strict=True):
        tally.add("difference", covers(one.interval, truth))
        if one.bootstrap is not None:
            tally.add("bootstrap", covers(one.bootstrap, truth))
    welch = unpaired(arms)
    if not any(apart):
        tally.add("false", any(one.p_holm is not None and one.p_holm <= 0.05 for one in compared))
        if compared[0].exact_can_tell:
            tally.add("false, exact", any((one.p_exact_holm or 1.0) <= 0.05 for one in compared))
        tally.add("false, unpaired", any(p <= 0.05 for p in welch))
        return
    for place, more in enumerate(apart):
        if more:
            tally.add(f"found {100 * more:g}", compared[place].verdict == "higher")
            tally.add(f"found {100 * more:g}, unpaired", welch[place] <= 0.05)


def rows(repetitions: int, residuals: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield a table row for each of the `residuals` and each number of seeds."""
    for name in residuals:
        draw, start = RESIDUALS[name]
        for n in (3, 5, 6, 8, 10, 20):
            tally, rng = Tally(), np.random.default_rng(n + start)
            for _ in range(repetitions):
                for apart in ((0.0,) * len(APART), APART):
                    judge(tally, sweep(rng, n, apart, draw), apart)
            shares = {event: f"{share:.1f}" for event, share in tally.shares().items()}
            yield {"spread": name, "seeds": str(n), **shares}


def main() -> None:
    """Print the table and, with `--to`, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--residuals", nargs="*", choices=[*RESIDUALS], default=[*RESIDUALS])
    asked = parser.parse_args()
    found = []
    for row in rows(asked.repetitions, asked.residuals):
        found.append(row)
        print(row, flush=True)
    head = list(max(found, key=len))
    lines = ["| " + " | ".join(head) + " |", "|" + " ---: |" * len(head)]
    lines += ["| " + " | ".join(row.get(name, "-") for name in head) + " |" for row in found]
    print("\n".join(lines))
    if asked.to:
        asked.to.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
