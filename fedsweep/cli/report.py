"""The commands `fedsweep report` and `fedsweep compare`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Argument, Option

from fedsweep.api import load_report
from fedsweep.cli import completion, json_output, json_results, json_sweeps
from fedsweep.cli.options import DEFAULT_STORE, ColumnsOption, StoreOption, SweepOption, check_format, listed
from fedsweep.cli.output import progress_console, relative, result_console
from fedsweep.common.errors import UserError
from fedsweep.common.progress import loading
from fedsweep.results import Store
from fedsweep.results.steering import is_running

if TYPE_CHECKING:
    from fedsweep.report.compare_sweeps import Side

FILES = {
    "markdown": "table.md",
    "csv": "table.csv",
    "parquet": "table.parquet",
    "latex": "table.tex",
    "html": "report.html",
}
"""The file of each format in the report's folder."""


def report(
    space: Annotated[
        str,
        Argument(
            metavar="SEARCH_SPACE[@SWEEP]",
            help="search space, whose newest sweep is meant, or a sweep, e.g. `ablations/lora_rank`",
            autocompletion=completion.sweeps,
        ),
    ],
    sweep: SweepOption = None,
    format: Annotated[
        str,
        Option(
            "--format",
            help=f"format to print: `terminal`, `json`, {', '.join(f'`{one}`' for one in FILES)}",
            autocompletion=completion.choices("terminal", "json", *FILES),
        ),
    ] = "terminal",
    columns: ColumnsOption = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Print the report of a sweep, and rewrite its table, figures and HTML page from the recorded results.

    Example: `fedsweep report ablations/lora_rank --columns worst_domain,megabytes_up,rounds_to=0.7 --format latex`
    """
    check_format(format, ("terminal", "json", *FILES))
    if format == "parquet" and sys.stdout.isatty():
        raise UserError(
            "`--format parquet` is binary; redirect it to a file, as in `... --format parquet > table.parquet`."
        )
    asked = None if columns is None else listed(columns)
    made = load_report(space, sweep, store=store, columns=asked, console=progress_console())
    if format == "json":
        found, manifest = Store.at(store).find(space, sweep), made.table.manifest
        status = json_results.status(manifest, made.trials, is_running(found))
        described = json_sweeps.of_sweep(manifest, made.folder.parent, made.trials, made, status)
        json_output.document("report", sweep=described)
        return
    if format != "terminal":
        sys.stdout.buffer.write((made.folder / FILES[format]).read_bytes())
        return
    console = result_console()
    console.print(made.renderable)
    console.print(f"Written to {relative(made.folder)}.")


def compare(
    first: Annotated[
        str,
        Argument(
            metavar="A",
            help="a sweep as `SPACE[@SWEEP]`, or an arm as `SPACE[@SWEEP]:ARM`, e.g. `ablations/lora_rank:lora.rank=4`",
            autocompletion=completion.sweeps,
        ),
    ],
    second: Annotated[
        str,
        Argument(
            metavar="B",
            help="the sweep or arm to compare with A, in the same form as A",
            autocompletion=completion.sweeps,
        ),
    ],
    format: Annotated[
        str,
        Option(
            "--format",
            help="format to print: `terminal`, `json`, `markdown`, `csv`",
            autocompletion=completion.choices("terminal", "json", "markdown", "csv"),
        ),
    ] = "terminal",
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Compare two arms, or two sweeps arm by arm. Only seeds that both arms have finished are used.

    Example: `fedsweep compare ablations/lora_rank:lora.rank=4 ablations/lora_rank:lora.rank=16`
    """
    with loading(progress_console(), "the statistics", "fedsweep.report"):
        from fedsweep.report.compare_sweeps import LEFT_OUT_FIRST, Pairing
    from fedsweep.report.text_tables import without_html

    check_format(format, ("terminal", "json", "markdown", "csv"))
    home = Store.at(store)
    (one, arm), (other, other_arm) = _side(home, first), _side(home, second)
    if (arm is None) != (other_arm is None):
        raise UserError(f"`{first}` and `{second}` must both name an arm, or both name a sweep.")
    found = Pairing.of(one, other, by_arm=arm is None)
    if format == "json":
        json_output.document("compare", comparisons=json_results.comparisons(found), findings=found.findings())
    elif format == "csv":
        sys.stdout.write(found.csv())
    elif format == "markdown":
        bullets = "\n".join(f"- {sentence}" for sentence in found.findings())
        print(without_html(f"{found.section().markdown()}\n\n{bullets}"))
    else:
        console, section = result_console(), found.section()
        table, hidden = section.terminal(console.width, LEFT_OUT_FIRST)
        console.print(table, "", *map(Text, found.findings()), "", sep="\n")
        more = f" Columns that do not fit: {', '.join(hidden)} (see `--format markdown`)." if hidden else ""
        console.print(Text(section.explained + more, style="dim"))


def _side(home: Store, given: str) -> tuple[Side, str | None]:
    """Load the sweep or the arm that `given` names in the form `SPACE[@SWEEP][:ARM]`.

    Returns:
        The statistics of the arm, and its name. If `given` does not name an arm, these are the statistics of all arms
        of the sweep, and None.
    """
    from fedsweep.report.compare_sweeps import Side

    space, colon, name = given.partition(":")
    arm = name if colon else None
    found = home.find(space)
    trials = found.trials()
    if not any(trial.history for trial in trials):
        raise UserError(f"`{given}`: no trial of sweep `{found.manifest().id}` of {space} has recorded a round.")
    return Side.of(given, found.manifest(), trials, arm), arm
