"""Tables, statistics and figures of a sweep, from the files that it left behind."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsweep.errors import UserError
from fedsweep.report import activation, embeddings, figures, frame, front, population
from fedsweep.report.comparison import Comparison
from fedsweep.report.latex import latex
from fedsweep.report.statistics import ArmStatistics, summarise
from fedsweep.report.table import AblationTable
from fedsweep.report.terminal import TerminalTable
from fedsweep.store import SweepManifest, TrialRecord


@dataclass(frozen=True)
class Report:
    """What `write_report` made: arms in the order of the table, and the files."""

    arms: Sequence[ArmStatistics]
    renderable: TerminalTable
    """The table, what was found and how to read it, for a `rich` console of any width."""
    csv: Path
    parquet: Path
    markdown: Path
    latex: Path
    curves: Path
    domains: Path
    tsne: Path | None
    """None where no finished trial left a t-SNE."""
    activation: Path | None
    """None where no finished trial recorded active blocks."""
    front: Path | None
    """None where there is one objective, or no finished trial."""
    population: tuple[Path, ...] = ()
    """The hyperparameters of a population by round, as a table and a figure; none where there is no population."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files written."""
        always = self.csv, self.parquet, self.markdown, self.latex, self.curves, self.domains
        pictures = (path for path in (self.tsne, self.activation, self.front) if path is not None)
        return *always, *pictures, *self.population


def write_report(manifest: SweepManifest, trials: Sequence[TrialRecord], folder: Path) -> Report:
    """Write table.csv, .parquet, .md and .tex, curves.png and domains.png into the folder; make it where it is missing.

    tsne.png comes with them where trials left a t-SNE, activation.png where they recorded active blocks, front.png
    where there are two objectives, population.csv and population.png where trials go on from one another.

    Raises:
        UserError: no trial has recorded a round.
    """
    if not any(trial.history for trial in trials):
        raise UserError(
            f"nothing to report: no trial of sweep `{manifest.id}` of {manifest.name} has recorded a round."
        )
    table = AblationTable(manifest, summarise(manifest, trials))
    folder.mkdir(parents=True, exist_ok=True)
    tsne, active, both = folder / "tsne.png", folder / "activation.png", folder / "front.png"
    schedules = folder / "population.csv", folder / "population.png"
    report = Report(
        arms=table.arms,
        renderable=TerminalTable(table),
        csv=folder / "table.csv",
        parquet=folder / "table.parquet",
        markdown=folder / "table.md",
        latex=folder / "table.tex",
        curves=folder / "curves.png",
        domains=folder / "domains.png",
        tsne=tsne if embeddings.panels(manifest, table.arms, tsne) else None,
        activation=active if activation.panels(manifest, table.arms, active) else None,
        front=both if front.draw(manifest, table.arms, both) else None,
        population=schedules if population.write_population(manifest, trials, *schedules) else (),
    )
    report.csv.write_text(frame.csv(table), encoding="utf-8")
    report.parquet.write_bytes(frame.parquet(table))
    report.latex.write_text(latex(table), encoding="utf-8")
    report.markdown.write_text(table.markdown(), encoding="utf-8")
    figures.curves(manifest, table.arms, report.curves)
    figures.domains(manifest, table.arms, report.domains)
    return report


__all__ = ["AblationTable", "ArmStatistics", "Comparison", "Report", "summarise", "write_report"]
