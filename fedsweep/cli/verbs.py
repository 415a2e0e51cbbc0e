"""The verbs on experiments and sweeps. Nothing heavy is imported at the top: mistakes are told before Ray starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsweep.cli.options import (
    DEFAULT_STORE,
    AddressOption,
    MlflowOption,
    Overrides,
    StoreOption,
    page_command,
)

if TYPE_CHECKING:
    from fedsweep.sweep.plan import Plan


def run(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="an experiment, e.g. `fedra_digits`")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="print each round's exact metrics as a line of JSON")] = False,
    device: Annotated[str, typer.Option(help="`cpu` or `cuda`")] = "cpu",
    store: StoreOption = DEFAULT_STORE,
    mlflow: MlflowOption = None,
) -> None:
    """Run one federated experiment and show each round.

    Example: `fedsweep run fedra_digits seed=1 method=all_small`
    """
    from fedsweep.errors import UserError
    from fedsweep.paths import find
    from fedsweep.plain import parse_overrides, read_yaml
    from fedsweep.store import Store

    changes = parse_overrides(overrides or [])
    path = find("experiments", experiment)
    if device not in ("cpu", "cuda"):
        raise UserError(f"`--device` must be cpu or cuda, but it is `{device}`.")

    import torch

    from fedsweep.errors import DivergenceError
    from fedsweep.experiment import RunConfig
    from fedsweep.play import check_content
    from fedsweep.recorded_run import record_run
    from fedsweep.terminal import RoundTable, show_recorded, show_undelivered, show_unsent
    from fedsweep.tracking import Destination, check_server, check_writable

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("`--device` is cuda, but torch sees no GPU.")
    config = RunConfig.of(read_yaml(path), f"experiment {experiment}").override(changes, f"experiment {experiment}")
    check_content(config)
    home = Store.at(store)
    check_writable(home.root)
    home.check_writable()
    destination = Destination.of(home.root, mlflow)
    check_server(destination, experiment)
    torch.set_num_threads(1)  # the sum of a product depends on the number of threads; one is what a trial has
    clients, data = config.partition.test_share > 0, config.data
    with RoundTable(config.federation.rounds, data.training_domains, as_json, clients, data.held_out_domains) as table:
        try:
            trial, recorder = record_run(experiment, config, home, device, table.add, destination)  # type: ignore[arg-type]
        except DivergenceError as error:
            raise UserError(f"{error}.") from None
    page = page_command(store, destination.server)
    show_recorded(table.console, config, trial.folder, page)
    show_undelivered(table.console, recorder, page)
    if show_unsent(table.console, trial.remote, trial.folder):
        raise SystemExit(1)


def tune(
    context: typer.Context,
    space: Annotated[str, typer.Argument(metavar="SEARCH_SPACE", help="e.g. `ablations/lora_rank`")],
    overrides: Overrides = None,
    experiment: Annotated[str | None, typer.Option(help="start from this experiment instead of the file's")] = None,
    seeds: Annotated[str | None, typer.Option(help="seeds instead of the file's, e.g. `0,1,2,3,4`")] = None,
    samples: Annotated[int | None, typer.Option(help="configurations that a sampled search tries")] = None,
    warm_start: Annotated[
        str | None,
        typer.Option(metavar="SPACE[@SWEEP]", help="an earlier sweep, by its id or the newest, that TPE learns from"),
    ] = None,
    subsets: Annotated[
        str | None, typer.Option(help="`one` component of `ablate` left out, or `all` sets of them")
    ] = None,
    design: Annotated[
        str | None, typer.Option(help="`full` grid, or `one_factor`: the baseline and each other value alone")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="`none`, `asha`, `median`, `arms` or `pbt` instead of the file's")
    ] = None,
    cpus_per_trial: Annotated[float | None, typer.Option(help="cores of a trial")] = None,
    gpus_per_trial: Annotated[
        str | None, typer.Option(help="GPUs of a trial; 0.5 shares one between two, `auto` measures how many can")
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="trials side by side, at most; on a cluster that adds nodes, as many")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print arms, trials, rounds and an estimate only")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="run also what an earlier sweep has already run")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the newest sweep of this space")] = False,
    sweep: Annotated[str | None, typer.Option("--sweep", help="with --resume: the sweep's id")] = None,
    address: AddressOption = "local",
    store: StoreOption = DEFAULT_STORE,
    mlflow: MlflowOption = None,
) -> None:
    """Run a search space: every trial on Ray Tune, all rounds in MLflow, a table at the end.

    Example: `fedsweep tune ablations/lora_rank federation.rounds=5 --seeds 0,1`
    """
    from fedsweep.errors import UserError
    from fedsweep.paths import find
    from fedsweep.plain import parse_overrides
    from fedsweep.store import Store
    from fedsweep.tracking import Destination, check_server

    if sweep is not None and not resume:
        raise UserError("`--sweep` names a sweep to go on with and needs --resume.")
    if fresh and resume:
        raise UserError("`--fresh` is of a new sweep and cannot be given with --resume.")
    from fedsweep.sweep.joining import check_address, client_address

    check_address(address)
    changes = parse_overrides(overrides or [])
    space_changes = _space_changes(
        experiment, seeds, samples, subsets, design, scheduler, cpus_per_trial, gpus_per_trial
    )
    if warm_start is not None:
        space_changes["search.warm_start"] = warm_start
    if through_client := client_address(address):
        from fedsweep.cli.away import tune_away

        find("search_spaces", space)
        tune_away(context, through_client, store, Destination.of(Path(store), mlflow))
        return
    home = Store.at(store)
    destination = Destination.of(home.root, mlflow)
    if resume:  # with what the sweep was started with
        find("search_spaces", space)
        going_on = home.find(space, sweep)
        destination = Destination.of_sweep(home.root, going_on.folder, mlflow)
        started = going_on.manifest()
        changes = {**started.overrides, **changes}
        space_changes = {**started.options, **space_changes}
    plan = _plan(space, changes, space_changes)
    if plan.counted:
        from fedsweep.cli.counts import show_counts

        show_counts(plan)
        return
    from fedsweep.sweep.cluster import check_resources
    from fedsweep.sweep.joining import not_followed, opened
    from fedsweep.sweep.nodes import make_ready
    from fedsweep.sweep.opening import open_sweep
    from fedsweep.sweep.tuner import run_sweep
    from fedsweep.sweep.warm_start import collect
    from fedsweep.terminal import progress_console, show_plan, show_sweep

    console = progress_console()
    if note := not_followed(address):
        console.print(note)
    if dry_run:
        with opened(address, at_once) as cluster:
            check_resources(plan.space.resources, cluster)
            plan.preflight()
            check_server(destination)
            make_ready(cluster, plan, home, console, deliver=False)
            if resume:
                open_sweep(plan, home, resume, sweep)
            elif taken := collect(plan, home):
                console.print(taken.note(plan.base.federation.rounds))
            show_plan(plan, cluster=cluster)
        return
    result = run_sweep(
        plan,
        home,
        console,
        resume=resume,
        sweep_id=sweep,
        fresh=fresh,
        address=address,
        at_once=at_once,
        destination=destination,
    )
    show_sweep(result, plan, page_command(store, destination.server))


def report(
    space: Annotated[str, typer.Argument(metavar="SEARCH_SPACE", help="e.g. `ablations/lora_rank`")],
    sweep: Annotated[str | None, typer.Option("--sweep", help="the sweep's id; the newest by default")] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Make the table and figures of a sweep again from what is recorded.

    Example: `fedsweep report ablations/lora_rank`
    """

    from fedsweep.report import write_report
    from fedsweep.store import Store
    from fedsweep.terminal import relative, result_console

    found = Store.at(store).find(space, sweep)
    made = write_report(found.manifest(), found.trials(), found.folder / "report")
    console = result_console()
    console.print(made.renderable)
    console.print(f"Written to {relative(found.folder / 'report')}.")


def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="port on this machine")] = 5000,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 for all of the network")] = "127.0.0.1",
    deliver: Annotated[bool, typer.Option("--deliver", help="first bring MLflow up to what the store holds")] = False,
    store: StoreOption = DEFAULT_STORE,
    mlflow: MlflowOption = None,
) -> None:
    """Open MLflow's page over everything recorded, on this machine only; of a server, print the addresses in it.

    Example: `fedsweep ui --port 5001`
    """
    from fedsweep.errors import UserError
    from fedsweep.store import Store
    from fedsweep.terminal import progress_console, show_delivery
    from fedsweep.tracking import Destination, check_free, check_server, page_links, page_url, server_command

    home = Store.at(store)
    destination = Destination.of(home.root, mlflow)
    check_server(destination)
    local = destination.is_server or check_free(host, port)
    if deliver or (home.uri and not destination.is_server):  # the database of such a store is this machine's own
        show_delivery(progress_console(), home, destination)
    if destination.server:
        print(f"MLflow on {destination.server}")
        for label, link in page_links(home, destination.server, destination).items():
            print(f"  {label}: {link}")
        return
    if not (home.root / "mlflow.db").exists():
        start = "`fedsweep tune ablations/lora_rank` would be a start"
        raise UserError(f"nothing is recorded in {home.where} yet; {start}.")
    command, environment = server_command(home.root, port, host)
    url = page_url(host, port)
    print(f"MLflow on {url} (Ctrl-C ends it)")
    for label, link in page_links(home, url).items():
        print(f"  {label}: {link}")
    sys.stdout.flush()
    if not local:
        print(
            f"fedsweep: this page has no password: anyone who can reach port {port} of this machine can read, change "
            "and delete what is recorded.",
            file=sys.stderr,
        )
    try:
        raise SystemExit(subprocess.run(command, env={**os.environ, **environment}).returncode)
    except KeyboardInterrupt:
        raise SystemExit(0) from None


def list_files() -> None:
    """Name the experiments, search spaces and pre-trainings that are there.

    Example: `fedsweep list`
    """
    from rich.table import Table

    from fedsweep.paths import VERBS, available, summary
    from fedsweep.terminal import result_console

    console = result_console()
    for kind, verb in VERBS.items():
        table = Table("name", "what it is", title=f"fedsweep {verb} NAME", title_justify="left", box=None)
        for name, path in available(kind).items():
            table.add_row(name, summary(path))
        console.print(table, "")


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="an experiment or a search space")],
    overrides: Overrides = None,
) -> None:
    """Print an experiment with all resolved values, or a search space's plan.

    Example: `fedsweep show fedra_digits lora.rank=4`
    """
    from rich.syntax import Syntax

    from fedsweep.config import flat
    from fedsweep.paths import find_either
    from fedsweep.plain import parse_overrides, read_yaml
    from fedsweep.terminal import result_console, show_plan

    changes = parse_overrides(overrides or [])
    kind, path = find_either(name)
    if kind == "search_spaces":
        from fedsweep.cli.counts import show_counts

        plan = _plan(name, changes, {})
        show_counts(plan) if plan.counted else show_plan(plan, estimate=False)
        return
    from fedsweep.experiment import RunConfig

    config = RunConfig.of(read_yaml(path), f"experiment {name}").override(changes, f"experiment {name}")
    lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in flat(config).items())
    result_console().print(Syntax(lines, "yaml", background_color="default"))


def _space_changes(
    experiment: str | None,
    seeds: str | None,
    samples: int | None,
    subsets: str | None,
    design: str | None,
    scheduler: str | None,
    cpus: float | None,
    gpus: str | None,
) -> dict[str, Any]:
    """The options of `tune` as dotted changes to the search space."""
    from fedsweep.errors import UserError
    from fedsweep.plain import parse_yaml

    changes: dict[str, Any] = {}
    if experiment is not None:
        changes["experiment"] = experiment
    if seeds is not None:
        parsed = parse_yaml(f"[{seeds}]", "`--seeds`")
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in parsed):
            raise UserError(f"`--seeds` must be whole numbers such as 0,1,2, but it is `{seeds}`.")
        changes["seeds"] = parsed
    if samples is not None:
        changes["search.samples"] = samples
    if subsets is not None:
        changes["subsets"] = subsets
    if design is not None:
        changes["design"] = design
    if scheduler is not None:
        changes["scheduler"] = scheduler
    if cpus is not None:
        changes["resources.cpus_per_trial"] = cpus
    if gpus is not None:
        changes["resources.gpus_per_trial"] = _number_or_word(gpus)
    return changes


def _number_or_word(given: str) -> float | str:
    try:
        return float(given)
    except ValueError:
        return given


def _plan(space: str, changes: dict[str, Any], space_changes: dict[str, Any]) -> Plan:
    from fedsweep.paths import find

    find("search_spaces", space)  # a wrong name is told before torch is imported
    if "experiment" in space_changes:
        find("experiments", space_changes["experiment"])
    from fedsweep.sweep.plan import Plan

    return Plan.read(space, changes, space_changes)
