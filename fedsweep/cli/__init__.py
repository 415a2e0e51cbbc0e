"""The command line of fedsweep. Slow packages are imported inside functions to keep `--help` fast."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from itertools import pairwise
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.main import get_command

from fedsweep.cli import data, json_output, steer, watch
from fedsweep.cli import run as verbs
from fedsweep.cli.completion import in_whole_words
from fedsweep.cli.confirm import confirm
from fedsweep.cli.doctor import doctor
from fedsweep.cli.export import export, predict
from fedsweep.cli.init import init
from fedsweep.cli.listing import list_files
from fedsweep.cli.overview import Overview
from fedsweep.cli.panels import InPanels
from fedsweep.cli.pretrain import pretrain
from fedsweep.cli.report import compare, report
from fedsweep.cli.tune import tune
from fedsweep.common.errors import UserError, disk_is_full, one_line
from fedsweep.common.paths import check_working_directory
from fedsweep.common.signals import ending_signals_interrupt
from fedsweep.results.remote.objects import UnreachableError

INTERRUPTED = 130
"""Exit code after Ctrl-C, which typer also gives to a command that another signal interrupts."""

app = typer.Typer(
    cls=Overview,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Hyperparameter tuning and ablations for federated fine-tuning of foundation models.\n\n"
    "Start with `fedsweep tune ablations/lora_rank`, which trains about twenty federated models and prints a table of "
    "results. Then `fedsweep ui` shows all recorded metrics in MLflow.",
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"fedsweep {metadata.version('fedsweep')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version of fedsweep")
    ] = False,
) -> None:
    pass


app.command()(verbs.run)
app.command(cls=InPanels)(tune)
for verb in (confirm, report, compare, verbs.ui):
    app.command()(verb)
app.command("list")(list_files)
app.command()(init)
for other in (verbs.show, pretrain, export, predict):
    app.command()(other)
app.add_typer(data.app)
for running in (watch.status, watch.attach, steer.extend, steer.drop, steer.stop):
    app.command()(running)
app.command()(doctor)

# The base class of typer's errors on arguments, which typer does not export.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])
_command = get_command(app)


def main() -> None:
    """Run the command line. A command that SIGTERM or SIGHUP ends has the exit code 128 plus the signal's number."""
    with ending_signals_interrupt() as received:
        try:
            _main()
        except SystemExit as end:
            raise SystemExit(received.status if end.code == INTERRUPTED else end.code) from None


def _main() -> None:
    """Run the command line.

    If a command raises UserError, print the error message to stderr and exit with code 2.
    """
    given = sys.argv[1:] or ["--help"]
    try:
        if not {"--help", "-h", "--version"} & {*given}:
            check_working_directory()
        code = in_whole_words(lambda: _command(given, prog_name="fedsweep", standalone_mode=False))
    except UserError as error:
        _end(str(error), 2)
    except _UsageError as error:
        words = " ".join(error.format_message().split()).rstrip(".").replace(". Did you mean", "; did you mean")
        words = words.replace(": Input should be", ": it must be")
        if (given_value := _given(error.param if isinstance(error, typer.BadParameter) else None)) is not None:
            words += f", but it is `{given_value}`" * (": it must be" in words)
        where = error.ctx.command_path if error.ctx else "fedsweep"
        hint = "" if words.endswith("?") else f"; see `{where} --help`."
        _end(f"{words[0].lower()}{words[1:]}{hint}", 2)
    except (KeyboardInterrupt, typer.Abort):
        if json_output.asked(sys.argv):
            json_output.error("the command was interrupted.", INTERRUPTED, sys.argv[1:])
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader of the pipe has ended, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except UnreachableError as error:
        _end(f"the remote results folder does not answer: {error}.", 1)
    except OSError as error:
        if not disk_is_full(error):
            raise
        _end(f"the disk is full: {one_line(error)}.", 1)
    if code:
        raise SystemExit(code)


def _given(parameter: Any) -> str | None:
    """Return the value that the command line gives to an option, or None if it gives none."""
    for option in parameter.opts if parameter is not None else ():
        for one, following in pairwise([*sys.argv, ""]):
            if one == option:
                return following
            if one.startswith(f"{option}="):
                return one.partition("=")[2]
    return None


def _end(sentence: str, code: int) -> NoReturn:
    print(f"fedsweep: {sentence}", file=sys.stderr)
    if json_output.asked(sys.argv):
        json_output.error(sentence, code, sys.argv[1:])
    raise SystemExit(code) from None
