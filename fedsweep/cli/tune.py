"""The command `fedsweep tune`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from fedsweep.cli import completion, json_sweeps, output
from fedsweep.cli.detach import detach
from fedsweep.cli.early_check import check_space
from fedsweep.cli.excluded import excluded_arms
from fedsweep.cli.json_output import FormatOption
from fedsweep.cli.linked import run_linked, show_linked_plan
from fedsweep.cli.options import (
    DEFAULT_STORE,
    ColumnsOption,
    MlflowOption,
    Overrides,
    StoreOption,
    VerifyOption,
    check_format,
    listed,
)
from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import parse_overrides, parse_yaml
from fedsweep.results.tune_command import SPACE_OPTIONS, UNTIL_OPTIONS
from fedsweep.results.tuned_arms import ablation_of

if TYPE_CHECKING:
    from fedsweep.sweep import TuneOptions
    from fedsweep.sweep.running.finish import SweepResult

ADDRESS = "where trials run: `local`, HOST:PORT of a Ray cluster, or `auto`: the cluster in RAY_ADDRESS or here"


def tune(
    context: Context,
    space: Annotated[
        str,
        Argument(
            metavar="SEARCH_SPACE",
            help="search space to run; with --resume, also SPACE@SWEEP",
            autocompletion=completion.spaces_or_sweeps,
        ),
    ],
    overrides: Overrides = None,
    experiment: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="experiment instead of the space's",
            autocompletion=completion.files("experiments"),
        ),
    ] = None,
    seeds: Annotated[str | None, Option(metavar="SEED,...", help="seeds instead of the space's, e.g. `0,1,2`")] = None,
    until_decided: Annotated[bool, Option("--until-decided", help="add seeds until comparisons are decided")] = False,
    smallest_effect: Annotated[
        float | None,
        Option(
            metavar="NUMBER",
            help="smallest difference that matters, in points for accuracies; implies `--until-decided`",
        ),
    ] = None,
    first_seed: Annotated[
        int | None,
        Option(metavar="N", help="first seed, to decide with fresh seeds; implies `--until-decided`"),
    ] = None,
    samples: Annotated[int | None, Option(metavar="N", help="samples of a random or TPE search")] = None,
    warm_start: Annotated[
        str | None,
        Option(
            metavar="SPACE[@SWEEP]",
            help="earlier sweep that TPE learns from",
            autocompletion=completion.sweeps,
        ),
    ] = None,
    subsets: Annotated[
        str | None,
        Option(
            metavar="one|all",
            help="leave out one component of `ablate` at a time, or all subsets",
            autocompletion=completion.choices("one", "all"),
        ),
    ] = None,
    design: Annotated[
        str | None,
        Option(
            metavar="DESIGN",
            help="`full` grid, or `one_factor`: change one value of the baseline at a time",
            autocompletion=completion.choices("full", "one_factor"),
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        Option(metavar="ARM", help="arm to leave out, e.g. `lora.rank=1` or `rank 1`; can be repeated"),
    ] = None,
    scheduler: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="pruning rule: `none`, `arms`, `asha`, `asha_async`, `median` or `pbt`",
            autocompletion=completion.choices("none", "asha", "asha_async", "median", "arms", "pbt"),
        ),
    ] = None,
    cpus_per_trial: Annotated[float | None, Option(metavar="N", help="CPU cores per trial")] = None,
    gpus_per_trial: Annotated[
        str | None,
        Option(metavar="N|auto", help="GPUs per trial: 0.5 lets two trials share one; `auto` measures how many fit"),
    ] = None,
    system_metrics: Annotated[
        bool | None, Option("--system-metrics", help="record CPU, memory and GPU in MLflow")
    ] = None,
    at_once: Annotated[
        int | None,
        Option(min=1, metavar="N", help="maximum number of parallel trials, for which a Ray cluster adds nodes"),
    ] = None,
    columns: ColumnsOption = None,
    dry_run: Annotated[bool, Option("--dry-run", help="only print the arms and the estimated time")] = False,
    fresh: Annotated[bool, Option("--fresh", help="reuse no trials of earlier sweeps")] = False,
    resume: Annotated[bool, Option("--resume", help="resume the newest sweep of this space")] = False,
    join: Annotated[
        bool,
        Option("--join", help="run the newest sweep together with other processes, also on other machines"),
    ] = False,
    sweep: Annotated[
        str | None,
        Option(
            "--sweep",
            metavar="ID",
            help="id of the sweep to resume or join",
            autocompletion=completion.sweep_ids,
        ),
    ] = None,
    id_file: Annotated[str | None, Option(metavar="FILE", help="file for the sweep's id, at the start")] = None,
    detached: Annotated[bool, Option("--detach", help="run in the background; see `fedsweep attach`")] = False,
    verify: VerifyOption = False,
    address: Annotated[str, Option("--address", envvar="FEDSWEEP_ADDRESS", metavar="ADDRESS", help=ADDRESS)] = "local",
    store: StoreOption = DEFAULT_STORE,
    mlflow: MlflowOption = None,
    format: FormatOption = "terminal",
) -> None:
    """Run all trials of a search space on Ray Tune, record them in MLflow and print a table of results.

    Example: `fedsweep tune ablations/lora_rank federation.rounds=5 --seeds 0,1`
    """
    check_format(format, ("terminal", "json"))

    from fedsweep.sweep import TuneOptions

    space, sweep = named_sweep(space, sweep, resume or join)
    options = TuneOptions(
        space,
        parse_overrides(overrides or []),
        space_changes({**context.params, "space": space}),  # by SPACE_OPTIONS
        store=store,
        mlflow=mlflow,
        resume=resume,
        join=join,
        sweep_id=sweep,
        fresh=fresh,
        verify=verify,
        address=address,
        at_once=at_once,
        id_file=id_file,
    )
    if detached and id_file is not None:
        raise UserError("`--detach` prints the id of the sweep and cannot be combined with `--id-file`.")
    if detached and not dry_run and not options.request.counted:
        check_space(options.request)
        detach([one for one in sys.argv[1:] if one != "--detach"], store, format == "json")
        return
    run_space(options, dry_run) if format == "terminal" else json_sweeps.run_space("tune", options, dry_run)


def named_sweep(name: str, sweep: str | None, resume: bool) -> tuple[str, str | None]:
    """Return the search space and the sweep to resume, if any.

    Args:
        name: The argument of `tune`: a search space or, with `--resume`, a sweep as SPACE@SWEEP, as outputs name it.
            SPACE can also be one of the linked sweeps of a search space, such as `ablations/lora_rank_tuned/tuned`.
        sweep: The value of `--sweep`, if it was given.
        resume: Whether `--resume` was given.

    Raises:
        UserError: `name` is a sweep although no sweep is resumed, or another one than `sweep`.
    """
    linked, _, sweep_id = name.partition("@")
    space = ablation_of(linked)
    if not resume and (sweep_id or space != linked):
        kind = "a sweep" if sweep_id else "one of the linked sweeps"
        raise UserError(
            f"`{name}` is {kind} of search space {space}; use `fedsweep tune {name} --resume` to resume it, or "
            f"`fedsweep tune {space}` to start a new sweep."
        )
    if not sweep_id:
        return space, sweep
    if sweep not in (None, sweep_id, name):
        raise UserError(f"`{name}` and `--sweep {sweep}` are two different sweeps; leave out one of them.")
    return space, sweep_id if space == linked else name


def run_space(
    options: TuneOptions, dry_run: bool, ended: Callable[[SweepResult], object] = lambda result: None
) -> None:
    """Run a search space and print its results, or print its plan if `dry_run` is true.

    If the search space only counts parameters, print the counts. `ended` is called with the result of each sweep.
    """
    from fedsweep.sweep import tune as run_sweep
    from fedsweep.sweep.cluster.ray_session import not_followed
    from fedsweep.sweep.running.tune import rehearsed
    from fedsweep.tracking import Destination

    check_space(options.request)
    if options.request.counted:
        from fedsweep.cli.counts import show_counts
        from fedsweep.sweep.plan.plan import Plan

        show_counts(Plan.of(options.request))
        return
    console = output.progress_console()
    if note := not_followed(options.address):
        console.print(note)
    if options.is_linked:
        show_linked_plan(options, console) if dry_run else run_linked(options, console, ended)
        return
    if dry_run:
        with rehearsed(options, console) as ready:
            output.show_plan(ready.plan, ready.cluster, ready.store)
        return
    result = run_sweep(options, console, lambda report: output.result_console().print(report.renderable))
    ended(result)
    server = Destination.of_sweep(options.results.root, result.folder, options.mlflow).server
    output.show_sweep(result, output.page_command(options.store, server))


def space_changes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that the options of `tune` make to a search space, as a dict from dotted name to value."""
    given = {dotted: options[name] for name, dotted in SPACE_OPTIONS.items() if options.get(name) not in (None, [], ())}
    if "seeds" in given:
        parsed = parse_yaml(f"[{given['seeds']}]", "`--seeds`")
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in parsed):
            raise UserError(f"`--seeds` must be a list of whole numbers such as 0,1,2, but it is `{given['seeds']}`.")
        given["seeds"] = parsed
    rule = {entry: options[name] for name, entry in UNTIL_OPTIONS.items() if options.get(name) is not None}
    if options.get("until_decided") or rule:
        if "seeds" in given:
            raise UserError("`--until-decided` chooses the seeds itself and cannot be combined with `--seeds`.")
        given["seeds"] = {"until": "decided", **rule}
    if "exclude" in given:
        given["exclude"] = excluded_arms(given["exclude"], options["space"], options.get("overrides") or (), given)
    if "columns" in given:
        given["columns"] = listed(given["columns"])
    with suppress(KeyError, ValueError):  # not given, or `auto`
        given["resources.gpus_per_trial"] = float(given["resources.gpus_per_trial"])
    return given
