"""The verbs on data sets: `fedsweep data prepare | list | show | partition`."""

from __future__ import annotations

import typer

app = typer.Typer(name="data", no_args_is_help=True, help="Prepare data sets and look at them.")


@app.command("list")
def list_stores() -> None:
    """Name the data sets that are prepared, and the layouts that `prepare` reads.

    Example: `fedsweep data list`
    """
