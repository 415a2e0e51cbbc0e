"""The command `fedsweep confirm`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from fedsweep.cli import completion, json_sweeps, output
from fedsweep.cli.json_output import FormatOption
from fedsweep.cli.options import DEFAULT_STORE, MlflowOption, StoreOption, check_format
from fedsweep.cli.tune import run_space


def confirm(
    sweep: Annotated[
        str,
        Argument(
            metavar="SEARCH_SPACE[@SWEEP]",
            help="search space whose newest sweep is confirmed, or a sweep",
            autocompletion=completion.sweeps,
        ),
    ],
    top: Annotated[int, Option(min=1, help="number of best arms to confirm")] = 1,
    seeds: Annotated[int, Option(min=2, help="number of seeds, none of which the sweep has used")] = 5,
    dry_run: Annotated[
        bool, Option("--dry-run", help="only print the arms, the number of trials and an estimate of the time")
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    mlflow: MlflowOption = None,
    format: FormatOption = "terminal",
) -> None:
    """Run the best arms of a sweep and the baseline with fresh seeds, and compare them on the test images.

    The baseline is that of the sweep or, if it has none, the experiment with its own values. The command writes a
    search space into `search_spaces/confirm/` and runs it like `fedsweep tune`, so you can resume or extend it. Its
    name contains the sweep and the two numbers.

    Example: `fedsweep confirm tuning/fedra --top 2`
    """
    check_format(format, ("terminal", "json"))

    from fedsweep.results import Store
    from fedsweep.sweep import TuneOptions
    from fedsweep.sweep.running.confirmation import write_confirmation

    console = output.progress_console()
    written = write_confirmation(Store.at(store).find(sweep), top, seeds, console)
    options = TuneOptions(written.name, store=store, mlflow=mlflow)
    try:
        if not dry_run:
            console.print(f"Search space: {output.relative(written.path)}", soft_wrap=True)
        if format == "json":
            json_sweeps.run_space("confirm", options, dry_run, search_space=None if dry_run else written.path)
        else:
            run_space(options, dry_run)
    finally:
        if dry_run:  # which leaves no file behind
            written.remove()
