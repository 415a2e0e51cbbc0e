"""Check the coverage of the interval over seeds and images on simulated predictions, with other intervals beside it.

    python benchmarks/other_images.py [--repetitions 1000] [--seeds 3 5 10] [--images 100 1000]
        [--to benchmarks/results/other_images]

Each repetition simulates two arms that predict the same test images with the same seeds. The probability that a seed of
an arm predicts an image correctly is the logistic function of a sum of normal effects: the difficulty of the image's
group, the effect of the arm on the group, the effect of the seed on both arms, and the effect of the seed on the arm.
The true difference is the expected difference over all seeds and images. The intervals are:

- seeds: Student's t over the seeds, which treats the images as fixed (`t_interval`)
- seeds and images: the interval of the report (`crossed`)
- Satterthwaite: the same variance, with Satterthwaite's degrees of freedom
- pigeonhole: percentiles of a bootstrap that resamples seeds and groups (Owen, 2007), up to 100 images

A second simulation averages the accuracy over four rounds, of which the earlier three test a third of the images of
each domain, another third for each seed, as with `evaluation.images_per_domain`. Rounds differ by a normal effect on
the logits of an arm; apart from that, an image that is predicted correctly in one round is in the others, too.

A third simulation adds seeds until the comparison is decided (`judge`), with 4 to 20 seeds and a smallest effect of
one point. It checks the repeated interval over seeds, and the same interval widened for other images, at the seed at
which the comparison ended.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from scipy.special import expit

from fedsweep.report.intervals_and_power import Interval, half_width, t_interval
from fedsweep.report.other_images import crossed
from fedsweep.report.sequential_tests import SequentialRule, judge
from fedsweep.report.text_tables import markdown_table
from fedsweep.results.right_images import RightImages, packed_bits

SEEDS, IMAGES = (3, 5, 10), (100, 1_000, 10_000)
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
RESAMPLES = 400
MOST_RESAMPLED = 100  # images; with more images, the bootstrap would take most of the time
RULE = SequentialRule(first_look=4, at_most=20, smallest_effect=0.01)
INTERVALS = ("seeds", "seeds and images", "Satterthwaite", "pigeonhole")
ROUNDS, SAMPLE, OF_ROUND = 4, 3, 0.15
"""The averaged rounds, the denominator of the share of the images that the earlier ones test, and the standard
deviation of the effect of a round on the logits of an arm."""


@dataclass(frozen=True)
class Population:
    """The population of seeds and images from which a simulation draws. Standard deviations are on the logit scale."""

    name: str
    better: float = 0.2
    """The effect of the second arm on the logit."""
    own: float = 1.0
    """The standard deviation of the effect of an arm on a group of images."""
    of_arm: float = 0.05
    """The standard deviation of the effect of a seed on one arm."""
    start: float = 1.0
    """The mean logit of the first arm."""
    domains: int = 1
    """The number of domains. Each group has one image in each domain."""
    copies: int = 1
    """The number of images of each group in each domain."""
    difficulty: float = 1.5
    """The standard deviation of the difficulties of groups."""
    shared: float = 0.1
    """The standard deviation of the effect of a seed on both arms."""

    def groups(self, images: int) -> int:
        """Return the number of groups of a test set of `images` images, at least 2."""
        return max(images // (self.domains * self.copies), 2)

    def offsets(self) -> np.ndarray:
        """Return the mean logit of each domain, relative to their mean."""
        return np.linspace(-1, 1, self.domains) if self.domains > 1 else np.zeros(1)

    def difference(self, of_round: float = 0.0) -> float:
        """Return the true difference: the mean over domains of the expected difference over seeds and images.

        `of_round` is the standard deviation of the effect of a round on the logits of an arm.
        """
        spread = np.sqrt(self.difficulty**2 + self.own**2 + self.shared**2 + self.of_arm**2 + of_round**2)
        logits = self.start + self.offsets()[:, None] + spread * NODES
        apart = expit(logits + self.better) - expit(logits)
        return float((apart @ WEIGHTS / WEIGHTS.sum()).mean())

    def draw(self, rng: np.random.Generator, seeds: int, groups: int) -> np.ndarray:
        """Return the differences between the predictions of the arms, int8 (seeds, domains, groups, copies)."""
        common, shared = rng.normal(0, self.difficulty, groups), rng.normal(0, self.shared, seeds)
        right = []
        for more in (0.0, self.better):
            of_group = self.start + more + common + rng.normal(0, self.own, groups)
            of_seed = shared + rng.normal(0, self.of_arm, seeds)
            logits = of_seed[:, None, None] + self.offsets()[:, None] + of_group
            drawn = rng.random((*logits.shape, self.copies), np.float32)
            right.append((drawn < expit(logits)[..., None]).astype(np.int8))
        return right[1] - right[0]

    def draw_rounds(self, rng: np.random.Generator, seeds: int, groups: int) -> np.ndarray:
        """Return whether the arms predict the images correctly, bool (arms, seeds, rounds, images).

        The images of a domain follow each other. In each domain, the groups are in the same order.
        """
        common, shared = rng.normal(0, self.difficulty, groups), rng.normal(0, self.shared, seeds)
        right: list[np.ndarray] = []
        for more in (0.0, self.better):
            of_group = self.start + more + common + rng.normal(0, self.own, groups)
            of_seed = (shared + rng.normal(0, self.of_arm, seeds))[:, None] + rng.normal(0, OF_ROUND, (seeds, ROUNDS))
            logits = of_seed[:, :, None, None] + self.offsets()[:, None] + of_group
            drawn = rng.random((seeds, 1, self.domains, groups, self.copies), np.float32)
            right.append((drawn < expit(logits)[..., None]).reshape(seeds, ROUNDS, -1))
        return np.stack(right)


POPULATIONS = (
    Population("arms differ alike on all images", own=0.0),
    Population("seeds differ more than images", own=0.3, of_arm=0.2),
    Population("images differ more than seeds"),
    Population("no difference on average", better=0.0),
    Population("six styles of every image", domains=6),
    Population("ten frames of every video", copies=10),
    Population("nearly all images right", start=4.0, better=0.3),
)


def satterthwaite(cells: np.ndarray) -> Interval:
    """Return the interval with Satterthwaite's degrees of freedom.

    `cells` (seeds, groups) is the mean difference of each seed and group.
    """
    seeds, groups = cells.shape
    mean, rows, columns = cells.mean(), cells.mean(axis=1), cells.mean(axis=0)
    of_seeds = groups * np.square(rows - mean).sum() / (seeds - 1)
    of_groups = seeds * np.square(columns - mean).sum() / (groups - 1)
    of_both = np.square(cells - rows[:, None] - columns + mean).sum() / ((seeds - 1) * (groups - 1))
    parts, free = [of_seeds], [seeds - 1]
    if of_groups > of_both:
        parts, free = [of_seeds, of_groups, -of_both], [seeds - 1, groups - 1, (seeds - 1) * (groups - 1)]
    total = sum(parts)
    if total <= 0:
        return float(mean), float(mean)
    degrees = total**2 / sum(part**2 / count for part, count in zip(parts, free, strict=True))
    half = stats.t.isf(0.025, degrees) * np.sqrt(total / cells.size)
    return float(mean - half), float(mean + half)


def pigeonhole(cells: np.ndarray, rng: np.random.Generator) -> Interval:
    """Return the percentile interval of a bootstrap that resamples the seeds and the groups independently."""
    rows, columns = (rng.multinomial(count, np.full(count, 1 / count), RESAMPLES) / count for count in cells.shape)
    means = ((columns @ cells.T) * rows).sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def intervals(differences: np.ndarray, rng: np.random.Generator) -> dict[str, Interval | None]:
    """Return the intervals of one simulated comparison, by name."""
    seeds, domains, groups, copies = differences.shape
    flat = differences.reshape(seeds, -1)
    numbers = np.tile(np.repeat(np.arange(groups), copies), domains)
    cells, over_images = differences.mean(axis=(1, 3)), crossed(flat, [groups * copies] * domains, numbers)
    found = {
        "seeds": t_interval(cells.mean(axis=1).tolist()),
        "seeds and images": None if over_images is None else over_images.interval(),
        "Satterthwaite": satterthwaite(cells),
    }
    return found | ({"pigeonhole": pigeonhole(cells, rng)} if flat.shape[1] <= MOST_RESAMPLED else {})


def simulated(population: Population, seeds: int, images: int, repetitions: int) -> dict[str, Any]:
    """Return the coverage in percent and the median length in points of each interval, by the interval's name.

    If all seeds have the same mean difference, the report has no interval. Such repetitions count as not covered.
    """
    rng, truth = np.random.default_rng([seeds, images, POPULATIONS.index(population)]), population.difference()
    groups = population.groups(images)
    covered: dict[str, int] = {}
    lengths: dict[str, list[float]] = {}
    for _ in range(repetitions):
        for name, found in intervals(population.draw(rng, seeds, groups), rng).items():
            covered[name] = covered.get(name, 0) + (found is not None and found[0] <= truth <= found[1])
            lengths.setdefault(name, []).append(0.0 if found is None else 100 * (found[1] - found[0]))
    return _row(population, images, truth, covered, lengths) | {"seeds": seeds}


def _row(
    population: Population,
    images: int,
    truth: float,
    covered: Mapping[str, int],
    lengths: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Return the results of a simulation, given the number of covered truths and the lengths of each interval."""
    repetitions = len(next(iter(lengths.values())))
    return {
        "population": population.name,
        "images": images,
        "groups": population.groups(images),
        "difference": round(100 * truth, 3),
        "repetitions": repetitions,
        "coverage": {name: round(100 * count / repetitions, 1) for name, count in covered.items()},
        "length": {name: round(float(np.median(values)), 2) for name, values in lengths.items()},
    }


def averaged(population: Population, seeds: int, images: int, repetitions: int) -> dict[str, Any]:
    """Return the coverage and the length of the intervals for the mean over rounds, as `simulated` does."""
    rng = np.random.default_rng([seeds, images, POPULATIONS.index(population), ROUNDS])
    truth, groups = population.difference(OF_ROUND), population.groups(images)
    size = groups * population.copies
    numbers = np.tile(np.repeat(np.arange(groups), population.copies), population.domains)
    covered = dict.fromkeys(INTERVALS[:2], 0)
    lengths: dict[str, list[float]] = {name: [] for name in covered}
    for _ in range(repetitions):
        arms = population.draw_rounds(rng, seeds, groups)
        tested = [[rng.permutation(size) < -(-size // SAMPLE) for _ in range(population.domains)] for _ in range(seeds)]
        first, second = (
            np.stack([_shares(right, chosen) for right, chosen in zip(arm, tested, strict=True)]) for arm in arms
        )
        over_images = crossed(second - first, [size] * population.domains, numbers)
        found = {
            "seeds": t_interval((second - first).mean(axis=1).tolist()),
            "seeds and images": None if over_images is None else over_images.interval(),
        }
        for name, interval in found.items():
            covered[name] += interval is not None and interval[0] <= truth <= interval[1]
            lengths[name].append(0.0 if interval is None else 100 * (interval[1] - interval[0]))
    return _row(population, images, truth, covered, lengths) | {"seeds": seeds}


def _shares(right: np.ndarray, tested: Sequence[np.ndarray]) -> np.ndarray:
    """Return the shares of the rounds by image, as the file of a trial has them.

    Args:
        right: Whether each round predicts an image correctly, bool (rounds, images).
        tested: For each domain, which images the rounds before the last test, bool (images of the domain,).
    """
    *before, last = right
    parts = {str(place): bits for place, bits in enumerate(np.split(last, len(tested)))}
    samples = [packed_bits([bits[np.concatenate(tested)]]) for bits in before]
    return RightImages.of_domains("", parts, (), [None] * len(tested), samples, tested).values_of_rounds()


def until_decided(population: Population, images: int, repetitions: int) -> dict[str, Any]:
    """Return the coverage and the length of the intervals at the moment of stopping, as `simulated` does."""
    rng, truth = np.random.default_rng([images, POPULATIONS.index(population)]), population.difference()
    groups, verdicts, seeds = population.groups(images), Counter[str](), list[int]()
    covered = dict.fromkeys(INTERVALS[:2], 0)
    lengths: dict[str, list[float]] = {name: [] for name in covered}
    numbers = np.tile(np.repeat(np.arange(groups), population.copies), population.domains)
    for _ in range(repetitions):
        differences = population.draw(rng, RULE.at_most, groups).reshape(RULE.at_most, -1)
        verdict = judge({"": differences.mean(axis=1).tolist()}, RULE)[""]
        over_images = crossed(differences[: verdict.seeds], [groups * population.copies] * population.domains, numbers)
        half = half_width(verdict.interval)
        both = None if over_images is None or half is None else over_images.interval(half=half)
        for name, found in zip(covered, (verdict.interval, both), strict=True):
            covered[name] += found is not None and found[0] <= truth <= found[1]
            lengths[name].append(0.0 if found is None else 100 * (found[1] - found[0]))
        verdicts[verdict.verdict] += 1
        seeds.append(verdict.seeds)
    return _row(population, images, truth, covered, lengths) | {
        "seeds": round(float(np.mean(seeds)), 1),
        "verdicts": {name: round(100 * count / repetitions, 1) for name, count in sorted(verdicts.items())},
    }


def margin(repetitions: int) -> float:
    """Return the margin of error of a coverage of 95%, in percentage points, at a confidence of 95%."""
    return 100 * 1.96 * float(np.sqrt(0.95 * 0.05 / repetitions))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first column contains text."""
    return markdown_table(head, rows, [place == 0 for place in range(len(head))])


def by_number(found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the table of a simulation with fixed numbers of seeds; `names` are the intervals."""
    head = ["population", "seeds", "images", "groups", *names, "length: seeds", "length: seeds and images"]
    rows = []
    for one in found:
        coverage, length = one["coverage"], one["length"]
        cells = [str(one["population"]), *(f"{one[name]:,}" for name in ("seeds", "images", "groups"))]
        cells += [f"{coverage[name]:.1f}" if name in coverage else "-" for name in names]
        rows.append([*cells, *(f"{length[name]:.2f}" for name in INTERVALS[:2])])
    return table(head, rows)


def markdown(found: Mapping[str, Sequence[Mapping[str, Any]]], repetitions: int) -> str:
    """Return the results as a Markdown page."""
    lines = [
        "# Coverage of intervals over seeds and images",
        "",
        f"The tables are the output of `python benchmarks/other_images.py --repetitions {repetitions}`. They contain,",
        "for each simulated population, the percentage of repetitions in which a 95% interval contains the true",
        "difference between two arms over all seeds and images. The last two columns are median lengths in percentage",
        f"points. Each row is based on {repetitions:,} repetitions. The margin of error of a coverage of 95% is then",
        f"{margin(repetitions):.1f} percentage points, at a confidence of 95%.",
        "",
        "## A fixed number of seeds",
        "",
        "The report shows the intervals `seeds` and `seeds and images`.",
        "",
        by_number(found["fixed"], INTERVALS),
        "",
        "## The mean over several rounds",
        "",
        f"The mean over {ROUNDS} rounds. The last one tests all images. The others test a third of the images of each",
        "domain, another third for each seed.",
        "",
        by_number(found["averaged"], INTERVALS[:2]),
        "",
        "## Seeds until decided",
        "",
        f"Each comparison gets {RULE.first_look} to {RULE.at_most} seeds, until it is decided on these test images.",
        "The smallest effect is 1 point. The table shows the repeated interval of a single comparison, and the same",
        "interval widened for other images, at the seed at which the comparison ended. The columns after the true",
        "difference are the mean number of seeds, and the percentages of repetitions that ended as `higher` or",
        "`lower`, and as `within`.",
        "",
    ]
    head = [
        "population",
        "images",
        "groups",
        "true difference",
        "seeds spent",
        "higher or lower",
        "within",
        *INTERVALS[:2],
        "length: seeds",
        "length: seeds and images",
    ]
    rows = []
    for one in found["until_decided"]:
        ends, length = one["verdicts"], one["length"]
        cells = [str(one["population"]), f"{one['images']:,}", f"{one['groups']:,}", f"{one['difference']:+.2f}"]
        cells += [f"{one['seeds']:.1f}", f"{ends.get('higher', 0) + ends.get('lower', 0):.1f}"]
        cells += [f"{ends.get('within', 0):.1f}", *(f"{value:.1f}" for value in one["coverage"].values())]
        rows.append([*cells, *(f"{value:.2f}" for value in length.values())])
    return "\n".join([*lines, table(head, rows)]) + "\n"


def main() -> None:
    """Print the results and, with `--to`, write them to a JSON file and a Markdown file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--to", type=Path, help="path of the two files without their suffixes")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--images", type=int, nargs="*", default=IMAGES)
    asked = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"fixed": [], "averaged": [], "until_decided": []}
    for population in POPULATIONS:
        for seeds, images in product(asked.seeds, asked.images):
            found["fixed"].append(simulated(population, seeds, images, asked.repetitions))
            found["averaged"].append(averaged(population, seeds, images, asked.repetitions))
        for images in asked.images:
            found["until_decided"].append(until_decided(population, images, asked.repetitions))
        print(f"{len(found['until_decided'])} rows: {population.name}", flush=True)
    if asked.to:
        asked.to.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        asked.to.with_suffix(".md").write_text(markdown(found, asked.repetitions))


if __name__ == "__main__":
    main()
