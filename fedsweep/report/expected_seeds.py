"""Forecasts of the number of seeds that a sweep with "seeds until decided" will need."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fedsweep.common.randomness import stream
from fedsweep.report.sequential_tests import HIGHER, LOWER, WITHIN, SequentialRule, replay

REPETITIONS = 500
"""The number of simulated sweeps from which `expected_seeds` computes its means."""
MOST_COMPARISONS = 50_000
"""The largest number of simulated comparisons, over all sweeps. Large families are simulated in fewer sweeps."""


@dataclass(frozen=True)
class Forecast:
    """The expected course of a sweep, computed from simulated sweeps with normal differences."""

    seeds: float
    """The expected number of seeds per arm, as a mean over the arms other than the baselines."""
    baseline: float | None
    """The expected number of seeds of a baseline; None without a baseline."""
    decided: float
    """The expected share of comparisons that end as `higher`, `lower` or `within`."""


def expected_seeds(
    rule: SequentialRule, pairs: Sequence[tuple[str, str]], spread: float, baselines: Collection[str] = ()
) -> dict[str, Forecast]:
    """Return forecasts for a sweep in which no arm differs, and for one in which all differ by the smallest effect.

    All arms are assumed to vary equally and independently, so the differences of two arms from a third have a
    correlation of 0.5. If all arms of a triple are compared, they cannot all differ by the same amount. The forecast is
    then that of sweeps in which each comparison, seen for itself, has this difference. The same arguments always give
    the same forecasts.

    Args:
        rule: The rule of the sweep.
        pairs: The two arms of each comparison.
        spread: The standard deviation of the paired differences, in the unit of `smallest_effect`.
        baselines: The arms that count as baselines.

    Returns:
        A dict with the keys `no difference` and, if the rule has a smallest effect, `smallest effect`.
    """
    arms = sorted(dict.fromkeys(arm for pair in pairs for arm in pair), key=lambda arm: arm not in baselines)
    ours, theirs = ([arms.index(pair[side]) for pair in pairs] for side in (0, 1))
    rng, repetitions = stream(0, "expected seeds", len(pairs)), min(REPETITIONS, MOST_COMPARISONS // len(pairs))
    noise = rng.normal(size=(repetitions, len(arms), rule.at_most)) * (spread / np.sqrt(2))
    effects = {"no difference": 0.0}
    if rule.smallest_effect is not None:
        effects["smallest effect"] = rule.smallest_effect
    found = {}
    for name, effect in effects.items():
        sweeps = replay(noise[:, ours] - noise[:, theirs] + effect, rule)
        decided = np.isin(sweeps.conclusions, (HIGHER, LOWER, WITHIN))
        taking_part = [[place for place, pair in enumerate(pairs) if arm in pair] for arm in arms]
        seeds = np.stack([sweeps.seeds[:, own].max(axis=1) for own in taking_part], axis=1)
        first = sum(arm in baselines for arm in arms)
        found[name] = Forecast(
            float(seeds[:, first:].mean()),
            float(seeds[:, :first].mean()) if first else None,
            float(decided.mean()),
        )
    return found
