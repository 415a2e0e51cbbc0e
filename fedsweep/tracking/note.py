"""Descriptions on MLflow's page: what a sweep asks and found, and the commands that go on with it."""

from __future__ import annotations

from pathlib import Path

from fedsweep.common.paths import summary
from fedsweep.results import SweepManifest

NOTE = "mlflow.note.content"
"""MLflow's tag for the description of a run or an experiment, in Markdown."""
LONGEST = 7800
"""Characters; MLflow takes 8,000 of a run's tag."""
REST = "\n\n(More than fits here: the whole table is `report/table.md` among the artifacts.)"


def question(folder: Path) -> str:
    """What a sweep's search space says of itself in its first comment; empty where it says nothing."""
    path = folder / "search_space.yaml"
    return summary(path) if path.exists() else ""


def sweep_note(manifest: SweepManifest, asked: str, report: Path | None = None) -> str:
    """The description of a parent run: the question, the table with what was found, the commands."""
    table = report / "table.md" if report is not None else None
    if table is not None and table.exists():
        _, _, found = table.read_text(encoding="utf-8").partition("\n")  # its title is the run's name
        body = found.strip()
    else:
        body = f"No report yet. {len(manifest.seeds)} seeds, {manifest.rounds} rounds, around `{manifest.experiment}`."
    wanted = f"{manifest.name} --sweep {manifest.id}"
    end = "\n".join(
        [
            "```sh",
            f"fedsweep report {wanted}",
            f"fedsweep tune {manifest.name} --resume --sweep {manifest.id}",
            f"fedsweep ui {wanted}",
            "```",
        ]
    )
    head = f"{asked}\n\n" if asked else ""
    return head + shortened(body, LONGEST - len(head) - len(end) - 2) + "\n\n" + end


def shortened(text: str, longest: int) -> str:
    """Whole lines of a Markdown text, and a sentence where some are left out.

    >>> shortened("a table", 100)
    'a table'
    """
    if len(text) <= longest:
        return text
    kept = text[: longest - len(REST)]
    return kept[: kept.rfind("\n")].rstrip() + REST if "\n" in kept else kept + REST
