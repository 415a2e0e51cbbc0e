"""Forecasts of the number of seeds that a sweep with "seeds until decided" will need."""

from dataclasses import dataclass

import numpy as np

from fedsweep.common.randomness import stream
from fedsweep.report.sequential_tests import HIGHER, LOWER, WITHIN, SequentialRule, replay

REPETITIONS = 500
"""The number of simulated sweeps from which `expected_seeds` computes its means."""


@dataclass(frozen=True)
class Forecast:
    """The expected course of a sweep, computed from simulated sweeps with normal differences."""

    seeds: float
    """The expected number of seeds per arm, as a mean over the arms other than the baseline."""
    baseline: float
    """The expected number of seeds of the baseline, which runs as long as any comparison is open."""
    decided: float
    """The expected share of comparisons that end as `higher`, `lower` or `within`."""


def expected_seeds(rule: SequentialRule, comparisons: int, spread: float) -> dict[str, Forecast]:
    """Return forecasts for a sweep in which no arm differs, and for one in which all differ by the smallest effect.

    Arms and baseline are assumed to vary equally and independently, so the differences of two arms have a correlation
    of 0.5. The same arguments always give the same forecasts.

    Args:
        rule: The rule of the sweep.
        comparisons: The number of arms besides the baseline.
        spread: The standard deviation of the paired differences, in the unit of `smallest_effect`.

    Returns:
        A dict with the keys `no difference` and, if the rule has a smallest effect, `smallest effect`.
    """
    rng = stream(0, "expected seeds", comparisons)
    noise = rng.normal(size=(REPETITIONS, comparisons + 1, rule.at_most)) * (spread / np.sqrt(2))
    effects = {"no difference": 0.0}
    if rule.smallest_effect is not None:
        effects["smallest effect"] = rule.smallest_effect
    found = {}
    for name, effect in effects.items():
        sweeps = replay(noise[:, 1:] - noise[:, :1] + effect, rule)
        decided = np.isin(sweeps.conclusions, (HIGHER, LOWER, WITHIN))
        baseline = sweeps.seeds.max(axis=1)
        found[name] = Forecast(float(sweeps.seeds.mean()), float(baseline.mean()), float(decided.mean()))
    return found
