"""Number formats and labels of arms and metrics, for all tables and figures."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fedsweep.common.yaml_values import Json
from fedsweep.report.arm_statistics import ArmStatistics
from fedsweep.report.holm_corrected_tests import Comparison
from fedsweep.results import SweepManifest
from fedsweep.results.arms import IN_WORDS, is_accuracy, setting, short_names, shown_setting
from fedsweep.results.history import VALIDATION, on_test

IN_DOMAIN, OUT_OF_DOMAIN = "in domain", "out of domain"  # columns of mean accuracy if an arm holds out domains
NOTHING = "-"  # an empty cell
TITLES = {
    "accuracy/mean": "Mean accuracy over domains (%)",
    "accuracy/last_rounds": "Mean accuracy over the last rounds (%)",
    "accuracy/out_of_domain_mean": "Mean accuracy out of domain (%)",
    "accuracy/worst_domain": "Accuracy on the worst domain (%)",
    "accuracy/clients/mean": "Mean accuracy over clients (%)",
    "accuracy/clients/worst": "Accuracy of the worst client (%)",
    "sal/active": "Active blocks, mean over clients",
    "loss/test": "Test loss, mean over domains (nats)",
    "loss/last_rounds": "Test loss, mean over the last rounds (nats)",
    "evaluation/images": "Test images",
    "loss/train": "Training loss (nats)",
    "lora/energy_beyond_least_rank": "Energy of the adapters beyond the smallest rank (share)",
    "lora/mean_rank": "Rank of the adapters, mean over the cohort",
}
"""Titles of metrics on an axis, with units."""


@dataclass(frozen=True)
class Units:
    """The format of a metric: percent with two decimals for accuracies, otherwise a fixed number of decimals."""

    percent: bool
    decimals: int

    @classmethod
    def fit(cls, percent: bool, values: Iterable[float | None]) -> "Units":
        """Return a format that suits the given values of a metric.

        If `percent` is true, the format is percent with two decimals. Otherwise, the number of decimals is chosen so
        that the median of `values` has four significant digits. The median is robust to diverged runs.

            >>> [
            ...     Units.fit(False, values).decimals
            ...     for values in ([0.4112, 0.3845, None], [33.8, 34.1, 512.0], [604_000.0])
            ... ]
            [4, 2, 0]
        """
        sizes = [] if percent else [abs(value) for value in values if value]
        return cls(percent, min(9, max(0, 3 - math.floor(math.log10(median(sizes))))) if sizes else 2)

    @classmethod
    def of(cls, metric: str, arms: Sequence[ArmStatistics]) -> "Units":
        """Return the format of the objective `metric`, with decimals that suit the metric's values in `arms`."""
        ends = (one.mean if one.mean is not None else one.arm.reached(metric)[1] for one in arms)
        return cls.fit(is_accuracy(metric), ends)

    def value(self, value: float | None, sign: str = "") -> str:
        """Format a value without its unit.

        `sign` is the sign option of Python's format specification, such as `+`.
        """
        return NOTHING if value is None else f"{100 * value if self.percent else value:{sign}z.{self.decimals}f}"

    def difference(self, value: float | None) -> str:
        """Format a difference with its sign."""
        return self.value(value, sign="+")

    def interval(self, interval: tuple[float, float] | None) -> str:
        """Format an interval as `low to high`."""
        return NOTHING if interval is None else f"{self.value(interval[0])} to {self.value(interval[1])}"


PERCENT = Units(percent=True, decimals=2)


def shown_p(p: float | None) -> str:
    """Format a p-value with three decimals, or as `<0.001` if the p-value is below 0.001."""
    if p is None:
        return NOTHING
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def shown_verdict(manifest: SweepManifest, found: Comparison, units: Units) -> str:
    """Format the verdict of a comparison in a sweep with seeds until decided, as in `within ±1.00`."""
    if found.sequential is None or manifest.until_decided is None:
        return NOTHING
    effect = manifest.until_decided.effect(manifest.metric)
    return f"within \u00b1{units.value(effect)}" if found.verdict == "within" else found.verdict


def shown_seeds(interval: tuple[int | None, int | None] | None, beyond: str) -> str:
    """Format an interval of the number of seeds with two significant digits; `beyond` replaces an end that is None.

    >>> shown_seeds((4, 315), ">10,000"), shown_seeds((4180, None), ">10,000"), shown_seeds((None, None), ">10,000")
    ('4 to 320', '4,200 to >10,000', '>10,000')
    """
    if interval is None:
        return NOTHING
    ends = [beyond if end is None else f"{float(f'{end:.2g}'):,.0f}" for end in interval]
    return " to ".join(dict.fromkeys(ends))


def title(metric: str, others: Mapping[str, str] | None = None) -> str:
    """Return the title of a metric, including its unit, for the axis of a figure.

    `others` are the titles of metrics that plug-ins report (`SweepManifest.titles`).

    >>> title("accuracy/domain/sketch"), title("accuracy/out_of_domain/sketch")
    ('Accuracy on sketch (%)', 'Accuracy on sketch, out of domain (%)')
    >>> title("validation/accuracy/mean"), title("validation/loss")
    ('Validation: mean accuracy over domains (%)', 'Validation: loss, mean over domains (nats)')
    """
    if others and metric in others:
        return others[metric]
    if metric.startswith(VALIDATION):
        name, unit = title(on_test(metric)).removeprefix("Test ").rsplit(" (", 1)
        return f"Validation: {name[0].lower()}{name[1:]} ({unit}"
    kind, _, domain = metric.removeprefix("accuracy/").partition("/")
    if metric.startswith(("accuracy/domain/", "accuracy/out_of_domain/")):
        return f"Accuracy on {domain}{', out of domain' * (kind == 'out_of_domain')} (%)"
    return TITLES.get(metric, f"{metric} (%)" if is_accuracy(metric) else metric)


def names(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[str]:
    """Return the dotted names of all hyperparameters in `arms`, in the order of the manifest."""
    present = dict.fromkeys([*manifest.varied, *(name for one in arms for name in one.arm.values)])
    return [name for name in present if any(name in one.arm.values for one in arms)]


def arm_words(arm: Mapping[str, Json], dotted: Sequence[str]) -> str:
    """Return the label of an arm in a sentence or a figure, such as `rank 4, lr 0.1`."""
    short = short_names(dotted)
    return ", ".join(setting(short[name], arm[name]) for name in dotted if name in arm) or "as is"


def settings(one: ArmStatistics, dotted: Sequence[str]) -> dict[str, str]:
    """Return the cells that identify an arm in a table, as a dict from column to text.

    Each hyperparameter has its own column. If the search space names arms or removes components, the column `arm`
    contains the arm's name or the removed components.
    """
    values = one.arm.values
    cells = {
        name: shown_setting(values[name]) if name in values else NOTHING for name in dotted if name not in IN_WORDS
    }
    in_words = [name for name in IN_WORDS if name in dotted]
    return cells | ({"arm": arm_words(values, in_words)} if in_words or not cells else {})
