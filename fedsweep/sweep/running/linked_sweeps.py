"""The linked sweeps of an ablation whose arms are tuned one by one (`tune_each`).

The sweep `NAME/tuning` tries the same samples for every arm, `NAME` runs the arms without tuning, and `NAME/tuned` runs
each arm with its chosen values. Each of them is an ordinary sweep, which is resumed, reported and recorded in MLflow
like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from fedsweep.common.errors import UserError
from fedsweep.common.progress import loading, silent_console, waiting
from fedsweep.common.signals import ending_signals_interrupt
from fedsweep.results import SweepManifest, SweepStore
from fedsweep.results.arms import arm_label
from fedsweep.results.tuned_arms import STAGE, Stage, StageName, choose, sweep_name
from fedsweep.sweep.cluster.ray_session import OwnRay
from fedsweep.sweep.running.tune import TuneOptions, tune_one
from fedsweep.sweep.space.requested_space import RequestedSpace

if TYPE_CHECKING:
    from fedsweep.report import Report
    from fedsweep.sweep.running.finish import SweepResult

STAGES: tuple[StageName, ...] = ("tuning", "common", "tuned")
"""The stages of an ablation whose arms are tuned one by one, in the order in which they run."""


def linked_sweeps(
    options: TuneOptions,
    console: Console | None = None,
    show: Callable[[Report], object] = lambda report: None,
    ended: Callable[[SweepResult], object] = lambda result: None,
) -> SweepResult:
    """Run the sweeps of a search space with `tune_each` one after the other, and return the result of the last one.

    The sweeps run in the order `tuning`, `common`, `tuned`, and share one Ray instance on this machine. No further
    sweep is started after a sweep that was interrupted or could not be stored. With `resume`, sweeps that have started
    are resumed, and the others are started.

    Args:
        options: The options of the ablation. `sweep_id` may be the id of any of its linked sweeps.
        console: The console for progress messages; none are printed by default.
        show: Called with the report of each sweep.
        ended: Called with the result of each sweep, before the next sweep starts.

    Raises:
        UserError: As for `tune`; or the ranges of `tune_each` have too few different values.
    """
    console = console or silent_console()
    started = dict(options.linked)
    if not started:
        with loading(console, "PyTorch", "fedsweep.sweep.plan.plan"):
            from fedsweep.sweep.plan.plan import Plan

        # An error of the last sweep is raised before the first one starts.
        with waiting(console, "Checking the arms"):
            Plan.of(options.request).preflight()
    # Once the later sweeps have started, the tuning sweep has ended, and a failed sample must not be tried again after
    # the values were chosen.
    names = STAGES[1:] if {"common", "tuned"} & {*started} else STAGES
    with ending_signals_interrupt(), OwnRay(options.address, console) as ray:
        for name in names:
            one = _options_of(name, options, started, console)
            result = tune_one(one, console, show, ray, more=name != names[-1])
            started[name] = result.session.sweep
            ended(result)
            if result.session.stopped or result.disk_full:
                break
    return result


def first_stage(request: RequestedSpace) -> Stage:
    """Return the stage of the tuning sweep of a search space, with the samples that all arms try.

    Raises:
        UserError: The ranges of `tune_each` have too few different values.
    """
    from fedsweep.sweep.search.proposals import drawn_values  # imports optuna

    tuned = request.space.tune_each
    if tuned is None:
        raise ValueError(f"{request.where} has no `tune_each`")
    drawn = drawn_values(tuned.space, tuned.samples - 1, tuned.seed)
    if len(drawn) < tuned.samples - 1:
        raise UserError(
            f"{request.where}: `tune_each.samples` is {tuned.samples} (the untuned value and {tuned.samples - 1} drawn "
            f"ones), but `tune_each.space` has only {len(drawn)} different values; use fewer samples or wider ranges."
        )
    return Stage(name="tuning", names=tuple(tuned.space), drawn=tuple(drawn))


def planned_sweeps(options: TuneOptions) -> list[TuneOptions]:
    """Return the options of the linked sweeps in the order in which they run, before any further values are chosen.

    With `resume`, the sweeps that have started are resumed.
    """
    if (tuning := options.linked.get("tuning")) is not None:
        manifest, started = tuning.manifest(), options.linked
        own, sweep = _stage(manifest), manifest.id
        return [
            _resuming(options, started[name])
            if name in started
            else _following(options, own.model_copy(update={"name": name, "sweep": sweep}), manifest)
            for name in STAGES
        ]
    first = first_stage(options.request)
    return [_starting(options, first.model_copy(update={"name": name})) for name in STAGES]


def sweeps_to_resume(options: TuneOptions) -> dict[StageName, SweepStore]:
    """Return the linked sweeps that belong together, by stage: those of `sweep_id`, or else the newest ones.

    Raises:
        UserError: There are no such sweeps, or their tuning sweep is missing.
    """
    sweeps = [(one, one.manifest()) for one in options.results.sweeps()]
    ours = {sweep_name(options.space, Stage(name=name, names=(), drawn=())) for name in STAGES}
    linked = [(one, manifest) for one, manifest in sweeps if manifest.name in ours and manifest.stage is not None]
    named, _, wanted_id = (options.sweep_id or "").rpartition("@")  # outputs name a sweep as SPACE@SWEEP
    if options.sweep_id is None:
        wanted = [one.id for _, one in linked if one.stage is not None and one.stage.name == "tuning"]
    else:
        fitting = [one for _, one in linked if named in ("", options.space, one.name)]
        wanted = [_tuning_id(one) for one in fitting if one.id == wanted_id]
    if not wanted:
        first, asked = f"{options.space}/tuning", wanted_id if named in ("", *ours) else options.sweep_id
        options.results.find(first, asked or None)  # raises the error that there is none
        raise UserError(f"no sweep {first} has tuned the arms of search space {options.space}; start a new one.")
    tuning = wanted[-1]
    found: dict[StageName, SweepStore] = {}
    for sweep, manifest in linked:
        if _tuning_id(manifest) == tuning and manifest.stage is not None:
            sweep.fetch()
            found[manifest.stage.name] = sweep
    if "tuning" not in found:
        raise UserError(f"sweep {tuning} of {options.space}/tuning, which tuned the arms, is missing; start a new one.")
    return found


def _tuning_id(manifest: SweepManifest) -> str:
    """Return the id of the tuning sweep to which a linked sweep belongs."""
    return manifest.stage.sweep if manifest.stage is not None and manifest.stage.sweep else manifest.id


def _stage(manifest: SweepManifest) -> Stage:
    if manifest.stage is None:
        raise ValueError(f"sweep {manifest.id} is not a linked sweep")
    return manifest.stage


def _options_of(
    name: StageName, options: TuneOptions, started: Mapping[StageName, SweepStore], console: Console
) -> TuneOptions:
    """Return the options of one of the linked sweeps, which is resumed if it has started."""
    if name in started:
        return _resuming(options, started[name])
    if (tuning := started.get("tuning")) is None:
        return _starting(options, first_stage(options.request))
    return _following(options, _next_stage(name, tuning, console), tuning.manifest())


def _resuming(options: TuneOptions, sweep: SweepStore) -> TuneOptions:
    """Return the options that resume a linked sweep."""
    manifest = sweep.manifest()
    changed = {**options.space_options, STAGE: manifest.options[STAGE]}
    return replace(options, space_options=changed, resume=True, fresh=False, sweep_id=manifest.id)


def _starting(options: TuneOptions, stage: Stage) -> TuneOptions:
    """Return the options that start a linked sweep with the user's changes."""
    changed = {**options.space_options, STAGE: stage.model_dump(mode="json")}
    return replace(options, space_options=changed, resume=False, sweep_id=None)


def _following(options: TuneOptions, stage: Stage, tuning: SweepManifest) -> TuneOptions:
    """Return the options that start a linked sweep with the changes with which the sweep `tuning` was started."""
    asked = replace(
        options,
        overrides={**tuning.overrides, **options.overrides},
        space_options={**tuning.options, **options.space_options},
        resume=False,
        sweep_id=None,
        fresh=tuning.fresh,
        id_file=None,  # the id of the tuning sweep resumes all of them
    )
    return _starting(asked, stage)


def _next_stage(name: StageName, tuning: SweepStore, console: Console) -> Stage:
    """Return the stage `common` or `tuned` that follows a tuning sweep. For `tuned`, choose the values of each arm."""
    manifest = tuning.manifest()
    own = _stage(manifest)
    stage = own.model_copy(update={"name": name, "sweep": manifest.id})
    if name != "tuned":
        return stage
    chosen = choose(own, manifest.metric, manifest.mode, tuning.trials())
    for one in chosen:
        if one.sample is None:
            label = arm_label(one.arm)
            console.print(f"No sample of arm {label} has finished, so it runs with its untuned values.", style="yellow")
    return stage.model_copy(update={"chosen": chosen})
