"""The accuracies by domain as a section, an arm's row above what a paper printed for it."""

from collections.abc import Sequence

from fedsweep.report.section import Section
from fedsweep.report.statistics import MEAN_ACCURACY, MEAN_OUT_OF_DOMAIN, ArmStatistics
from fedsweep.report.wording import IN_DOMAIN, NOTHING, OUT_OF_DOMAIN, PERCENT, names, settings
from fedsweep.results import SweepManifest

EXPLAINED = "Accuracy at the last round in percent, mean over n finished trials."
MARK = "*"
MARKED = f"With {MARK}: out of domain, no client of that arm has images of the domain."
PAPER = "paper"
"""What a paper's row is called, in the place of an arm."""


def by_domain(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> Section | None:
    """The section; None where there is one domain, or no finished trial."""
    arms = [one for one in arms if one.n]
    if len(manifest.domains) < 2 or not arms:
        return None
    dotted, held_out = names(manifest, arms), any(one.held_out for one in arms)
    apart = {f"mean {IN_DOMAIN}": MEAN_ACCURACY, f"mean {OUT_OF_DOMAIN}": MEAN_OUT_OF_DOMAIN}
    means = apart if held_out else {"mean": MEAN_ACCURACY}
    head = [*settings(arms[0], dotted), "n", *manifest.domains, *means]
    rows: list[list[str]] = []
    papers: list[bool] = []
    for one in arms:
        named = [*settings(one, dotted).values()]
        metrics = [*map(one.metric_on, manifest.domains), *means.values()]
        rows.append([*named, str(one.n), *(_cell(one, metric, one.accuracies.get(metric)) for metric in metrics)])
        papers.append(False)
        paper = [_cell(one, metric, _printed(manifest, one, metric)) for metric in metrics]
        if any(value != NOTHING for value in paper):
            rows.append([PAPER, *[""] * (len(named) - 1), NOTHING, *paper])
            papers.append(True)
    explained = " ".join([EXPLAINED, *([MARKED] if held_out else [])])
    return Section("By domain", head, rows, len(settings(arms[0], dotted)), explained, papers)


def _printed(manifest: SweepManifest, one: ArmStatistics, metric: str) -> float | None:
    """A paper's value."""
    return manifest.reference.value(one.arm.values, metric) if manifest.reference else None


def _cell(one: ArmStatistics, metric: str, value: float | None) -> str:
    """A value in percent, marked where it is of a domain that the arm's clients do not have."""
    marked = value is not None and metric in map(one.metric_on, one.held_out)
    return PERCENT.value(value) + MARK * marked
