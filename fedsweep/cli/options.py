"""Arguments and options that several verbs share."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="dotted changes, e.g. `lora.rank=4`")
]
StoreOption = Annotated[
    Path, typer.Option("--store", envvar="FEDSWEEP_STORE", help="folder for results and MLflow's database")
]
DEFAULT_STORE = Path("mlruns")


def page_command(store: Path) -> str:
    """The command that opens MLflow's page over a store, as it must be typed at this prompt."""
    usual = Path(os.environ.get("FEDSWEEP_STORE", DEFAULT_STORE))
    return "fedsweep ui" if store == usual else f"fedsweep ui --store {shlex.quote(str(store))}"
