"""Replay "seeds until decided" on recorded sweeps with many seeds, in random orders of the seeds.

    fedsweep tune ablations/lora_rank --seeds 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19
    fedsweep tune ablations/method_bounds --seeds 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19
    python -m benchmarks.recorded_seeds ablations/lora_rank ablations/method_bounds [--store mlruns] [--to FILE]

In each order, a comparison sees only as many seeds as the rule asks for. Its verdict is then checked against the mean
difference of all seeds. The script does this for several scores of a trial: the accuracy after the last round, its mean
over the last half and the last two thirds of the rounds, and the same for the test loss. A second table shows how much
a control variate would save: `allocation/gamma`, averaged over the rounds, which all arms of a seed share.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsweep.report.arm_statistics import ArmStatistics, summarise
from fedsweep.report.intervals_and_power import t_interval
from fedsweep.report.sequential_tests import HIGHER, LOWER, WITHIN, Replayed, SequentialRule, replay
from fedsweep.report.text_tables import markdown_table
from fedsweep.report.units_and_labels import arm_words, names
from fedsweep.results import Store, SweepManifest, SweepStore
from fedsweep.results.arms import counterparts, identity
from fedsweep.results.history import History
from fedsweep.training.coverage import GAMMA

Array = np.ndarray
POINTS = 2.0
"""The smallest effect, in percentage points of accuracy. There are no tests of equivalence for the loss."""
HEAD = ("search space", "score", "arm", "difference", "95% interval", "sd", "mean / sd", "decided %", "within %",
        "mean seeds", "contradicted higher or lower %", "contradicted within %", "coverage %")  # fmt: skip
SHARED = ("search space", "score", "arm", "correlation with the baseline", "correlation with gamma",
          "variance with the control variate")  # fmt: skip
PAGE = """# Seeds until decided on recorded sweeps

`python -m benchmarks.recorded_seeds {spaces}` writes this page. The sweeps:

{sweeps}

The rule: a first look after {first} seeds, at most {most}, and a smallest effect of {points:g} points for accuracies.
It was applied in {orders:,} random orders of the seeds. All orders consist of the same seeds, so the shares of the
orders are not those of independent sweeps.

- `decided %`: share of the orders that end with `higher`, `lower` or `within`.
- `within %`: share of the orders that end with `within`.
- `contradicted`: share of these verdicts that the mean difference of all seeds contradicts. It contradicts `higher` and
  `lower` if it has the other sign, and `within` if it is larger than the smallest effect.
- `coverage %`: share of the orders in which the interval of the comparison alone (`95% one arm`) at its end contains
  the mean of all seeds. The seeds of an order are a large part of all seeds. For new seeds, the share would be lower.

{table}

## What the arms share

`correlation with the baseline` is over the seeds. A control variate subtracts from each difference what a value that
all arms of a seed share explains. Here, it is `{gamma}` (see the metrics of rounds), averaged over the rounds.
`variance with the control variate` is the variance that remains, as a multiple of the variance of the differences. It
is corrected for the estimated slope, so it can be above 1. It is also the multiple of the seeds that an interval of the
same length needs.

{shared}
"""
Score = Callable[[History], float]


class Recorded(NamedTuple):
    """The scores of one arm and of its baseline, and the control variate, over the seeds that all arms finished."""

    arm: str
    own: Array
    baseline: Array
    gamma: Array

    @property
    def differences(self) -> Array:
        """The paired differences: arm minus baseline."""
        return self.own - self.baseline


def over(metric: str, share: float, unit: float) -> Score:
    """Return the score "mean of a metric over the evaluated rounds in the last `share` of the rounds", times `unit`."""

    def score(history: History) -> float:
        first = (1 - share) * history[-1].round
        values = [one.metrics[metric] for one in history if one.round > first and metric in one.metrics]
        return unit * float(np.mean(values)) if values else float("nan")

    return score


SCORES = {
    f"{name}, {rounds}": (over(metric, share, unit), effect)
    for name, metric, unit, effect in (("accuracy", "accuracy/mean", 100, POINTS), ("loss", "loss/test", 1, None))
    for rounds, share in (("last round", 1e-9), ("last half", 1 / 2), ("last two thirds", 2 / 3))
}
"""Each score with the smallest effect in its unit."""


def main() -> None:
    """Print the page and, with `--to`, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spaces", nargs="+")
    parser.add_argument("--store", default="mlruns")
    parser.add_argument("--orders", type=int, default=2000)
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    sweeps = [Store.at(given.store).find(one, None) for one in given.spaces]
    tables = [
        markdown_table(head, [row for one in sweeps for row in rows_of(one)], [place < 3 for place in range(len(head))])
        for head, rows_of in ((HEAD, lambda sweep: of_sweep(sweep, given.orders)), (SHARED, shared_by_arms))
    ]
    most = max(len(one.manifest().seeds) for one in sweeps)
    page = PAGE.format(
        spaces=" ".join(given.spaces),
        sweeps="\n".join(f"- {_described(one.manifest())}" for one in sweeps),
        first=min(SequentialRule.first_look, most),
        most=most,
        points=POINTS,
        orders=given.orders,
        gamma=GAMMA,
        table=tables[0],
        shared=tables[1],
    )
    print(page, end="")
    if given.to is not None:
        given.to.write_text(page, encoding="utf-8")


def _described(manifest: SweepManifest) -> str:
    return (
        f"`{manifest.name}` on `{manifest.experiment}`: {len(manifest.seeds)} seeds, {manifest.rounds} rounds "
        f"({manifest.created[:10]})"
    )


def of_sweep(sweep: SweepStore, orders: int) -> Iterator[list[str]]:
    """Yield a table row for each score and for each arm that is compared with a baseline."""
    manifest = sweep.manifest()
    arms = summarise(manifest, sweep.trials())
    for name, (score, effect) in SCORES.items():
        recorded = _recorded(manifest, arms, score)
        values = np.array([one.differences for one in recorded])  # (comparison, seed)
        if np.isnan(values).any():  # the metric was not recorded
            continue
        most = values.shape[1]
        found = in_random_orders(values, SequentialRule(min(SequentialRule.first_look, most), most, effect), orders)
        for place, one in enumerate(recorded):
            interval, own = t_interval(values[place].tolist()), values[place]
            low, high = interval or (np.nan, np.nan)
            digits = 2 if effect else 4
            yield [
                manifest.name,
                name,
                one.arm,
                f"{own.mean():+.{digits}f}",
                f"{low:.{digits}f} to {high:.{digits}f}",
                f"{own.std(ddof=1):.{digits}f}",
                f"{own.mean() / own.std(ddof=1):+.2f}",
                *_of_orders(found, place, own.mean(), effect),
            ]


def in_random_orders(values: Array, rule: SequentialRule, orders: int) -> Replayed:
    """Apply the rule to the paired differences (comparison, seed) in `orders` random orders of the seeds."""
    rng = np.random.default_rng(0)
    shuffled = np.stack([values[:, rng.permutation(values.shape[1])] for _ in range(orders)])
    return replay(shuffled, rule)


def _of_orders(found: Replayed, place: int, mean: float, effect: float | None) -> list[str]:
    """Return the cells about the orders of one comparison.

    Args:
        found: The verdicts, with the axes order and comparison.
        place: The comparison.
        mean: Its mean difference over all seeds.
        effect: The smallest effect, or None without tests of equivalence.
    """
    kinds = found.conclusions[:, place]
    signed, within = np.isin(kinds, (HIGHER, LOWER)), kinds == WITHIN
    wrong = ((kinds == HIGHER) & (mean <= 0)) | ((kinds == LOWER) & (mean >= 0))
    half = found.borders[:, place, 0] * found.errors[:, place]
    return [
        f"{100 * (signed | within).mean():.1f}",
        f"{100 * within.mean():.1f}" if effect else "-",
        f"{found.seeds[:, place].mean():.1f}",
        _share(wrong, signed),
        _share(within & (abs(mean) > (effect or 0)), within),
        f"{100 * (np.abs(found.means[:, place] - mean) <= half).mean():.1f}",
    ]


def _share(some: Array, of: Array) -> str:
    return f"{100 * some.sum() / of.sum():.1f}" if of.any() else "-"


def shared_by_arms(sweep: SweepStore) -> Iterator[list[str]]:
    """Yield a table row for each score and arm: what the arm shares with its baseline and with the control variate."""
    manifest = sweep.manifest()
    arms = summarise(manifest, sweep.trials())
    for name, (score, _) in SCORES.items():
        for one in _recorded(manifest, arms, score):
            if np.isnan(one.differences).any() or len(one.gamma) < 4:
                continue
            paired, varied = np.corrcoef(one.own, one.baseline)[0, 1], np.ptp(one.gamma) > 0
            explained = np.corrcoef(one.differences, one.gamma)[0, 1] if varied else np.nan
            left = (1 - explained**2) * (len(one.gamma) - 1) / (len(one.gamma) - 2)
            yield [
                manifest.name,
                name,
                one.arm,
                f"{paired:.2f}",
                *(f"{value:.2f}" if varied else "-" for value in (explained, left)),
            ]


def _recorded(manifest: SweepManifest, arms: Sequence[ArmStatistics], score: Score) -> list[Recorded]:
    """Return the scores of each arm that is compared with a baseline."""
    dotted, by_arm = names(manifest, arms), {identity(one.arm.values): one for one in arms}
    finished = {key: one.arm.finished(manifest.metric) for key, one in by_arm.items()}
    seeds = sorted(set.intersection(*(set(one) for one in finished.values())))
    others = counterparts([one.arm.values for one in arms], manifest.baseline or {})

    def scores(key: str, by: Score) -> Array:
        return np.array([by(finished[key][seed].history) for seed in seeds])

    pairs: Mapping[str, str] = {
        key: identity(others[key]) for key in by_arm if key in others and identity(others[key]) != key
    }
    return [
        Recorded(
            arm_words(by_arm[key].arm.values, dotted),
            scores(key, score),
            scores(other, score),
            scores(other, over(GAMMA, 1.0, 1.0)),
        )
        for key, other in pairs.items()
    ]


if __name__ == "__main__":
    main()
