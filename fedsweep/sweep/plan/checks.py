"""The checks of a search space and its arms before anything runs.

This module does not import ray.
"""

from collections.abc import Iterator, Mapping, Sequence

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError, near, with_all_mistakes
from fedsweep.federation.run_config import RunConfig
from fedsweep.results.arms import Arm, arm_label, identity
from fedsweep.results.history import ACCUMULATED
from fedsweep.results.table_columns import wrong_columns
from fedsweep.sweep.plan.model_counts import COUNTS
from fedsweep.sweep.plan.resolved_space import ResolvedSpace, describe
from fedsweep.sweep.plan.space_checks import Findings, find_mistakes, related

OF_DOMAINS = ("accuracy/domain/", "accuracy/out_of_domain")  # prefixes of metrics that do not exist for other data
DECIDE_METRICS = ("data", "evaluation", "method", "partition")
"""The parts of a configuration on which the names of a run's metrics depend."""
Asked = tuple[str, str, Sequence[str]]
Configs = Sequence[tuple[Arm, RunConfig]]


def check(resolved: ResolvedSpace, rejected: Mapping[str, Sequence[str]] | None = None) -> None:
    """Raise UserError with all mistakes in a search space and its arms, except those that may follow from others.

    Args:
        resolved: The search space.
        rejected: The error messages about `fixed` values that `resolved` does not contain, by dotted name.
    """
    found = find_mistakes(resolved, rejected)
    where = resolved.request.where
    messages = [*found.messages, *_wrong_runs(resolved, found.configs), *wrong_metrics(resolved, found)]
    if messages:
        raise UserError(with_all_mistakes(where, messages))


def _wrong_runs(resolved: ResolvedSpace, configs: Configs) -> Iterator[str]:
    """Yield an error message about the first two arms of a grid that have the same configuration.

    If `synthetic` varies, also yield an error message about the first arm that does not train on synthetic images. In a
    sampled search, also yield an error message about the invalid points in `search.first`.
    """
    where = resolved.request.where
    if resolved.space.search.name != "grid":
        points = resolved.space.search.first
        if invalid := resolved.resolve_valid(points)[1]:
            yield describe(where, invalid, points)
    varies_synthetic = any(name.split(".")[0] == "synthetic" for name in resolved.space.names)
    if others := [arm for arm, config in configs if varies_synthetic and not config.trains_on_synthetic]:
        yield f"{where}: `synthetic` varies, but the arm {arm_label(others[0])} does not train on synthetic images."
    seen: dict[str, Arm] = {}
    for arm, config in configs if resolved.sampled is None else ():
        first = seen.setdefault(identity(config.model_dump(mode="json")), arm)
        if first is not arm:
            yield f"{where}: the arms {arm_label(first)} and {arm_label(arm)} are the same run."
            return


def wrong_metrics(resolved: ResolvedSpace, found: Findings) -> Iterator[str]:
    """Yield an error message for each metric and each column in the search space that an arm does not report.

    If the user changed the experiment or its data, the domains may differ from the domains in the reference paper. In
    this case, the paper's accuracies for single domains are not checked. Nothing is yielded if the names of the metrics
    depend on values that have a mistake.

    Args:
        resolved: The search space.
        found: The other mistakes in the search space.
    """
    names = flat(resolved.base)
    if found.wrong and any(related(part, found.wrong, names) for part in DECIDE_METRICS):
        return
    where = resolved.request.where
    configs = found.configs or [({}, resolved.base)]
    # A wrong name may have been meant as the name of a column.
    varied = [*resolved.space.names, *(names if found.wrong else ())]
    yield from (f"{where}: {message}" for message in _wrong_metrics(resolved, configs, varied))


def _wrong_metrics(resolved: ResolvedSpace, configs: Configs, varied: Sequence[str]) -> Iterator[str]:
    space, request, paper = resolved.space, resolved.request, resolved.space.reference
    other_data = "experiment" in request.options or any(name.split(".")[0] == "data" for name in request.overrides)
    of_arms = [(arm, COUNTS if request.counted else config.metrics()) for arm, config in configs]

    # Each entry of the search space with its metric, and with allowed metrics that are not metrics of a round.
    objectives: list[Asked] = [] if request.counted else [("objective.metric", space.objective.metric, ())]
    if against := space.objective.against:
        objectives.append(("objective.against.metric", against.metric, ACCUMULATED))
    printed: list[Asked] = [
        ("reference", metric, ())
        for metric in (paper.metrics() if paper else ())
        if not (other_data and metric.startswith(OF_DOMAINS))
    ]
    metrics = list(dict.fromkeys(name for _, reported in of_arms for name in reported))
    for entry, metric, others in [*objectives, *printed]:
        known = list(dict.fromkeys([*metrics, *others]))
        if metric not in known:
            hint = near(metric, known) or f"; it reports {', '.join(known)}."
            yield f"`{entry}` {metric} is not reported by this run{hint}"
    if request.counted and space.columns:
        yield "`columns` needs trained trials, but `measure` parameters trains none."
    else:
        yield from wrong_columns(space.columns, metrics, space.objective.metric, "`columns`", varied)
    for entry, metric, others in [*objectives, *printed]:
        asked = of_arms if metric in metrics else []
        if paper is not None and entry == "reference":
            asked = [one for one in asked if metric in paper.of_arm(one[0])]
        if lacking := [arm for arm, reported in asked if metric not in (*reported, *others)]:
            yield f"`{entry}` {metric} is not reported by the arm {arm_label(lacking[0])}."
