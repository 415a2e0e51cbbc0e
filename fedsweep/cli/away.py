"""`fedsweep tune --address ray://HOST:PORT`: the same command, run on the cluster's head."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from fedsweep.errors import UserError

if TYPE_CHECKING:
    from fedsweep.tracking import Destination

ELSEWHERE = ("address", "store")


def tune_away(context: typer.Context, address: str, store: str, destination: Destination) -> None:
    """Run this command on the head of the cluster that Ray Client reaches at `address`, and end with its exit code.

    Raises:
        UserError: a password would travel, the cluster does not let us in, or its head is not as this machine.
    """
    from fedsweep.sweep.ray_client import run_on_head

    if destination.credentials:
        raise UserError(
            "a password in `--mlflow` is not sent through Ray Client; `~/.mlflow/credentials` on the cluster's head, "
            "or MLFLOW_TRACKING_PASSWORD where its Ray is started, can hold it."
        )
    if code := run_on_head(address, words(context), store):
        sys.exit(code)


def words(context: typer.Context) -> list[str]:
    """What must follow `fedsweep` to ask for the same again, but for where it runs and records.

    Options that the environment set are given too: the other machine's environment is another one.
    """
    options: list[str] = []
    arguments: list[str] = []
    for parameter in context.command.params:
        given = context.params.get(parameter.name or "")
        if given is None or given is False or parameter.name in ELSEWHERE:
            continue
        if parameter.param_type_name == "argument":
            arguments += given if isinstance(given, list | tuple) else [given]
        else:
            options += [parameter.opts[0]] if given is True else [parameter.opts[0], str(given)]
    return [context.info_name or "", *options, "--", *arguments]
