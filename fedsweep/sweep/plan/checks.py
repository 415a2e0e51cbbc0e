"""The checks of a search space and its arms before anything runs.

This module does not import ray.
"""

from collections.abc import Iterator, Sequence

from fedsweep.common.errors import UserError, near
from fedsweep.results.arms import ABLATED, Arm, agrees, arm_label, counterparts, identity, shown_mapping, shown_setting
from fedsweep.results.history import ACCUMULATED
from fedsweep.results.table_columns import check_columns
from fedsweep.sweep.plan.model_counts import COUNTS
from fedsweep.sweep.plan.resolved_space import ResolvedSpace, wrong_names
from fedsweep.sweep.space.axes import Conditions, condition, holds

OF_DOMAINS = ("accuracy/domain/", "accuracy/out_of_domain")  # prefixes of metrics that do not exist for other data
SHOWN_ARMS = 4  # largest number of arms in an error message
Asked = tuple[str, str, Sequence[str]]


def check(resolved: ResolvedSpace) -> None:
    """Raise UserError for the first mistake in a search space or in one of its arms.

    A sampled search has too many possible arms, so only representative arms are checked (see `ResolvedSpace.probes`).
    """
    for wrong in (wrong_names, _wrong_arms, _wrong_conditions, _wrong_components, _wrong_runs, _wrong_metrics):
        for message in wrong(resolved):
            raise UserError(f"{resolved.request.where}: {message}")


def _wrong_arms(resolved: ResolvedSpace) -> Iterator[str]:
    """Yield error messages about the search space's settings `baseline` and `reference`.

    The baseline must be an arm of the grid, and every arm must have a baseline with which it can be compared. Each arm
    for which `reference` lists a paper's values must also be an arm of the grid.
    """
    if resolved.sampled is not None:
        return
    arms, baseline, reference = resolved.arms, resolved.space.baseline, resolved.space.reference
    if baseline is not None:
        matching = [arm for arm in arms if agrees(baseline, arm)]
        if not matching or (not baseline and arms != [{}]):
            yield f"`baseline` must be one of the arms, but {baseline} is not{_arms_to_write('baseline: ', arms)}"
            return
        found = counterparts(arms, baseline)
        for arm in arms:
            if identity(arm) not in found:
                absent = next(name for name in matching[0] if name not in baseline and name not in arm)
                leaves = f"the `baseline` {arm_label(baseline)}, which leaves `{absent}` open"
                yield f"the arm {arm_label(arm)} has no `{absent}` and cannot be compared with {leaves}."
    known = {identity(arm) for arm in resolved.space.arms(resolved.tentative, "full")} if reference else set()
    hint = _arms_to_write("arm: ", arms)
    for place, one in enumerate(reference.arms if reference else ()):
        if identity(one.arm) not in known:
            yield f"`reference.arms.{place}.arm` must be one of the arms, but {one.arm} is not{hint}"


def _arms_to_write(entry: str, arms: Sequence[Arm]) -> str:
    """Return the end of an error message, which shows how the first arms are written as the value of an entry."""
    lines = [f"`{entry}{shown_mapping(arm)}`" for arm in arms[:SHOWN_ARMS]]
    more = len(arms) - len(lines)
    return f"; write {' or '.join(lines)}{f' or one of {more} other arms' if more else ''}."


def _wrong_conditions(resolved: ResolvedSpace) -> Iterator[str]:
    """Yield an error message for each useless condition of an axis (setting `when`).

    An axis varies only in arms that meet its conditions. A condition is useless if it is true in every arm, or if it
    names a hyperparameter or a value that no arm has.
    """
    axes = resolved.space.space
    conditions = Conditions(axes, resolved.tentative)
    arms = resolved.probes if any(axis.when for axis in axes.values()) else []
    for key, axis in axes.items():
        when = f"`when` of `space.{key}`"
        for name, values in axis.conditions.items():
            runs = {id(run): run for run in (conditions.run(key, arm) for arm in arms)}.values()
            if not any(name in run for run in runs):
                known = sorted({one for run in runs for one in run})
                inside = f"{name}.name" if f"{name}.name" in known else name  # e.g. `method.name` for `method`
                yield f"{when} names `{name}`, which is not a hyperparameter of any arm{near(inside, known) or '.'}"
            for value in values:
                if not any(holds(name, [value], run) for run in runs):
                    met = dict.fromkeys(shown_setting(run[name]) for run in runs if name in run)
                    has = axes[name].shown() if name in axes else ", ".join(met)
                    never = f"which is true in no arm; the values of {name} are"
                    yield f"{when} requires that {condition(name, [value])}, {never} {has}."
            if all(holds(name, values, run) for run in runs):
                always = "which is true in every arm; remove this condition"
                yield f"{when} requires that {condition(name, values)}, {always}."


def _wrong_components(resolved: ResolvedSpace) -> Iterator[str]:
    """Yield an error message for each component that the setting `ablate` switches off without any effect.

    There is no effect if the full method already has the value that switches the component off.
    """
    seed = resolved.space.seeds[0]
    for full in [arm for arm in resolved.arms if arm.get(ABLATED) == []]:
        whole = resolved.resolve(full, seed)
        for name, value in resolved.left_out.items():
            if resolved.resolve({**full, ABLATED: [name]}, seed) == whole:
                already = f"it already has this value in the arm {arm_label(full)}"
                yield f"`ablate` sets `{name}` to {shown_setting(value)}, but {already}."


def _wrong_runs(resolved: ResolvedSpace) -> Iterator[str]:
    """Yield an error message for each arm of a grid that has the same configuration as an earlier arm.

    If `synthetic` varies, also yield an error message for each arm that does not train on synthetic images.
    """
    if resolved.space.search.name != "grid":
        resolved.resolve_all(resolved.space.search.first)
    varies_synthetic = any(name.split(".")[0] == "synthetic" for name in resolved.space.names)
    seen: dict[str, Arm] = {}
    for arm, config in resolved.configs:
        if varies_synthetic and not config.trains_on_synthetic:
            yield f"`synthetic` varies, but the arm {arm_label(arm)} does not train on synthetic images."
        content = identity(config.model_dump(mode="json"))
        if resolved.sampled is None and content in seen:
            yield f"the arms {arm_label(seen[content])} and {arm_label(arm)} are the same run."
        seen[content] = arm


def _wrong_metrics(resolved: ResolvedSpace) -> Iterator[str]:
    """Yield an error message for each metric in the search space that an arm does not report.

    If the user changed the experiment or its data, the domains may differ from the domains in the reference paper. In
    this case, the paper's accuracies for single domains are not checked.
    """
    space, request, paper = resolved.space, resolved.request, resolved.space.reference
    other_data = "experiment" in request.options or any(name.split(".")[0] == "data" for name in request.overrides)
    of_arms = [(arm, COUNTS if request.counted else config.metrics()) for arm, config in resolved.configs]

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
    check_columns(space.columns, metrics, space.objective.metric, f"{request.where}: `columns`", space.names)
    for arm, reported in of_arms:
        values = paper.of_arm(arm) if paper else {}
        for entry, metric, others in [*objectives, *(one for one in printed if one[1] in values)]:
            if metric not in (*reported, *others):
                yield f"`{entry}` {metric} is not reported by the arm {arm_label(arm)}."
