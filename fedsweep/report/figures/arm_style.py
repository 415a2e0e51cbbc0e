"""How arms look in every figure: the same colour and the same words."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from fedsweep.report.statistics import ArmStatistics
from fedsweep.report.trials_by_arm import Arm, recorded
from fedsweep.report.wording import arm_words, names, title
from fedsweep.results import SweepManifest
from fedsweep.results.arms import is_accuracy

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's colours, told apart with any colour vision; their yellow is too pale for lines on white."""
GREY = "#C4C4C4"
HIGHLIGHTED = 5
"""Arms in colour where there are more arms than colours; the others are grey."""
BAND = 0.16
"""How opaque the range of the seeds is."""
LETTERS = 36
"""Letters of a line that names an arm."""
BASELINE = " (baseline)"


def colours(arms: Sequence[ArmStatistics], mode: str) -> list[str]:
    """One colour per arm, the same in all figures: all, or the best five and the baseline with the rest in grey."""
    if len(arms) <= len(COLOURS):
        return list(COLOURS[: len(arms)])
    sign = -1 if mode == "max" else 1
    ranked = sorted((sign * one.mean, place) for place, one in enumerate(arms) if one.mean is not None)
    best = [place for _, place in ranked[:HIGHLIGHTED]]
    kept = best + [place for place, one in enumerate(arms) if one.is_baseline and place not in best]
    chosen = dict(zip(kept, COLOURS, strict=False))
    return [chosen.get(place, GREY) for place in range(len(arms))]


def labels(manifest: SweepManifest, arms: Sequence[ArmStatistics], lines: int = 2, letters: int = LETTERS) -> list[str]:
    """Each arm in words, on at most so many lines."""
    dotted = names(manifest, arms)
    return [folded(arm_words(one.arm.values, dotted), lines, letters, BASELINE * one.is_baseline) for one in arms]


def folded(words: str, lines: int, letters: int, after: str = "") -> str:
    """Words on at most so many lines of so many letters. What is too long loses its middle, since arms differ at ends.

    >>> folded("one  two three", 2, 8)
    'one two\\nthree'
    >>> folded("abcdefghijkl", 1, 8), folded("rank 8", 1, 20, " (baseline)")
    ('abcd…jkl', 'rank 8 (baseline)')
    """
    plain = " ".join(words.split())
    for keep in range(len(plain) - 1, 0, -1):
        if len(found := wrap(plain + after, letters)) <= lines:
            break
        plain = f"{plain[: keep - keep // 2]}…{plain[len(plain) - keep // 2 :]}"
    return "\n".join(found)


def scale_of(metric: str) -> int:
    """What a metric's values are multiplied with for an axis."""
    return 100 if is_accuracy(metric) else 1


def heading_of(metric: str) -> str:
    """A metric in a heading, without its unit."""
    return title(metric).removesuffix(" (%)").removesuffix(" (nats)")


def over_seeds(arm: Arm, objective: str, metric: str) -> dict[int, tuple[float, float, float]]:
    """Lowest, mean and highest over finished seeds at each round that all of them recorded, on the axis's scale."""
    scale = scale_of(metric)
    series = [recorded(trial.history, metric) for trial in arm.finished(objective).values()]
    shared = sorted(set.intersection(*map(set, series))) if series else []
    columns = {number: [scale * values[number] for values in series] for number in shared}
    return {number: (min(column), sum(column) / len(column), max(column)) for number, column in columns.items()}


def draw_over_seeds(axes: Any, points: Mapping[int, tuple[float, float, float]], colour: str, band: bool) -> None:
    """The mean as a line, and the range of the seeds as a band; grey arms are thin and without one."""
    rounds, grey = list(points), colour == GREY
    low, middle, high = ([points[number][part] for number in rounds] for part in range(3))
    width, place = (0.9, 1) if grey else (1.8, 3)
    axes.plot(rounds, middle, color=colour, linewidth=width, zorder=place, marker="." if len(rounds) == 1 else "")
    if band and not grey:
        axes.fill_between(rounds, low, high, color=colour, alpha=BAND, linewidth=0, zorder=1)


def same_images(metric: str, arms: Sequence[ArmStatistics]) -> bool:
    """Whether a metric of these arms is over the same domains; that of a single domain always is."""
    one_domain = metric.startswith(("accuracy/domain/", "accuracy/out_of_domain/"))
    return one_domain or len({one.held_out for one in arms}) < 2
