"""The report of a sweep: tables, statistics and figures, computed from the recorded results."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fedsweep.common.errors import UserError
from fedsweep.report.arm_statistics import ArmStatistics, summarise
from fedsweep.report.figures import Figure, write_figures
from fedsweep.report.formats import data_frame, page
from fedsweep.report.formats.latex import latex
from fedsweep.report.formats.terminal import TerminalTable
from fedsweep.report.holm_corrected_tests import Comparison
from fedsweep.report.population_schedule import schedules
from fedsweep.report.table import AblationTable
from fedsweep.results import SweepManifest, TrialRecord


@dataclass(frozen=True)
class Report:
    """The result of `write_report`: the table, the trials, the figures and the paths of all files."""

    table: AblationTable
    """The table, whose method `findings` returns the findings as sentences."""
    trials: Sequence[TrialRecord]
    """The trials of the sweep, in the order of the plan."""
    figures: tuple[Figure, ...]
    """The figures for which there is data, in the order of the page."""
    folder: Path
    paths: tuple[Path, ...]
    """All files written into `folder`."""

    @property
    def arms(self) -> Sequence[ArmStatistics]:
        """The arms, in the order of the table."""
        return self.table.arms

    @property
    def renderable(self) -> TerminalTable:
        """The table with its findings and its legend, for a `rich` console of any width."""
        return TerminalTable(self.table)

    @property
    def frame(self) -> pd.DataFrame:
        """The table in full precision, with one row per arm. Accuracies range from 0 to 1."""
        return data_frame.data_frame(self.table)

    @property
    def rounds(self) -> pd.DataFrame:
        """The metrics of all rounds, with one row per trial and round."""
        return data_frame.rounds(self.trials)

    def _repr_markdown_(self) -> str:
        """Return the report in Markdown, which notebooks show."""
        return self.table.markdown()


def write_report(manifest: SweepManifest, trials: Sequence[TrialRecord], folder: Path) -> Report:
    """Write the ablation table in four formats, the page report.html and the figures to `folder`.

    The folder is created if it is missing. The page report.html quotes the research question from `search_space.yaml`
    in the parent folder. If the sweep uses population-based training, the file population.csv lists the hyperparameters
    by round. If the search space declares comparisons, the file declared.csv lists their results. If the
    differences from the baseline by domain have intervals over seeds and images, the file by_domain.csv lists them.

    Raises:
        UserError: No trial has recorded a round.
    """
    if not any(trial.history for trial in trials):
        raise UserError(
            f"nothing to report: no trial of sweep `{manifest.id}` of {manifest.name} has recorded a round."
        )
    table = AblationTable(manifest, summarise(manifest, trials))
    folder.mkdir(parents=True, exist_ok=True)
    figures = write_figures(table, trials, folder)
    question = page.question(folder.parent / "search_space.yaml")
    texts = {
        "table.csv": data_frame.csv(table),
        "table.md": table.markdown(),
        "table.tex": latex(table),
        "report.html": page.html(table, figures, trials, question),
        "population.csv": schedules(manifest, trials),
        "declared.csv": data_frame.declared_csv(table),
        "by_domain.csv": data_frame.by_domain_csv(table),
    }
    contents = {name: text.encode() for name, text in texts.items() if text is not None}
    contents["table.parquet"] = data_frame.parquet(table)
    for name in texts.keys() - contents.keys():  # of an earlier report with fewer seeds or arms
        (folder / name).unlink(missing_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    pictures = (path for figure in figures for path in (figure.png, figure.svg))
    paths = *(folder / name for name in contents), *pictures
    return Report(table, trials, figures, folder, paths)


__all__ = ["AblationTable", "ArmStatistics", "Comparison", "Figure", "Report", "summarise", "write_report"]
