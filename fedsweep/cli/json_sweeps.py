"""The JSON documents about sweeps and their plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.cli import json_output, json_results, output
from fedsweep.cli.early_check import check_space
from fedsweep.results import count_outcomes
from fedsweep.results.arms import arm_label

if TYPE_CHECKING:
    from fedsweep.report import Report
    from fedsweep.results import SweepManifest, TrialRecord
    from fedsweep.sweep import TuneOptions
    from fedsweep.sweep.plan.plan import Plan
    from fedsweep.sweep.running.finish import SweepResult


def run_space(command: str, options: TuneOptions, dry_run: bool, **fields: object) -> None:
    """Run a search space, or only plan it, and print one JSON document to stdout. All other output goes to stderr.

    Args:
        command: The command, `tune` or `confirm`.
        options: The options of the sweep.
        dry_run: Whether to print the plan instead of running the sweep.
        fields: Further fields of the document.

    Raises:
        SystemExit: With the exit code of the command, unless it is 0.
    """
    from fedsweep.cli.tune import run_space as run

    check_space(options.request)
    if options.request.counted:
        from fedsweep.sweep.plan.plan import Plan

        json_output.document(command, plans=[of_plan(Plan.of(options.request))], **fields)
        return
    if dry_run:
        with output.results_on_stderr():
            planned = _dry_run(options)
        json_output.document(command, **planned, **fields)
        return
    results: list[SweepResult] = []
    code = 0
    with output.results_on_stderr():
        try:
            run(options, False, results.append)
        except SystemExit as end:
            code = int(end.code or 0)
    json_output.document(command, exit_code=code, sweeps=[of_result(one) for one in results], **fields)
    if code:
        raise SystemExit(code)


def _dry_run(options: TuneOptions) -> dict[str, Any]:
    """Return the plans of a search space, and the estimated time of its sweeps."""
    from fedsweep.cli.linked import check_others, one_trial, planned_seconds
    from fedsweep.sweep.cluster.cluster import decided
    from fedsweep.sweep.plan.plan import Plan
    from fedsweep.sweep.running.linked_sweeps import planned_sweeps
    from fedsweep.sweep.running.time_estimate import side_by_side
    from fedsweep.sweep.running.tune import rehearsed

    console = output.progress_console()
    if options.is_linked:
        requests = planned_sweeps(options)
        check_others(requests, console)
        with rehearsed(requests[1], console) as ready:
            plans = [Plan.of(one.request) for one in requests]
            most, batch, source = one_trial(ready)
            seconds = sum(planned_seconds(plan, most, batch) for plan in plans)
    else:
        with rehearsed(options, console) as ready:
            plan = ready.plan.on(decided(ready.plan.space.resources, ready.cluster))
            most = side_by_side(plan, ready.cluster)
            seconds, _, source = output.estimated_time(plan, ready.store, most, ready.cluster)
            plans = [plan]
    found = [of_plan(one) | clients_of(one) | expected_seeds_of(one) for one in plans]
    return {"plans": found, "parallel": most, "seconds": seconds, "estimated_from": source}


def of_plan(plan: Plan) -> dict[str, Any]:
    """Return the fields of the plan of a sweep (see `json_output.PLAN`)."""
    space = plan.space
    sampled = None if plan.sampled is None else {name: axis.shown() for name, axis in space.space.items()}
    found = {
        "space": plan.name,
        "experiment": space.experiment,
        "objective": space.goal.metric,
        "mode": space.goal.mode,
        "arms": plan.arms if plan.sampled is None else None,
        "labels": [arm_label(one) for one in plan.arms] if plan.sampled is None else None,
        "baseline": space.baseline,
        "sampled": sampled,
        "trials": plan.num_trials,
        "rounds": plan.base.federation.rounds,
        "seeds": None if space.until_decided is not None else space.planned_seeds,
        "until_decided": None if space.until_decided is None else space.until_decided.model_dump(exclude={"until"}),
        "search": space.search.name,
        "scheduler": space.scheduler.name,
    }
    return {**found, "counts": _counts(plan)} if plan.request.counted else found


def expected_seeds_of(plan: Plan) -> dict[str, Any]:
    """Return the field `expected_seeds` of the plan of a sweep; an empty dict without seeds until decided."""
    from fedsweep.sweep.running.time_estimate import seed_forecasts

    rows = [
        {"spread": spread, "case": case, **asdict(one)}
        for spread, found in seed_forecasts(plan).items()
        for case, one in found.items()
    ]
    return {"expected_seeds": rows} if rows else {}


def clients_of(plan: Plan) -> dict[str, Any]:
    """Return the field `clients` of the plan of a sweep; an empty dict if no arm has budgets."""
    from fedsweep.sweep.plan.client_budgets import fitted_clients

    rows = [
        {
            "arm": arm,
            "clients": one.clients,
            "depth": one.size.depth,
            "rank": one.rank,
            **asdict(one.costs),
        }
        for arm, config in plan.configs
        for one in fitted_clients(config)
    ]
    return {"clients": rows} if rows else {}


def _counts(plan: Plan) -> list[dict[str, Any]]:
    from fedsweep.sweep.plan.model_counts import count_parameters
    from fedsweep.sweep.space.settings import Parameters

    measure = plan.space.measure
    classes = measure.classes if isinstance(measure, Parameters) else 0
    seed = plan.space.planned_seeds[0]
    return [{"arm": arm, **asdict(count_parameters(plan.resolve(arm, seed), classes, costs=True))} for arm in plan.arms]


def of_result(result: SweepResult) -> dict[str, Any]:
    """Return the fields of a sweep that has ended (see `json_output.SWEEP`)."""
    status = "interrupted" if result.session.interrupted else "failed" if result.status else "complete"
    manifest = result.session.sweep.manifest()
    return of_sweep(manifest, result.folder, result.trials, result.report, status)


def of_sweep(
    manifest: SweepManifest, folder: Path, trials: Sequence[TrialRecord], report: Report | None, status: str
) -> dict[str, Any]:
    """Return the fields of a sweep (see `json_output.SWEEP`). The tables are empty if `report` is None."""
    from fedsweep.report.formats.data_frame import records

    return {
        "space": manifest.name,
        "id": manifest.id,
        "status": status,
        "experiment": manifest.experiment,
        "objective": manifest.metric,
        "mode": manifest.mode,
        "seeds": manifest.seeds,
        "trials": dict(count_outcomes(trials)),
        "planned_trials": manifest.trials,
        "folder": folder,
        "files": report.paths if report else [],
        "arms": [json_results.arm(one) for one in report.arms] if report else [],
        "table": records(report.table) if report else [],
        "findings": report.table.findings() if report else [],
        "each_trial": [json_results.trial(one, manifest.metric) for one in trials],
        "failures": json_results.failures(trials, manifest.metric),
        "changes_made": [json_results.change(one) for one in manifest.changes],
    }
