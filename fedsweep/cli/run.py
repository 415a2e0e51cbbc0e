"""The commands `fedsweep run`, `ui` and `show`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

from rich.syntax import Syntax
from typer import Argument, Option

from fedsweep.cli import completion, json_output, json_sweeps, options, output
from fedsweep.cli.json_output import FormatOption
from fedsweep.cli.options import (
    DEFAULT_STORE,
    DeviceOption,
    FileArgument,
    MlflowOption,
    Overrides,
    StoreOption,
    SweepOption,
    VerifyOption,
)
from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.common.paths import find, find_either
from fedsweep.common.places import placed
from fedsweep.common.progress import announced_stop
from fedsweep.common.signals import SignalInterrupt
from fedsweep.common.yaml_values import parse_overrides
from fedsweep.results import Store


def run(
    experiment: Annotated[
        str,
        Argument(
            metavar="EXPERIMENT",
            help="experiment to run, e.g. `fedra_digits`",
            autocompletion=completion.files("experiments"),
        ),
    ],
    overrides: Overrides = None,
    as_json: Annotated[bool, Option("--json", help="short for `--format json`")] = False,
    device: DeviceOption = "cpu",
    system_metrics: Annotated[
        bool, Option("--system-metrics", help="record the CPU, memory and GPU use of each round in MLflow")
    ] = False,
    verify: VerifyOption = False,
    store: StoreOption = DEFAULT_STORE,
    mlflow: MlflowOption = None,
    format: Annotated[
        str,
        Option(
            "--format",
            help="format to print: `terminal`, or `json` for one line with the exact metrics of each round",
            autocompletion=completion.choices("terminal", "json"),
        ),
    ] = "terminal",
) -> None:
    """Run one federated experiment and print the accuracy after each evaluated round.

    Example: `fedsweep run fedra_digits seed=1 method=all_small`
    """
    options.check_format(format, ("terminal", "json"))
    changes = parse_overrides(overrides or [])
    options.check_experiment(experiment, changes)  # report a mistake before importing torch, which is slow
    processor = options.checked_device(device)

    with output.loading_torch("fedsweep.federation.build_and_run"):
        from fedsweep.api import prepare_run
        from fedsweep.cli.round_table import RoundBar, RoundTable

    config = options.read_experiment(experiment, changes)
    checking = output.awaiting("Checking the data, the weights and MLflow")
    with checking, placed(find("experiments", experiment), changes):
        prepared = prepare_run(experiment, config, store=store, mlflow=mlflow, verify=verify)
    if sentence := config.untrained_backbone():
        output.progress_console().print(sentence, style="yellow")
    where = prepared.store.where
    with RoundTable(config, as_json or format == "json") as table, announced_stop(lambda: table.stop(where)):
        result = prepared.run(processor, system_metrics, table.add, RoundBar(table.progress))
    page, trial = output.page_command(store, prepared.destination.server), result.trial
    output.show_recorded(table.console, config, trial.folder, page)
    output.show_undelivered(table.console, result.recorder, page)
    if output.show_unsent(table.console, trial.remote, trial.folder):
        raise SystemExit(1)


def ui(
    space: Annotated[
        str | None,
        Argument(
            metavar="[SEARCH_SPACE]",
            help="search space to link to (its newest sweep); by default, the newest sweep of any search space",
            autocompletion=completion.sweeps,
        ),
    ] = None,
    sweep: SweepOption = None,
    port: Annotated[int, Option(min=1, max=65535, help="port of the local web page")] = 5000,
    host: Annotated[
        str, Option(help="address to listen on; 0.0.0.0 makes the page reachable from the network")
    ] = "127.0.0.1",
    open_browser: Annotated[bool, Option("--open", help="open the first link in a browser")] = False,
    deliver: Annotated[bool, Option("--deliver", help="first copy the results that are missing in MLflow")] = False,
    store: StoreOption = DEFAULT_STORE,
    mlflow: MlflowOption = None,
) -> None:
    """Serve MLflow's web page on this machine, or print links to your results on an MLflow server.

    Example: `fedsweep ui ablations/lora_rank --port 5001`
    """
    from fedsweep.tracking import Destination, check_server
    from fedsweep.tracking.ui import check_free, page_links, page_url

    if sweep is not None and space is None:
        raise UserError("`--sweep` needs a search space, as in `fedsweep ui SEARCH_SPACE --sweep ID`.")
    home = Store.at(store)
    shown = home.find(space, sweep) if space is not None else None
    destination = Destination.of(home.root, mlflow)
    check_server(destination)
    loopback = bool(destination.server) or check_free(host, port)
    if deliver or (home.uri and not destination.server):  # the database of a remote store is local
        output.show_delivery(output.progress_console(), home, destination)
    if not destination.exists():
        if home.sweeps() or home.runs():
            raise UserError(
                f"MLflow has no database in {home.where} yet. A sweep creates it when its first trial starts, and "
                "`fedsweep ui --deliver` creates it from finished sweeps and runs."
            )
        start = "start with `fedsweep tune ablations/lora_rank`"
        raise UserError(f"nothing is recorded in {home.where} yet; {start}.")
    url = destination.server or page_url(host, port)
    print(f"MLflow on {url}{'' if destination.server else ' (press Ctrl-C to stop)'}", flush=True)
    with output.awaiting("Loading MLflow", always="mlflow" not in sys.modules):
        links = page_links(home, url, destination, shown)
    for label, link in links.items():
        print(f"  {label}: {link}")
    sys.stdout.flush()
    first = next(iter(links.values()), url) if open_browser else None
    if not destination.server:
        _serve(home.root, host, port, loopback, first)
    elif first:
        _open(first)


def _serve(root: Path, host: str, port: int, loopback: bool, opened: str | None) -> NoReturn:
    """Run MLflow's server until it ends, or until Ctrl-C, SIGTERM or SIGHUP ends this process.

    If `opened` is given, open that address in a browser once the server answers.
    """
    from fedsweep.tracking.serving import serving
    from fedsweep.tracking.ui import answers, server_command

    if not loopback:
        print(
            f"fedsweep: this page has no password: anyone who can reach port {port} of this machine can read, change "
            "and delete the recorded results.",
            file=sys.stderr,
        )
    command, environment = server_command(root, port, host)
    try:
        with serving(command, environment) as server:
            if opened and answers(server, host, port):
                _open(opened)
            raise SystemExit(server.wait())
    except SignalInterrupt:
        raise
    except KeyboardInterrupt:
        raise SystemExit(0) from None


def _open(address: str) -> None:
    import webbrowser

    if not webbrowser.open(address):
        print("fedsweep: no browser was found; open the first link yourself.", file=sys.stderr)


def show(
    name: FileArgument,
    overrides: Overrides = None,
    format: FormatOption = "terminal",
) -> None:
    """Print all hyperparameters of an experiment, or the arms and the number of trials of a search space.

    Example: `fedsweep show fedra_digits lora.rank=4`
    """
    options.check_format(format, ("terminal", "json"))
    changes = parse_overrides(overrides or [])
    kind, _ = find_either(name)
    if kind == "search_spaces":
        request = options.read_space(name, changes)

        from fedsweep.cli.counts import show_counts
        from fedsweep.sweep.plan.plan import Plan

        plan = Plan.of(request)
        if format == "json":
            json_output.document("show", plan=json_sweeps.of_plan(plan))
            return
        show_counts(plan) if plan.request.counted else output.show_plan(plan)
        return
    values = flat(options.read_experiment(name, changes))
    if format == "json":
        json_output.document("show", experiment=name, values=values)
        return
    lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in values.items())
    output.result_console().print(Syntax(lines, "yaml", background_color="default"))
