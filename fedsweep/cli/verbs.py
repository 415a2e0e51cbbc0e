"""The verbs on experiments and sweeps. Nothing heavy is imported at the top: mistakes are told before Ray starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsweep.cli.options import DEFAULT_STORE, Overrides, StoreOption, page_command

if TYPE_CHECKING:
    from fedsweep.sweep.plan import Plan


def run(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="an experiment, e.g. `fedra_digits`")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="print each round's exact metrics as a line of JSON")] = False,
    device: Annotated[str, typer.Option(help="`cpu` or `cuda`")] = "cpu",
    store: StoreOption = DEFAULT_STORE,
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
    from fedsweep.terminal import RoundTable, show_recorded
    from fedsweep.tracking import check_writable

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("`--device` is cuda, but torch sees no GPU.")
    config = RunConfig.of(read_yaml(path), f"experiment {experiment}").override(changes, f"experiment {experiment}")
    check_content(config)
    check_writable(Store(store).root)
    torch.set_num_threads(1)  # the sum of a product depends on the number of threads; one is what a trial has
    clients, data = config.partition.test_share > 0, config.data
    with RoundTable(config.federation.rounds, data.training_domains, as_json, clients, data.held_out_domains) as table:
        try:
            trial = record_run(experiment, config, Store(store), device, table.add)  # type: ignore[arg-type]
        except DivergenceError as error:
            raise UserError(f"{error}.") from None
    show_recorded(table.console, config, trial.folder, page_command(store))


def tune(
    space: Annotated[str, typer.Argument(metavar="SEARCH_SPACE", help="e.g. `ablations/lora_rank`")],
    overrides: Overrides = None,
    experiment: Annotated[str | None, typer.Option(help="start from this experiment instead of the file's")] = None,
    seeds: Annotated[str | None, typer.Option(help="seeds instead of the file's, e.g. `0,1,2,3,4`")] = None,
    samples: Annotated[int | None, typer.Option(help="configurations that a sampled search tries")] = None,
    subsets: Annotated[
        str | None, typer.Option(help="`one` component of `ablate` left out, or `all` sets of them")
    ] = None,
    scheduler: Annotated[str | None, typer.Option(help="`none` or `asha` instead of the file's")] = None,
    cpus_per_trial: Annotated[float | None, typer.Option(help="cores of a trial")] = None,
    gpus_per_trial: Annotated[float | None, typer.Option(help="GPUs of a trial; 0.5 shares one between two")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print arms, trials, rounds and an estimate only")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the newest sweep of this space")] = False,
    sweep: Annotated[str | None, typer.Option("--sweep", help="with --resume: the sweep's id")] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Run a search space: every trial on Ray Tune, all rounds in MLflow, a table at the end.

    Example: `fedsweep tune ablations/lora_rank federation.rounds=5 --seeds 0,1`
    """
    from fedsweep.errors import UserError
    from fedsweep.paths import find
    from fedsweep.plain import parse_overrides
    from fedsweep.store import Store

    if sweep is not None and not resume:
        raise UserError("`--sweep` names a sweep to go on with and needs --resume.")
    home = Store(store)
    changes = parse_overrides(overrides or [])
    space_changes = _space_changes(experiment, seeds, samples, subsets, scheduler, cpus_per_trial, gpus_per_trial)
    if resume:  # with what the sweep was started with
        find("search_spaces", space)
        started = home.find(space, sweep).manifest()
        changes = {**started.overrides, **changes}
        space_changes = {**started.options, **space_changes}
    plan = _plan(space, changes, space_changes)
    if plan.counted:
        from fedsweep.cli.counts import show_counts

        show_counts(plan)
        return
    from fedsweep.sweep.tuner import check_resources, open_sweep, run_sweep
    from fedsweep.terminal import progress_console, show_plan, show_sweep

    if dry_run:
        check_resources(plan.space.resources)
        plan.preflight()
        if resume:
            open_sweep(plan, home, resume, sweep)
        show_plan(plan)
        return
    result = run_sweep(plan, home, progress_console(), resume=resume, sweep_id=sweep)
    show_sweep(result, plan, page_command(store))


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

    found = Store(store).find(space, sweep)
    made = write_report(found.manifest(), found.trials(), found.folder / "report")
    console = result_console()
    console.print(made.renderable)
    console.print(f"Written to {relative(found.folder / 'report')}.")


def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="port on this machine")] = 5000,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Open MLflow's page over everything recorded, on this machine only.

    Example: `fedsweep ui --port 5001`
    """
    from fedsweep.errors import UserError
    from fedsweep.store import Store
    from fedsweep.tracking import page_links, server_command

    home = Store(store)
    root = home.root
    if not (root / "mlflow.db").exists():
        raise UserError(f"nothing is recorded in {root} yet; `fedsweep tune ablations/lora_rank` would be a start.")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise UserError(f"port {port} is taken on this machine; `--port {port % 65535 + 1}` would use another.")
    command, environment = server_command(root, port)
    url = f"http://127.0.0.1:{port}"
    print(f"MLflow on {url} (Ctrl-C ends it)")
    for label, link in page_links(home, url).items():
        print(f"  {label}: {link}")
    sys.stdout.flush()
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
    scheduler: str | None,
    cpus: float | None,
    gpus: float | None,
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
    if scheduler is not None:
        changes["scheduler"] = scheduler
    if cpus is not None:
        changes["resources.cpus_per_trial"] = cpus
    if gpus is not None:
        changes["resources.gpus_per_trial"] = gpus
    return changes


def _plan(space: str, changes: dict[str, Any], space_changes: dict[str, Any]) -> Plan:
    from fedsweep.paths import find

    find("search_spaces", space)  # a wrong name is told before torch is imported
    if "experiment" in space_changes:
        find("experiments", space_changes["experiment"])
    from fedsweep.sweep.plan import Plan

    return Plan.read(space, changes, space_changes)
