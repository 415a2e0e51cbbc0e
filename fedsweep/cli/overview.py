"""The output of `fedsweep --help`, which fits into a terminal of 80 columns and 24 rows."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from typer.core import TyperGroup

from fedsweep.cli.output import result_console

ABOUT = (
    "Ablations and tuning for federated fine-tuning of foundation models. Start with\n"
    "`fedsweep tune ablations/lora_rank`, or with `fedsweep init` in an empty folder."
)
SHORT = {
    "run": "Run one federated experiment.",
    "tune": "Run all trials of a search space, and print the results.",
    "confirm": "Run the best arms of a sweep again with fresh seeds.",
    "report": "Print the report of a sweep.",
    "compare": "Compare two arms, or two sweeps arm by arm.",
    "ui": "Show the recorded metrics in MLflow.",
    "status, attach": "Watch a running sweep from another terminal.",
    "extend, drop, stop": "Change or stop a running sweep.",
    "list": "List experiments, search spaces, methods and sweeps.",
    "init": "Write the files of a new project.",
    "show": "Print the values of an experiment, or the arms of a space.",
    "pretrain": "Train a backbone from scratch.",
    "export": "Export a trained model, to be used without fedsweep.",
    "predict": "Classify images with an exported model.",
    "doctor": "Check that this machine has what fedsweep needs.",
    "data": "Prepare and inspect data sets.",
}
"""Descriptions of all commands in at most 60 characters. Commands with a common purpose share one description."""


class Overview(TyperGroup):
    """The group of all commands, whose help has one line for each command."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        table = Table.grid(padding=(0, 2))
        for names, purpose in SHORT.items():
            table.add_row(names, purpose)
        options = ", ".join(max(option.opts, key=len) for option in self.get_params(ctx))
        console = result_console()
        console.print("Usage: fedsweep COMMAND ...  (`fedsweep COMMAND --help` lists its options)", "", sep="\n")
        console.print(ABOUT, "", table, "", f"Options: {options}", sep="\n")
