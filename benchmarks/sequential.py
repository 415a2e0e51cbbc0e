"""Measure the errors and the cost of "seeds until decided" on simulated sweeps, whose true differences are known.

    python -m benchmarks.sequential [--repetitions 2000] [--adastop 2000] [--cells 0] [--parts grid] [--write | --page]

Each simulated sweep has a baseline and 1, 3 or 7 arms, whose true differences from the baseline are multiples of the
smallest effect. The script compares fedsweep's rule with fixed numbers of seeds, with other sequential rules and, if
the package `adastop` is installed, with AdaStop (about an hour on two cores). With `--write`, the script writes
`results/sequential.json` and `results/sequential.md`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from scipy import stats

from benchmarks import sequential_rivals as rivals
from benchmarks.sequential_page import mean, one_design, page
from fedsweep.report import sequential_tests
from fedsweep.report.sequential_tests import AT_THE_LIMIT, HIGHER, LOWER, OUT_OF_REACH, WITHIN, SequentialRule, replay

RESULTS = Path(__file__).parent / "results"
STORED = RESULTS / "sequential.json"
PARTS = ("grid", "choice", "looks", "adastop")
Array = np.ndarray
ARMS = (1, 3, 7)
EQUAL = (0.0, 0.5, 1.0, 2.0, 3.0)
"""The true differences, in units of the smallest effect, of sweeps in which all arms differ equally."""
MIXED = {3: (0.0, 1.0, 2.0), 7: (0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 3.0)}
SPREADS = (0.5, 1.0, 2.0)
"""The standard deviations of the paired differences, in units of the smallest effect."""
NOISES = ("normal", "unequal", "skewed", "very skewed")
MOST = 40
"""The largest number of seeds of a fixed design."""
LIMITS = (15, 30, 40)
"""The limits, besides 20 seeds, with which fedsweep's rule is also measured."""
RULE = SequentialRule(smallest_effect=1.0)
CUTS = (6, 10)
"""The numbers of seeds at which sweeps are also interrupted."""
COVERAGES = (0.93, 0.95, 0.97, 0.99, 0.992)
"""The coverages at every single look for which the coverage at all looks is simulated."""
CHOICE, REPORT = 11, 23
"""The seeds of the simulations with which the rule was chosen, and of those that are reported."""


def draw(rng: np.random.Generator, size: int, truth: Sequence[float], spread: float, noise: str) -> Array:
    """Return the results of simulated trials, with the axes sweep, arm (the baseline first) and seed.

    An effect that a seed has on all arms alike would cancel in the differences, so there is none.

    Args:
        rng: The generator of all random numbers.
        size: The number of sweeps.
        truth: The true differences of the arms from the baseline.
        spread: The standard deviation of the differences. With unequal noise, it is multiplied by 0.5, 1 or 1.5.
        noise: `normal`; `unequal` (normal, with other standard deviations); `skewed` (exponential arms and a normal
            baseline, so that differences have a skewness of 0.7); `very skewed` (the baseline varies little, so that
            differences have a skewness of 1.7).
    """
    shape = (size, len(truth), MOST)
    baseline = rng.normal(size=(size, 1, MOST))
    arms = rng.normal(size=shape) if noise in ("normal", "unequal") else rng.exponential(size=shape) - 1
    share = 0.1 if noise == "very skewed" else 0.5
    scale = np.sqrt(1 - share) * np.ones(len(truth))
    if noise == "unequal":
        scale = np.sqrt(np.resize([0.5, 1.0, 1.5], len(truth)) ** 2 - 0.2)
        share = 0.2
    values = arms * spread * scale[:, None] + np.asarray(truth)[:, None]
    return np.concatenate([baseline * spread * np.sqrt(share), values], axis=1)


def cells(noises: Sequence[str]) -> Iterator[tuple[str, int, str, tuple[float, ...], float]]:
    """Yield the noise, the number of arms, the name and the values of the true differences, and the spread."""
    for noise in noises:
        for arms in ARMS:
            for spread in SPREADS:
                for truth in EQUAL:
                    yield noise, arms, f"all {truth:g}", (truth,) * arms, spread
                if arms in MIXED:
                    yield noise, arms, "mixed", MIXED[arms], spread


def right(conclusions: Array, truth: Sequence[float]) -> float:
    """Return the share of comparisons with a true decision: the right sign, or truly within the smallest effect."""
    true = np.asarray(truth)
    return float((((conclusions == HIGHER) & (true > 0)) | ((conclusions == WITHIN) & (np.abs(true) < 1))).mean())


def errors(conclusions: Array, truth: Sequence[float]) -> tuple[float, float]:
    """Return the shares of sweeps with a false `higher` or `lower`, and with a false `within`, in at least one arm."""
    true = np.asarray(truth)
    sign = ((conclusions == HIGHER) & (true <= 0)) | ((conclusions == LOWER) & (true >= 0))
    near = (conclusions == WITHIN) & (np.abs(true) >= 1)
    return float(sign.any(axis=1).mean()), float(near.any(axis=1).mean())


def per_arm(seeds: Array) -> float:
    """Return the mean number of seeds per arm. The baseline counts as an arm and runs as long as any comparison."""
    return float((seeds.sum(axis=1) + seeds.max(axis=1)).mean() / (seeds.shape[1] + 1))


def fixed_shares(values: Array, truth: Sequence[float]) -> dict[int, float]:
    """Return the share of right decisions of a fixed design for each number of seeds.

    If both tests of a comparison could decide, the test that is better for this truth decides.
    """
    both = [rivals.fixed(values, near_first) for near_first in (False, True)]
    return {n: max(right(one[n], truth) for one in both) for n in both[0]}


def covered(found: Any, truth: Sequence[float], border: Array) -> float:
    """Return the share of intervals with the given boundaries that contain the truth, among existing intervals."""
    known = np.isfinite(found.errors) & np.isfinite(border)
    inside = np.abs(found.means - np.asarray(truth)) <= border * found.errors
    return float(inside[known].mean()) if known.any() else float("nan")


def measure(trials: Array, truth: Sequence[float]) -> dict[str, Any]:
    """Return the measurements of fedsweep's rule and of fixed designs on one cell of the grid."""
    values = trials[:, 1:] - trials[:, :1]
    found = replay(values[:, :, : rivals.AT_MOST], RULE)
    fixed = rivals.fixed(values)
    shares = fixed_shares(values, truth)
    wanted, seeds = right(found.conclusions, truth), per_arm(found.seeds)
    false_sign, false_near = errors(found.conclusions, truth)
    plain = np.asarray(stats.t.isf(rivals.LEVEL / 2, np.maximum(found.pairs - 1, 1)))
    cut = [replay(values[:, :, :n], RULE) for n in CUTS]
    n = rivals.same_power(shares, wanted)
    return {
        "false_sign": false_sign,
        "false_within": false_near,
        "false_of_20_fixed_seeds": max(errors(fixed[rivals.AT_MOST], truth)),
        "covered": covered(found, truth, found.borders[..., 0]),
        "covered_judged": covered(found, truth, found.borders[..., 1]),
        "covered_simultaneous": covered(found, truth, found.borders[..., 3]),
        "covered_interrupted": [covered(one, truth, one.borders[..., 0]) for one in cut],
        "covered_equivalence": covered(found, truth, found.borders[..., 2]),
        "covered_plain_t": covered(found, truth, plain),
        "right": wanted,
        "seeds": seeds,
        "fixed_seeds": n,
        "ratio": seeds / n,
        "at_the_limit": float((found.conclusions == AT_THE_LIMIT).mean()),
        "out_of_reach": float((found.conclusions == OUT_OF_REACH).mean()),
        "fixed_right": shares,
    }


def grid(repetitions: int, first_cells: int) -> list[dict[str, Any]]:
    """Measure all cells of the grid, or only the first `first_cells` if that is not 0."""
    found = []
    for number, (noise, arms, name, truth, spread) in enumerate(cells(NOISES)):
        if first_cells and number == first_cells:
            break
        rng = np.random.default_rng((REPORT, number))
        row = {"noise": noise, "arms": arms, "truth": name, "spread": spread}
        measured = measure(draw(rng, repetitions, truth, spread, noise), truth)
        shares = measured.pop("fixed_right")
        found.append(row | measured)
        print(found[-1], flush=True)
        if noise == "normal":
            found[-1]["fixed_right"] = shares
    return found


def candidates(arms: int) -> dict[str, Callable[[Array], tuple[Array, Array]]]:
    """Return the rules among which fedsweep's was chosen, as functions of the differences."""
    power = rivals.power_family
    found: dict[str, Callable[[Array], tuple[Array, Array]]] = {}

    def spending(name: str, different: rivals.Spending, equivalent: rivals.Spending, first: int = 4) -> None:
        tables = rivals.spending_tables(arms, first, different, equivalent)
        found[name] = partial(rivals.stopped, tables=tables)

    def ours(give_up: float, at_most: int = rivals.AT_MOST) -> Callable[[Array], tuple[Array, Array]]:
        def run(values: Array) -> tuple[Array, Array]:
            one = replay(values[:, :, :at_most], replace(RULE, give_up=give_up, at_most=at_most))
            return one.conclusions, one.seeds

        return run

    def with_other_boundaries(give_up: float, values: Array) -> tuple[Array, Array]:
        tables = rivals.spending_tables(arms, RULE.first_look, power(2), power(3))
        with patch.object(sequential_tests, "_boundaries", return_value=tables):
            return ours(give_up)(values)

    for variance in (0.25, 1.0, 4.0):
        tables = rivals.anytime_tables(arms, variance)
        found[f"anytime-valid e-process, prior variance {variance:g}"] = partial(rivals.stopped, tables=tables)
    spending("O'Brien-Fleming-like spending", rivals.obrien_fleming, rivals.obrien_fleming)
    spending("Pocock-like spending", rivals.pocock, rivals.pocock)
    spending("Hwang-Shih-DeCani, gamma -4", rivals.hwang(-4.0), rivals.hwang(-4.0))
    spending("exponents 1 and 1", power(1), power(1))
    spending("exponents 2 and 2", power(2), power(2))
    spending("exponents 2 and 3", power(2), power(3))
    spending("exponents 1 and 3, first look at 3 seeds", power(1), power(3), 3)
    spending("exponents 1 and 3", power(1), power(3))
    found |= {f"exponents 1 and 3, give up below {share:g}": ours(share) for share in (0.05, 0.1, 0.2)}
    found |= {f"exponents 2 and 3, give up below {share:g}": partial(with_other_boundaries, share)
              for share in (0.05, 0.1)}  # fmt: skip
    found |= {f"fedsweep's rule, at most {most} seeds": ours(RULE.give_up, most) for most in LIMITS}
    return found


def choice(repetitions: int) -> list[dict[str, Any]]:
    """Measure the candidates on normal noise, averaged over the true differences and the spreads."""
    found = []
    for arms in ARMS:
        rules = candidates(arms)
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in rules}
        for number, (_, _, case, truth, spread) in enumerate(one for one in cells(["normal"]) if one[1] == arms):
            trials = draw(np.random.default_rng((CHOICE, arms, number)), repetitions, truth, spread, "normal")
            values = trials[:, 1:] - trials[:, :1]
            shares = fixed_shares(values, truth)
            for name, rule in rules.items():
                conclusions, seeds = rule(values)
                cost, wanted, false = per_arm(seeds), right(conclusions, truth), errors(conclusions, truth)
                rows[name].append({"truth": case, "seeds": cost, "right": wanted, "fixed_right": shares,
                                   "ratio": cost / rivals.same_power(shares, wanted), "false": false})  # fmt: skip
        for name, measured in rows.items():
            fixed_seeds, ratio, decisive = one_design(measured)
            found.append({"arms": arms, "rule": name,
                          **{key: mean(measured, key) for key in ("seeds", "right", "ratio")},
                          "one_fixed_number": fixed_seeds, "ratio_to_one_fixed_number": ratio, "decisive": decisive,
                          "false_sign": max(row["false"][0] for row in measured),
                          "false_within": max(row["false"][1] for row in measured)})  # fmt: skip
            print(found[-1], flush=True)
    return found


def looks(repetitions: int) -> list[dict[str, float]]:
    """Measure how often t intervals with the same coverage at every look contain the truth at all looks.

    The looks are those of the rule, after 4, 5, ..., 20 seeds of one comparison with normal noise.
    """
    mean_differences, standard_errors = rivals.moments(
        np.random.default_rng((REPORT, 2)).normal(size=(repetitions, rivals.AT_MOST))
    )
    seeds = np.arange(RULE.first_look, rivals.AT_MOST + 1)
    statistics = np.abs(mean_differences[:, seeds - 1] / standard_errors[:, seeds - 1])
    return [{"each": share, "all": float((statistics <= stats.t.isf((1 - share) / 2, seeds - 1)).all(axis=1).mean())}
            for share in COVERAGES]  # fmt: skip


def against_adastop(repetitions: int, processes: int) -> list[dict[str, Any]]:
    """Measure AdaStop and fedsweep's rule on the same trials, in all cells of the grid."""
    if rivals.adastop_class() is None or not repetitions:
        print("AdaStop is left out, because the package `adastop` is not installed or no repetitions are asked for.")
        return []
    found: list[dict[str, Any]] = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for row in pool.map(beside_adastop, range(len([*cells(NOISES)])), repeat(repetitions)):
            found.append(row)
            print(row, flush=True)
    return found


def beside_adastop(number: int, repetitions: int) -> dict[str, Any]:
    """Measure AdaStop at two levels and fedsweep's rule in one cell of the grid."""
    noise, arms, name, truth, spread = [*cells(NOISES)][number]
    trials = draw(np.random.default_rng((REPORT, 1, number)), repetitions, truth, spread, noise)
    trials = trials[:, :, : rivals.AT_MOST]
    one, compare = replay(trials[:, 1:] - trials[:, :1], RULE), rivals.adastop_class()
    row: dict[str, Any] = {"noise": noise, "arms": arms, "truth": name, "spread": spread}
    for rule, (conclusions, seeds) in {
        "fedsweep": (one.conclusions, one.seeds),
        "adastop": rivals.adastop(compare, trials, number, rivals.LEVEL),
        "adastop_half": rivals.adastop(compare, trials, number, rivals.LEVEL / 2),
    }.items():
        differs = np.asarray(truth) > 0
        row[rule] = {
            "seeds": per_arm(seeds),
            "false_sign": errors(conclusions, truth)[0],
            "found": float((conclusions == HIGHER)[:, differs].mean()) if differs.any() else None,
            "right": right(conclusions, truth),
        }
    return row


def rounded(value: Any) -> Any:
    """Return nested dicts and lists in which all numbers have at most four decimals."""
    if isinstance(value, dict):
        return {str(key): rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


def lines(measured: dict[str, Any]) -> str:
    """Return JSON with one line for each row of a table."""
    parts = []
    for key, value in measured.items():
        rows = ",\n".join(json.dumps(row) for row in value) if isinstance(value, list) else json.dumps(value)
        parts.append(f'"{key}": [\n{rows}\n]' if isinstance(value, list) else f'"{key}": {rows}')
    return "{\n" + ",\n".join(parts) + "\n}"


def main() -> None:
    """Run the simulations and, with `--write`, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=2000, help="simulated sweeps for each cell")
    parser.add_argument("--adastop", type=int, default=2000, help="simulated sweeps for each cell with AdaStop")
    parser.add_argument("--processes", type=int, default=2, help="processes that run AdaStop")
    parser.add_argument("--cells", type=int, default=0, help="number of cells of the grid; 0 for all")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="the tables to compute")
    parser.add_argument("--write", action="store_true", help="write the files in benchmarks/results")
    parser.add_argument("--page", action="store_true", help="only write the tables again, from the JSON file")
    asked = parser.parse_args()
    if asked.page:
        (RESULTS / "sequential.md").write_text(page(json.loads(STORED.read_text())))
        return
    measured: dict[str, Any] = {"repetitions": asked.repetitions, "adastop_repetitions": asked.adastop}
    if "grid" in asked.parts:
        measured["grid"] = grid(asked.repetitions, asked.cells)
    if "choice" in asked.parts:
        measured["choice"] = choice(max(asked.repetitions // 2, 2))
    if "looks" in asked.parts:
        measured["looks"] = looks(100 * asked.repetitions)
    if "adastop" in asked.parts:
        measured["adastop"] = against_adastop(asked.adastop, asked.processes)
    if asked.write:
        measured = {**(json.loads(STORED.read_text()) if STORED.exists() else {}), **measured}
        STORED.write_text(lines(rounded(measured)) + "\n")
        (RESULTS / "sequential.md").write_text(page(measured))


if __name__ == "__main__":
    main()
