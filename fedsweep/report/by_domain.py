"""The accuracies by domain as a section of table.md, an arm's row above what a paper printed for it."""

from collections.abc import Sequence

from fedsweep.report.statistics import MEAN_ACCURACY, ArmStatistics, domain_metric
from fedsweep.report.wording import NOTHING, PERCENT, markdown_table, names, settings
from fedsweep.store import SweepManifest

EXPLAINED = "Accuracy at the last round in percent, mean over n finished trials."


def by_domain(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> str:
    """Heading, table and what its numbers are; nothing where there is one domain, or no finished trial."""
    if len(manifest.domains) < 2 or not any(one.n for one in arms):
        return ""
    dotted = names(manifest, arms)
    metrics = [*map(domain_metric, manifest.domains), MEAN_ACCURACY]
    head = [*settings(arms[0], dotted), "n", *manifest.domains, "mean"]
    rows: list[list[str]] = []
    for one in arms:
        named = [*settings(one, dotted).values()]
        rows.append([*named, str(one.n), *(PERCENT.value(one.accuracies[metric]) for metric in metrics)])
        paper = _paper(manifest, one, metrics)
        if any(value != NOTHING for value in paper):
            rows.append(["*paper*", *[""] * (len(named) - 1), NOTHING, *paper])
    words = [place < len(head) - len(metrics) - 1 for place in range(len(head))]
    return "\n\n".join(["## By domain", markdown_table(head, rows, words), EXPLAINED])


def _paper(manifest: SweepManifest, one: ArmStatistics, metrics: Sequence[str]) -> list[str]:
    if manifest.reference is None:
        return []
    return [PERCENT.value(manifest.reference.value(one.arm.values, metric)) for metric in metrics]
