"""Tables, statistics and figures of a sweep, from its recorded files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsweep.common.errors import UserError
from fedsweep.report.arm_statistics import ArmStatistics, summarise
from fedsweep.report.figures import Figure, write_figures
from fedsweep.report.formats import data_frame, page
from fedsweep.report.formats.latex import latex
from fedsweep.report.formats.terminal import TerminalTable
from fedsweep.report.holm_corrected_tests import Comparison
from fedsweep.report.population_schedule import write_schedules
from fedsweep.report.table import AblationTable
from fedsweep.results import SweepManifest, TrialRecord


@dataclass(frozen=True)
class Report:
    """The result of `write_report`: arms in the order of the table, and the files."""

    arms: Sequence[ArmStatistics]
    renderable: TerminalTable
    """The table with its findings and caption, for a `rich` console of any width."""
    csv: Path
    parquet: Path
    markdown: Path
    latex: Path
    page: Path
    """The whole report as one self-contained HTML file."""
    figures: tuple[Figure, ...]
    """The figures for which there is data, in the order of the page."""
    population: Path | None = None
    """The hyperparameters of a population by round, as CSV; None without a population."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files written."""
        schedules = () if self.population is None else (self.population,)
        pictures = (path for figure in self.figures for path in (figure.png, figure.svg))
        return self.csv, self.parquet, self.markdown, self.latex, self.page, *schedules, *pictures


def write_report(manifest: SweepManifest, trials: Sequence[TrialRecord], folder: Path) -> Report:
    """Write the table in four formats, report.html and the figures into `folder`, which may not exist yet.

    The page quotes the question of `search_space.yaml` next to `folder`. population.csv is written for a population
    that has played a round. Raise UserError if no trial has recorded a round.
    """
    if not any(trial.history for trial in trials):
        raise UserError(
            f"nothing to report: no trial of sweep `{manifest.id}` of {manifest.name} has recorded a round."
        )
    table = AblationTable(manifest, summarise(manifest, trials))
    folder.mkdir(parents=True, exist_ok=True)
    schedules = folder / "population.csv"
    report = Report(
        arms=table.arms,
        renderable=TerminalTable(table),
        csv=folder / "table.csv",
        parquet=folder / "table.parquet",
        markdown=folder / "table.md",
        latex=folder / "table.tex",
        page=folder / "report.html",
        figures=write_figures(table, trials, folder),
        population=schedules if write_schedules(manifest, trials, schedules) else None,
    )
    report.csv.write_text(data_frame.csv(table), encoding="utf-8")
    report.parquet.write_bytes(data_frame.parquet(table))
    report.latex.write_text(latex(table), encoding="utf-8")
    report.markdown.write_text(table.markdown(), encoding="utf-8")
    question = page.question(folder.parent / "search_space.yaml")
    report.page.write_text(page.html(table, report.figures, trials, question), encoding="utf-8")
    return report


__all__ = ["AblationTable", "ArmStatistics", "Comparison", "Figure", "Report", "summarise", "write_report"]
