"""Arguments and options that several verbs share."""

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
