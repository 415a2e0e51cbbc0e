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
    str,
    typer.Option(
        "--store",
        envvar="FEDSWEEP_STORE",
        metavar="FOLDER|URI",
        help="folder for results and MLflow's database, or a URI such as `s3://BUCKET/RUNS` for results",
    ),
]
AddressOption = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="FEDSWEEP_ADDRESS",
        help="where trials run: `local`, `auto` for the Ray cluster of this machine or RAY_ADDRESS, or HOST:PORT",
    ),
]
ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="NAME,...",
        help="what the table shows beside the objective: `worst_domain`, `megabytes_up`, `rounds_to=0.7`, any metric",
    ),
]
DEFAULT_STORE = "mlruns"
MlflowOption = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        envvar="FEDSWEEP_MLFLOW",
        metavar="ADDRESS",
        help="http(s) address of an MLflow server to record on, or `store`: the store's own database",
    ),
]


def listed(given: str) -> list[str]:
    """What stands between commas.

    >>> listed("worst_domain, loss/train")
    ['worst_domain', 'loss/train']
    """
    return [name.strip() for name in given.split(",") if name.strip()]


def page_command(store: str, server: str | None = None) -> str:
    """The command that opens MLflow's page over a store or on a server, as it must be typed at this prompt."""
    usual = os.environ.get("FEDSWEEP_STORE", DEFAULT_STORE)
    command = "fedsweep ui" if Path(store) == Path(usual) else f"fedsweep ui --store {shlex.quote(store)}"
    named = os.environ.get("FEDSWEEP_MLFLOW")
    if server and not named:
        return f"{command} --mlflow {shlex.quote(server)}"
    return f"{command} --mlflow store" if named and not server else command
