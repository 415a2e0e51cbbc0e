"""Replay "seeds until decided" on recorded sweeps with many seeds, in random orders of the seeds.

    python benchmarks/recorded_seeds.py ablations/lora_rank [ablations/method_bounds ...] [--store mlruns] [--to FILE]

In each order, a comparison sees only as many seeds as the rule asks for. Its verdict is contradicted if all seeds
together give a mean difference with the other sign, or one larger than the smallest effect for `within`. The script
does this for several scores of a trial: the accuracy after the last round, its mean over the last half and the last two
thirds of the rounds, and the same for the test loss. The seeds of all orders are the same, so the shares are not those
of independent sweeps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedsweep.report.arm_statistics import ArmStatistics, summarise
from fedsweep.report.intervals_and_power import t_interval
from fedsweep.report.sequential_tests import HIGHER, LOWER, WITHIN, Replayed, SequentialRule, replay
from fedsweep.report.text_tables import markdown_table
from fedsweep.report.units_and_labels import arm_words, names
from fedsweep.results import Store, SweepManifest, SweepStore
from fedsweep.results.arms import counterparts, identity
from fedsweep.results.history import History

Array = np.ndarray
POINTS = 2.0
"""The smallest effect, in percentage points of accuracy. There are no tests of equivalence for the loss."""
HEAD = ("search space", "score", "arm", "difference", "95% interval", "sd", "mean / sd", "decided %", "mean seeds",
        "contradicted %")  # fmt: skip
Score = Callable[[History], float]


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
    """Print the table and, with `--to`, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spaces", nargs="+")
    parser.add_argument("--store", default="mlruns")
    parser.add_argument("--orders", type=int, default=2000)
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    rows = [row for one in given.spaces for row in of_sweep(Store.at(given.store).find(one, None), given.orders)]
    table = markdown_table(HEAD, rows, [place < 3 for place in range(len(HEAD))])
    print(table)
    if given.to is not None:
        given.to.write_text(f"{table}\n", encoding="utf-8")


def of_sweep(sweep: SweepStore, orders: int) -> Iterator[list[str]]:
    """Yield a table row for each score and for each arm that is compared with a baseline."""
    manifest = sweep.manifest()
    arms = summarise(manifest, sweep.trials())
    for name, (score, effect) in SCORES.items():
        differences = _differences(manifest, arms, score)
        values = np.array([*differences.values()])  # (comparison, seed)
        if np.isnan(values).any():  # the metric was not recorded
            continue
        most = values.shape[1]
        rule = SequentialRule(min(SequentialRule.first_look, most), most, effect)
        found = in_random_orders(values, rule, orders)
        decided, wrong = judged(found, values.mean(1), effect)
        for place, arm in enumerate(differences):
            interval, own, sd = t_interval(values[place].tolist()), values[place], values[place].std(ddof=1)
            low, high = interval or (np.nan, np.nan)
            digits = 2 if effect else 4
            yield [
                manifest.name,
                name,
                arm,
                f"{own.mean():+.{digits}f}",
                f"{low:.{digits}f} to {high:.{digits}f}",
                f"{sd:.{digits}f}",
                f"{own.mean() / sd:+.2f}",
                f"{100 * decided[:, place].mean():.1f}",
                f"{found.seeds[:, place].mean():.1f}",
                f"{100 * wrong[:, place].sum() / max(decided[:, place].sum(), 1):.1f}",
            ]


def in_random_orders(values: Array, rule: SequentialRule, orders: int) -> Replayed:
    """Apply the rule to the paired differences (comparison, seed) in `orders` random orders of the seeds."""
    rng = np.random.default_rng(0)
    shuffled = np.stack([values[:, rng.permutation(values.shape[1])] for _ in range(orders)])
    return replay(shuffled, rule)


def judged(found: Replayed, means: Array, effect: float | None) -> tuple[Array, Array]:
    """Return whether each comparison was decided, and whether the verdict contradicts the mean over all seeds.

    Args:
        found: The verdicts, with the axes order and comparison.
        means: The mean difference over all seeds for each comparison.
        effect: The smallest effect, or None without tests of equivalence.
    """
    kinds = found.conclusions
    wrong = ((kinds == HIGHER) & (means <= 0)) | ((kinds == LOWER) & (means >= 0))
    wrong |= (kinds == WITHIN) & (np.abs(means) > (effect or 0))
    return np.isin(kinds, (HIGHER, LOWER, WITHIN)), wrong


def _differences(manifest: SweepManifest, arms: Sequence[ArmStatistics], score: Score) -> Mapping[str, Array]:
    """Return the paired differences of each arm from its baseline, over the seeds that finished in all arms."""
    dotted, by_arm = names(manifest, arms), {identity(one.arm.values): one for one in arms}
    finished = {key: one.arm.finished(manifest.metric) for key, one in by_arm.items()}
    seeds = sorted(set.intersection(*(set(one) for one in finished.values())))
    values = {key: np.array([score(trials[seed].history) for seed in seeds]) for key, trials in finished.items()}
    others = counterparts([one.arm.values for one in arms], manifest.baseline or {})
    pairs = {key: identity(others[key]) for key in values if key in others and identity(others[key]) != key}
    return {arm_words(by_arm[key].arm.values, dotted): values[key] - values[other] for key, other in pairs.items()}


if __name__ == "__main__":
    main()
