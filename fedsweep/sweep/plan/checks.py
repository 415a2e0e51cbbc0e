"""Checks of a plan before anything starts, and the error messages that name the values at fault. No Ray."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError, near
from fedsweep.federation.run_config import RunConfig
from fedsweep.results.arms import (
    ABLATED,
    Arm,
    agrees,
    arm_label,
    counterparts,
    identity,
    shown_setting,
)
from fedsweep.results.columns import check_columns
from fedsweep.results.history import ACCUMULATED
from fedsweep.sweep.plan.model_counts import COUNTS
from fedsweep.sweep.space.axes import condition
from fedsweep.sweep.space.conditions import Conditions, holds

if TYPE_CHECKING:
    from fedsweep.sweep.plan.plan import Plan


SHOWN = 3
"""Faults that are told in full."""
TRIED = 16
"""Sentences among which the simplest fault is looked for."""
Items = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Fault:
    """An arm, or the part of arms that is wrong in all that have it, and the sentence that refuses it."""

    arm: Arm
    sentence: str


def faults(wrong: Sequence[Fault], arms: Collection[Arm], most: int = SHOWN) -> list[Fault]:
    """Parts of arms that make every arm with them wrong, each with its sentence; at most so many.

    An arm with two faults is refused by the sentence of one alone. So each part is made as small as it can be while all
    arms that have it get its own sentence or have another fault already found, and the smallest part is found first.
    """
    everything = {_items(arm): arm for arm in arms}
    left = {_items(one.arm): one.sentence for one in wrong}
    explained: set[Items] = set()

    def shrunk(part: Items) -> Items:
        def blamed(smaller: Items) -> bool:
            having = (one for one in everything if smaller <= one)
            return all(one in explained or left.get(one) == left[part] for one in having)

        return _smallest(part, everything[part], blamed)

    found: list[Fault] = []
    while left and len(found) < most:
        first: dict[str, Items] = {}
        for arm, sentence in left.items():
            first.setdefault(sentence, arm)
        arm, part = min(((arm, shrunk(arm)) for arm in islice(first.values(), TRIED)), key=lambda one: len(one[1]))
        names = {name for name, _ in part}
        found.append(Fault({one: value for one, value in everything[arm].items() if one in names}, left[arm]))
        explained |= {one for one in left if part <= one}
        left = {one: sentence for one, sentence in left.items() if one not in explained}
    return found


def _smallest(part: Items, arm: Arm, blamed: Callable[[Items], bool]) -> Items:
    """The part without what it can be without; one value at least is left."""
    for name in reversed(list(arm)):
        without = frozenset(one for one in part if one[0] != name)
        if without and blamed(without):
            part = without
    return part


def told(where: str, wrong: Sequence[Fault], arms: Collection[Arm]) -> str:
    """One sentence about all that is wrong."""
    if len(wrong) == len(arms) > 1 and len({one.sentence for one in wrong}) == 1:
        return f"{where}, all {len(arms)} arms: {wrong[0].sentence}"
    found = faults(wrong, arms)
    explained = sum(any(agrees(one.arm, fault.arm) for one in found) for fault in wrong)
    if len(found) == 1 and explained == len(wrong) and (len(wrong) == 1 or len(found[0].arm) == 1):
        return f"{where}, arm {arm_label(found[0].arm)}: {found[0].sentence}"
    others = "; and others" if explained < len(wrong) else ""
    return f"{where}: {len(wrong)} of {len(arms)} arms are wrong: {_in_words(found)}{others}."


def _in_words(found: Iterable[Fault]) -> str:
    return "; ".join(f"those with {arm_label(one.arm)}, where {one.sentence.rstrip('.?')}" for one in found)


def _items(arm: Arm) -> Items:
    return frozenset((name, identity(value)) for name, value in arm.items())


OF_DOMAINS = ("accuracy/domain/", "accuracy/out_of_domain")
"""How metrics begin that other data may lack."""


def check(plan: Plan) -> None:
    """Check every arm of a grid, or of a sampled search those that speak for it, and what the space says of them.

    Raises:
        UserError: the first of these things that is wrong; of arms that cannot be, all are named.
    """
    _check_names(plan)
    _check_arms_that_are_named(plan)
    _check_conditions(plan)
    _check_components(plan)
    varies_synthetic = any(name.split(".")[0] == "synthetic" for name in plan.space.names)
    if plan.space.search.name != "grid":
        resolved(plan, plan.space.search.first, plan.space.seeds[0])
    seen: dict[str, Arm] = {}
    for arm, config in plan.configs:
        if varies_synthetic and not config.trains_on_synthetic:
            raise UserError(
                f"search space {plan.name}: `synthetic` varies, but in the arm {arm_label(arm)} nobody trains on "
                "synthetic images."
            )
        content = json.dumps(config.model_dump(mode="json"), sort_keys=True)
        if plan.sampled is None and content in seen:
            twins = f"{arm_label(seen[content])} and {arm_label(arm)}"
            raise UserError(f"search space {plan.name}: the arms {twins} are the same run.")
        seen[content] = arm
    _check_metrics(plan, [(arm, config.metrics()) for arm, config in plan.configs])


def resolved(plan: Plan, arms: Collection[Arm], seed: int) -> list[tuple[Arm, RunConfig]]:
    """The whole configuration of each arm.

    Raises:
        UserError: some cannot be; how many, and what it is about the first of them.
    """
    found: list[tuple[Arm, RunConfig]] = []
    wrong: list[Fault] = []
    for arm in arms:
        try:
            found.append((arm, plan.resolve(arm, seed)))
        except UserError as error:
            wrong.append(Fault(arm, str(error).removeprefix(plan.where(arm)).lstrip(": ")))
    if wrong:
        raise UserError(told(f"search space {plan.name}", wrong, arms))
    return found


def _check_names(plan: Plan) -> None:
    """What is there in some arms only, and what arms with names change, is checked arm by arm."""
    own = {name for changes in (plan.space.named or {}).values() for name in changes}
    own |= {name for key, axis in plan.space.space.items() if axis.when for name in [key]}
    known = flat(plan.base)
    for name in (one for one in plan.space.names if one not in own):
        if name not in known and not any(other.startswith(f"{name}.") for other in known):
            raise UserError(
                f"search space {plan.name}: `{name}` is not a hyperparameter of this run{near(name, known) or '.'}"
            )


def _check_arms_that_are_named(plan: Plan) -> None:
    """`baseline` and `reference` name arms, and each arm can be compared."""
    space, baseline = plan.space, plan.space.baseline
    if plan.sampled is not None:
        return
    if baseline is not None:
        if not any(agrees(baseline, arm) for arm in plan.arms) or (not baseline and plan.arms != [{}]):
            raise UserError(f"search space {plan.name}: `baseline` must be one of the arms, but {baseline} is not.")
        found = counterparts(plan.arms, baseline)
        for alone in (arm for arm in plan.arms if identity(arm) not in found):
            other = next(arm for arm in plan.arms if agrees(baseline, arm))
            absent = next(name for name in other if name not in baseline and name not in alone)
            raise UserError(
                f"search space {plan.name}: the arm {arm_label(alone)} has nothing to be compared with, because the "
                f"`baseline` {arm_label(baseline)} leaves `{absent}` open, which that arm lacks."
            )
    known = {identity(arm) for arm in plan.crossed} if space.reference else set()
    for place, one in enumerate(space.reference.arms if space.reference else ()):
        if identity(one.arm) not in known:
            raise UserError(
                f"search space {plan.name}: `reference.arms.{place}.arm` must be one of the arms, but {one.arm} is not."
            )


def _check_conditions(plan: Plan) -> None:
    """A condition holds in some arms and not in others, and each of its values is one that some arm has."""
    axes = plan.space.space
    conditions = Conditions(axes, plan.tentative)
    arms = plan.probes if any(axis.when for axis in axes.values()) else []
    for key, axis in axes.items():
        where = f"search space {plan.name}: `when` of `space.{key}` asks for"
        for name, values in axis.conditions.items():
            runs = {id(run): run for run in (conditions.run(key, arm) for arm in arms)}.values()
            if not any(name in run for run in runs):
                known = sorted({one for run in runs for one in run})
                inside = f"{name}.name" if f"{name}.name" in known else name  # of an object, what it is called
                hint = near(inside, known) or "."
                raise UserError(f"{where} `{name}`, which is not a hyperparameter of any arm{hint}")
            for value in values:
                if not any(holds(name, [value], run) for run in runs):
                    met = dict.fromkeys(shown_setting(run[name]) for run in runs if name in run)
                    has = axes[name].shown() if name in axes else " or ".join(met)
                    raise UserError(f"{where} {condition(name, [value])}, which no arm has; it is {has}.")
            if all(holds(name, values, run) for run in runs):
                raise UserError(f"{where} {condition(name, values)}, which every arm has; leave it out.")


def _check_components(plan: Plan) -> None:
    """A component that the full method lacks is none that could be left out."""
    seed = plan.space.seeds[0]
    for full in [arm for arm in plan.arms if arm.get(ABLATED) == []]:
        whole = plan.resolve(full, seed)
        for name, value in plan.left_out.items():
            if plan.resolve({**full, ABLATED: [name]}, seed) == whole:
                raise UserError(
                    f"search space {plan.name}: `ablate` leaves `{name}` out by {shown_setting(value)}, "
                    f"which it is already in the arm {arm_label(full)}."
                )


def _check_metrics(plan: Plan, of_arms: list[tuple[Arm, list[str]]]) -> None:
    """Find what is compared among the metrics; a paper's domains may be missing where the user took other data."""
    counted, objective = plan.counted, plan.space.objective.metric
    metrics = COUNTS if counted else list(dict.fromkeys(name for _, reported in of_arms for name in reported))
    asked = [] if counted else [("objective.metric", objective)]
    if against := plan.space.objective.against:
        asked.append(("objective.against.metric", against.metric))
    for metric in plan.space.reference.metrics() if plan.space.reference else ():
        if not (plan.other_data and metric.startswith(OF_DOMAINS)):
            asked.append(("reference", metric))
    for entry, metric in asked:
        known = [*dict.fromkeys([*metrics, *ACCUMULATED])] if entry == "objective.against.metric" else metrics
        if metric not in known:
            raise UserError(
                f"search space {plan.name}: `{entry}` {metric} is not reported by this run"
                f"{near(metric, known) or '; it reports ' + ', '.join(known) + '.'}"
            )
    if counted and plan.space.columns:
        raise UserError(f"search space {plan.name}: `columns` are of trials that are played, and `measure` plays none.")
    check_columns(plan.space.columns, metrics, plan.space.objective.metric, f"search space {plan.name}: `columns`")
    for entry, metric, arm in [] if counted else _of_other_arms(plan, of_arms):
        raise UserError(f"search space {plan.name}: `{entry}` {metric} is not reported by the arm {arm_label(arm)}.")


def _of_other_arms(plan: Plan, of_arms: list[tuple[Arm, list[str]]]) -> Iterator[tuple[str, str, Arm]]:
    """Metrics that some arm reports, but not the one of which they are asked."""
    objective, paper = plan.space.objective.metric, plan.space.reference
    for arm, reported in of_arms:
        if objective not in reported:
            yield "objective.metric", objective, arm
        if (against := plan.space.objective.against) and against.metric not in {*reported, *ACCUMULATED}:
            yield "objective.against.metric", against.metric, arm
        for metric in paper.of_arm(arm) if paper else ():
            if metric not in reported and not (plan.other_data and metric.startswith(OF_DOMAINS)):
                yield "reference", metric, arm
