"""`fedsweep tune`. Nothing heavy is imported at the top: mistakes are told before Ray starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsweep.cli.options import (
    DEFAULT_STORE,
    AddressOption,
    ColumnsOption,
    MlflowOption,
    Overrides,
    StoreOption,
    listed,
    page_command,
)

if TYPE_CHECKING:
    from rich.console import Console

    from fedsweep.results import Store
    from fedsweep.sweep.plan.plan import Plan
    from fedsweep.tracking import Destination

SPACE_OPTIONS = {
    "experiment": "experiment",
    "seeds": "seeds",
    "samples": "search.samples",
    "warm_start": "search.warm_start",
    "subsets": "subsets",
    "design": "design",
    "scheduler": "scheduler",
    "cpus_per_trial": "resources.cpus_per_trial",
    "gpus_per_trial": "resources.gpus_per_trial",
    "columns": "columns",
    "system_metrics": "resources.system_metrics",
}
"""What an option of `tune` stands for in a search space."""


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
    system_metrics: Annotated[
        bool | None, typer.Option("--system-metrics", help="record CPU, memory and GPUs of each round in MLflow")
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="trials side by side, at most; on a cluster that adds nodes, as many")
    ] = None,
    columns: ColumnsOption = None,
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
    from fedsweep.common.errors import UserError
    from fedsweep.common.paths import find
    from fedsweep.common.yaml_values import parse_overrides
    from fedsweep.results import Store
    from fedsweep.tracking import Destination

    if sweep is not None and not resume:
        raise UserError("`--sweep` names a sweep to go on with and needs --resume.")
    if fresh and resume:
        raise UserError("`--fresh` is of a new sweep and cannot be given with --resume.")
    from fedsweep.sweep.cluster.ray_session import check_address

    check_address(address)
    changes, of_space = parse_overrides(overrides or []), space_changes(context.params)  # by SPACE_OPTIONS
    find("search_spaces", space)
    home = Store.at(store)
    destination = Destination.of(home.root, mlflow)
    if resume:  # with what the sweep was started with
        going_on = home.find(space, sweep)
        destination = Destination.of_sweep(home.root, going_on.folder, mlflow)
        started = going_on.manifest()
        changes, of_space = {**started.overrides, **changes}, {**started.options, **of_space}
    plan = read_plan(space, changes, of_space)
    if plan.counted:
        from fedsweep.cli.counts import show_counts

        show_counts(plan)
        return
    from fedsweep.cli.output import progress_console, show_sweep
    from fedsweep.sweep.cluster.ray_session import not_followed
    from fedsweep.sweep.running.tuner import run_sweep

    console = progress_console()
    if note := not_followed(address):
        console.print(note)
    if dry_run:
        _rehearse(plan, home, destination, console, address, at_once, resume, sweep)
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


def _rehearse(
    plan: Plan,
    home: Store,
    destination: Destination,
    console: Console,
    address: str,
    at_once: int | None,
    resume: bool,
    sweep: str | None,
) -> None:
    """All that is looked at before the first trial starts, and what would be run."""
    from fedsweep.cli.output import show_plan
    from fedsweep.sweep.cluster.cluster import check_resources
    from fedsweep.sweep.cluster.nodes import make_ready
    from fedsweep.sweep.cluster.ray_session import opened
    from fedsweep.sweep.plan.warm_start import collect
    from fedsweep.sweep.running.open_sweep import open_sweep
    from fedsweep.tracking import check_server

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


def space_changes(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `tune` as dotted changes to the search space; those that are not given change nothing.

    Raises:
        UserError: a seed is no whole number.
    """
    from fedsweep.common.errors import UserError
    from fedsweep.common.yaml_values import parse_yaml

    given = {dotted: options[name] for name, dotted in SPACE_OPTIONS.items() if options.get(name) is not None}
    if "seeds" in given:
        parsed = parse_yaml(f"[{given['seeds']}]", "`--seeds`")
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in parsed):
            raise UserError(f"`--seeds` must be whole numbers such as 0,1,2, but it is `{given['seeds']}`.")
        given["seeds"] = parsed
    if "columns" in given:
        given["columns"] = listed(given["columns"])
    if (gpus := given.get("resources.gpus_per_trial")) is not None:
        given["resources.gpus_per_trial"] = _number_or_word(gpus)
    return given


def _number_or_word(given: str) -> float | str:
    try:
        return float(given)
    except ValueError:
        return given


def read_plan(space: str, changes: dict[str, Any], of_space: dict[str, Any]) -> Plan:
    """A search space with these changes; a wrong name is told before torch is imported.

    Raises:
        UserError: there is no such file, or it is not right.
    """
    from fedsweep.common.paths import find

    find("search_spaces", space)
    if "experiment" in of_space:
        find("experiments", of_space["experiment"])
    from fedsweep.sweep.plan.plan import Plan

    return Plan.read(space, changes, of_space)
