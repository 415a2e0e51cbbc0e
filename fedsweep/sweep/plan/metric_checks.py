"""The check of the metrics and columns of a search space. This module imports neither torch nor ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from fedsweep.common.config import flat
from fedsweep.common.errors import near
from fedsweep.results.arms import Arm, arm_label, identity
from fedsweep.results.declared_comparisons import pairs_of
from fedsweep.results.history import (
    ACCUMULATED,
    AVERAGED,
    ENERGY,
    SIMULATED,
    VALIDATION,
    is_of_clients,
    on_test,
    on_validation,
    uses_test_images,
)
from fedsweep.results.table_columns import wrong_columns
from fedsweep.sweep.plan.resolved_space import ResolvedSpace
from fedsweep.sweep.plan.space_checks import Findings, related

if TYPE_CHECKING:
    from fedsweep.federation.run_config import RunConfig

    Reported = Callable[[RunConfig], Sequence[str]]

OF_DOMAINS = ("accuracy/domain/", "accuracy/out_of_domain")  # prefixes of metrics that do not exist for other data
DECIDE_METRICS = ("data", "devices", "evaluation", "method", "partition")
"""The parts of a configuration on which the names of a run's metrics depend."""
Asked = tuple[str, str, Sequence[str]]


def wrong_metrics(resolved: ResolvedSpace, found: Findings, metrics: Reported) -> Iterator[str]:
    """Yield an error message for each metric and each column in the search space that an arm does not report.

    If the user changed the experiment or its data, the domains may differ from the domains in the reference paper. In
    this case, the paper's accuracies for single domains are not checked. Nothing is yielded if the names of the metrics
    depend on values that have a mistake.

    Args:
        resolved: The search space.
        found: The other mistakes in the search space.
        metrics: A function that returns the metrics that a run reports.
    """
    names = flat(resolved.base)
    if found.wrong and any(related(part, found.wrong, names) for part in DECIDE_METRICS):
        return
    unknown = [ENERGY] if found.wrong and related("federation.ranks", found.wrong, names) else []
    of_arms = [(arm, [*metrics(config), *unknown]) for arm, config in found.configs or [({}, resolved.base)]]
    # A wrong name may have been meant as the name of a column.
    varied = [*resolved.space.names, *(names if found.wrong else ())]
    yield from _wrong_metrics(resolved, of_arms, varied)
    yield from _wrong_tuning(resolved)
    goal, scheduler = resolved.space.goal, resolved.space.scheduler.name
    late = any(
        config.evaluation.test_rounds == "last" for config in (resolved.base, *(one for _, one in found.configs))
    )
    if scheduler != "none" and uses_test_images(goal.metric) and late:
        yield (
            f"`scheduler` {scheduler} compares trials before the last round and needs "
            f"`evaluation.test_rounds` all for `objective.metric` {goal.metric}, but it is last."
        )


def _wrong_tuning(resolved: ResolvedSpace) -> Iterator[str]:
    """Yield an error message if `tune_each` cannot choose by validation images and compare the arms on test images."""
    space = resolved.space
    if space.tune_each is None or resolved.request.stage is not None:
        return
    if (metric := space.goal.metric).startswith(VALIDATION):
        rule = "`tune_each` chooses by validation images and needs an `objective.metric` on test images"
        yield f"{rule}, but it is {metric}; use {on_test(metric)}."
    elif on_validation(metric) is None:
        rule = "`tune_each` needs an objective that is also measured on validation images"
        yield f"{rule}, but `objective.metric` is {metric}."
    elif (setting := _lacking(resolved, metric)) is not None:
        yield f"`tune_each` chooses by validation images, but `{setting}` is 0; set it to 0.2 in `fixed`, for example."


def _lacking(resolved: ResolvedSpace, metric: str) -> str | None:
    """Return the setting that holds out the validation images of a metric if it is 0, or else None."""
    if is_of_clients(metric):
        return None if resolved.base.partition.tuning_share else "partition.tuning_share"
    return None if resolved.base.data.validation_fraction else "data.validation_fraction"


def _wrong_metrics(
    resolved: ResolvedSpace, of_arms: Sequence[tuple[Arm, Sequence[str]]], varied: Sequence[str]
) -> Iterator[str]:
    space, request, paper = resolved.space, resolved.request, resolved.space.reference
    other_data = "experiment" in request.options or any(name.split(".")[0] == "data" for name in request.overrides)

    # Each entry of the search space with its metric, and with allowed metrics that are not metrics of a round.
    # The default metric depends on the search and the scheduler, which mistakes may have replaced.
    unknown = space.objective.metric is None and bool(request.mistakes)
    objectives: list[Asked] = [] if request.counted or unknown else [("objective.metric", space.goal.metric, ())]
    if against := space.goal.against:
        objectives.append(
            ("objective.against.metric", against.metric, [one for one in ACCUMULATED if one != SIMULATED])
        )
    printed: list[Asked] = [
        ("reference", metric, ())
        for metric in (paper.metrics() if paper else ())
        if not (other_data and metric.startswith(OF_DOMAINS))
    ]
    by_entry = _second_metrics(resolved, [arm for arm, _ in of_arms])
    declared: list[Asked] = [(entry, metric, ()) for entry, (metric, _) in by_entry.items()]
    metrics = list(dict.fromkeys(name for _, reported in of_arms for name in reported))
    for entry, metric, others in [*objectives, *declared, *printed]:
        known = list(dict.fromkeys([*metrics, *others]))
        setting = _lacking(resolved, metric) if on_validation(on_test(metric)) == metric else None
        own_models = is_of_clients(metric)
        if metric not in known and setting is not None and (on_test(metric) in known or own_models):
            set_test = f", or set `{entry}` to {on_test(metric)}, which uses the test images"
            yield (
                f"`{entry}` {metric} needs validation images, but `{setting}` is 0; "
                f"set it to 0.2, for example{set_test if on_test(metric) in known else ''}."
            )
        elif own_models and on_test(metric) not in known and not resolved.base.partition.test_share:
            yield (
                f"`{entry}` {metric} needs test images of the clients, but `partition.test_share` is 0; "
                "set it to 0.2, for example."
            )
        elif metric not in known and metric in AVERAGED.values():
            yield f"`{entry}` {metric} needs a number of rounds in `evaluation.last_rounds`, but it is null."
        elif metric not in known:
            hint = near(metric, known) or f"; it reports {', '.join(known)}."
            yield f"`{entry}` {metric} is not reported by this run{hint}"
    if request.counted and space.columns:
        yield "`columns` needs trained trials, but `measure` parameters trains none."
    else:
        yield from wrong_columns(space.columns, metrics, space.goal.metric, "`columns`", varied)
    for entry, metric, others in [*objectives, *declared, *printed]:
        asked = of_arms if metric in metrics else []
        if paper is not None and entry == "reference":
            asked = [one for one in asked if metric in paper.of_arm(one[0])]
        if entry in by_entry:
            asked = [one for one in asked if identity(one[0]) in by_entry[entry][1]]
        if lacking := [arm for arm, reported in asked if metric not in (*reported, *others)]:
            yield f"`{entry}` {metric} is not reported by the arm {arm_label(lacking[0])}."


def _second_metrics(resolved: ResolvedSpace, arms: Sequence[Arm]) -> dict[str, tuple[str, set[str]]]:
    """Return the metric that each declared comparison names, and the compared arms (as JSON text), keyed by entry."""
    declared, objective = resolved.space.comparisons, resolved.space.goal.metric
    found: dict[str, tuple[str, set[str]]] = {}
    for place, one in enumerate(() if declared == "all" else declared):
        if one.metric is not None:
            compared = {key for pair in pairs_of(one, arms, objective) for key in (pair.arm, pair.against)}
            found[f"comparisons.{place}.metric"] = one.metric, compared
    return found
