"""The checks of a search space that need neither torch nor ray: names, values, the baseline, conditions, components.

All mistakes are reported at once. A mistake can cause further error messages: if the name of an axis is misspelt, the
baseline is no arm, for example. Such messages are left out, because every check considers only the sound part of the
search space, which contains no entry that another mistake affects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedsweep.common.config import flat
from fedsweep.common.errors import InvalidValuesError, UserError, near
from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import (
    ABLATED,
    NAMED,
    Arm,
    agrees,
    arm_label,
    counterparts,
    identity,
    shown_mapping,
    shown_setting,
)
from fedsweep.sweep.plan.comparison_checks import wrong_comparisons, wrong_exclusions
from fedsweep.sweep.plan.resolved_space import ResolvedSpace, causes, describe
from fedsweep.sweep.space.axes import Axis, Conditions, asking_order, below, condition, holds, names_of, valued
from fedsweep.sweep.space.designs import changes
from fedsweep.sweep.space.mistakes import Mistake, WrongSpaceError
from fedsweep.sweep.space.search_space import SearchSpace

if TYPE_CHECKING:
    from fedsweep.federation.run_config import RunConfig

SHOWN_ARMS = 4  # largest number of arms in an error message


@dataclass(frozen=True)
class Findings:
    """The mistakes in a search space, and the part of the search space that they do not affect."""

    mistakes: list[Mistake]
    wrong: frozenset[str]
    """The dotted names of the hyperparameters to which the mistakes refer."""
    sound: ResolvedSpace
    """The search space without the wrong hyperparameters, and without everything that depends on them."""
    configs: list[tuple[Arm, RunConfig]]
    """The valid arms, each with its configuration for the first seed. Arms without a useless component are left out."""


def valid_changes(base: RunConfig, asked: Mapping[str, Json]) -> tuple[RunConfig, dict[str, list[Mistake]]]:
    """Apply the changes in `asked` that are valid, and return the mistakes in the other changes by dotted name.

    If changes remain invalid without the changes that have mistakes, none is applied, and all are returned.

    Args:
        base: The configuration to change.
        asked: The changes, keyed by dotted name.
    """
    try:
        return base.override(asked, "changes"), {}
    except InvalidValuesError as error:
        rejected = _by_change(error, asked, "fixed.")
    kept = {name: one for name, one in asked.items() if not below(name, rejected)}
    try:
        return base.override(kept, "changes"), rejected
    except UserError:
        return base, {name: rejected.get(name, []) for name in asked}


def find_mistakes(
    resolved: ResolvedSpace, rejected: Mapping[str, Sequence[Mistake]] | None = None, one_by_one: bool = False
) -> Findings:
    """Return all mistakes that can be found without torch, except those that may follow from other mistakes.

    A sampled search has too many possible arms, so only representative arms are checked (see `ResolvedSpace.probes`).

    Args:
        resolved: The search space.
        rejected: The mistakes in `fixed` values that `resolved` does not contain, by dotted name.
        one_by_one: Whether each value is also checked alone. This is possible if the configuration has no rules that
            involve several values.
    """
    space, rejected = resolved.space, rejected or {}
    wrong: dict[str, list[Mistake]] = {
        **{name: [] for name in resolved.request.wrong},
        **{name: [*several] for name, several in rejected.items()},
    }
    for name, message in _unknown_names(resolved):
        if not below(name, rejected):
            wrong[name] = [Mistake(message)]
    if one_by_one:
        for name, mistake in list(_invalid_values(_sound_part(resolved, wrong))):
            wrong.setdefault(name, []).append(mistake)
    mistakes = [*resolved.request.mistakes, *(one for several in wrong.values() for one in several)]
    names = {*wrong}
    sound = _sound_part(resolved, names)
    try:
        for key, several in _wrong_conditions(sound).items():
            mistakes += map(Mistake, several)
            names |= {*names_of(key)}
        sound = _sound_part(resolved, names)
        arms = sound.probes
    except WrongSpaceError as error:  # the baseline of a one-factor design is wrong
        return Findings([*mistakes, *error.mistakes], frozenset(names), sound, [])
    configs, invalid = sound.resolve_valid(arms)
    if invalid:
        mistakes.append(describe(invalid, arms))
        names |= {name for cause in causes(invalid, arms) for name in _names(cause.arm, space)}
        sound = _sound_part(resolved, names)
    mistakes += map(Mistake, _wrong_arms(resolved, sound))
    if space.comparisons and sound.sampled is None:
        lacking = {*space.names} - {*sound.space.names}
        lacking |= {ABLATED} if space.ablate != sound.space.ablate else set()
        mistakes += map(Mistake, wrong_comparisons(space.comparisons, sound.arms, space.goal.metric, lacking))
    useless = _useless_components(sound)
    mistakes += map(Mistake, useless.values())
    differing = [
        (arm, config) for arm, config in configs if not _names({ABLATED: arm.get(ABLATED)}, space) & {*useless}
    ]
    return Findings(mistakes, frozenset(names), sound, differing)


def related(name: str, wrong: Collection[str], known: Collection[str]) -> bool:
    """Return whether a mistake about one of the names in `wrong` may affect the hyperparameter `name`.

    It may if both names begin with the same part, e.g. `lora`, or if the wrong name begins with no known part.
    """
    parts = {one.split(".")[0] for one in wrong}
    return name.split(".")[0] in parts or not parts <= {one.split(".")[0] for one in known}


def _names(arm: Arm, space: SearchSpace) -> set[str]:
    """Return the dotted names of all hyperparameters that an arm sets, also those that its entries name in words."""
    ablated = arm.get(ABLATED)
    return {*changes({**arm, ABLATED: []}, {}, space.named)} | {*(ablated if isinstance(ablated, list) else ())}


def _by_change(error: InvalidValuesError, asked: Collection[str], entry: str = "") -> dict[str, list[Mistake]]:
    """Return the mistakes of each change that caused one, keyed by the change's dotted name.

    `entry` is the entry of the search space with the changes and a dot, if it is known.
    """
    found: dict[str, list[Mistake]] = {}
    for name, sentence in error.mistakes.items():
        above = [one for one in asked if below(name, [one])]
        caused = [max(above, key=len)] if above else [one for one in asked if below(one, [name])] or [*asked]
        for place, one in enumerate(caused):
            found.setdefault(one, []).extend(
                [Mistake(sentence, f"{entry}{name}" if entry and name else "")] * (place == 0)
            )
    return found


def _unknown_names(resolved: ResolvedSpace) -> Iterator[tuple[str, str]]:
    """Yield each name in the search space that is not a hyperparameter, with an error message.

    Two kinds of names are checked with the arms instead: the names of hyperparameters that vary only under a condition,
    and the names in the setting `named`.
    """
    space, known = resolved.space, flat(resolved.base)
    conditional = {key for key, axis in space.space.items() if axis.when}
    own = conditional.union(*(space.named or {}).values())
    tuned = space.tune_each.space if space.tune_each else ()
    for name in (one for one in (*space.names, *tuned) if one not in own):
        if name not in known and not any(other.startswith(f"{name}.") for other in known):
            yield name, f"`{name}` is not a hyperparameter of this run{near(name, known) or '.'}"


def _invalid_values(resolved: ResolvedSpace) -> Iterator[tuple[str, Mistake]]:
    """Yield the name of each invalid value of an axis, a named arm or a component, with the mistake.

    A value is left out if it may be valid only in some arms.
    """
    space = resolved.space
    tuned = space.tune_each.space if space.tune_each else {}
    free = [(key, axis) for key, axis in {**space.space, **tuned}.items() if not axis.when]
    parts: list[Arm] = [valued(key, value) for key, axis in free for value in axis.probes()]
    for name in space.named or ():
        parts.append({NAMED: name})
    for name in space.ablate or ():
        parts.append({ABLATED: [name]})
    for part in parts:
        asked = changes(part, resolved.left_out, space.named)
        if any(name != one and below(name, [one]) for name in asked for one in space.names):
            continue
        try:
            resolved.base.override(asked, resolved.where(part))
        except InvalidValuesError as error:
            for name, mistakes in _by_change(error, asked).items():
                yield from ((name, one.of_arm(part, f"arm {arm_label(part)}")) for one in mistakes)


def _sound_part(resolved: ResolvedSpace, wrong: Collection[str]) -> ResolvedSpace:
    """Return the search space without the names in `wrong`, and without the axes and entries that depend on them."""
    if not wrong:
        return resolved
    space, dropped, known = resolved.space, {*wrong}, flat(resolved.base)
    axes: dict[str, Axis] = {}
    for key in asking_order(space.space):
        axis, names = space.space[key], names_of(key)
        if any(below(name, dropped) for name in names) or any(related(one, dropped, known) for one in axis.conditions):
            dropped |= {*names}
        else:
            axes[key] = axis
    named = {
        arm: {name: value for name, value in own.items() if not below(name, dropped)}
        for arm, own in (space.named or {}).items()
    }
    ablate = {name: value for name, value in (space.ablate or {}).items() if not below(name, dropped)}
    tuned = space.tune_each.without(dropped) if space.tune_each is not None else None
    reduced: SearchSpace = space.model_copy(
        update={
            "space": {key: axes[key] for key in space.space if key in axes},
            "named": named or None,
            "ablate": ablate or None,
            "tune_each": tuned,
        }
    )
    if reduced.names != space.names and space.baseline is not None:
        varied = {
            *(name for key in axes for name in names_of(key)),
            NAMED,
            *([ABLATED] if ablate == space.ablate else []),
        }
        baseline = {name: value for name, value in space.baseline.items() if name in varied}
        design = space.design if baseline else "full"
        reduced = reduced.model_copy(update={"baseline": baseline or None, "design": design})
    return ResolvedSpace(replace(resolved.request, space=reduced), resolved.base)


def _wrong_arms(resolved: ResolvedSpace, sound: ResolvedSpace) -> Iterator[str]:
    """Yield error messages about the search space's settings `exclude`, `baseline` and `reference`.

    Each entry of `exclude` must match an arm, and must not leave out the baseline. The baseline must be an arm of the
    grid, and every arm must have a baseline with which it can be compared. Each arm for which `reference` lists a
    paper's values must also be an arm of the grid.
    """
    if resolved.sampled is not None:
        return
    arms, baseline, reference = sound.arms, sound.space.baseline, resolved.space.reference
    whole = sound.space.names == resolved.space.names
    if whole and (messages := [*wrong_exclusions(resolved.space, sound.all_arms, arms)]):
        yield from messages
        return
    if baseline is not None:
        matching = [arm for arm in arms if agrees(baseline, arm)]
        if not matching or (not baseline and arms != [{}]):
            hint = _arms_to_write("baseline: ", arms) if whole else "."
            yield f"`baseline` must be one of the arms, but {resolved.space.baseline} is not{hint}"
            return
        found = counterparts(arms, baseline)
        lacking: dict[str, Arm] = {}
        for arm in arms:
            if identity(arm) not in found:
                absent = next(name for name in matching[0] if name not in baseline and name not in arm)
                lacking.setdefault(absent, arm)
        for absent, arm in lacking.items():
            leaves = f"the `baseline` {arm_label(baseline)}, which leaves `{absent}` open"
            yield f"the arm {arm_label(arm)} has no `{absent}` and cannot be compared with {leaves}."
    if reference is None or not whole:
        return
    known = {identity(arm) for arm in sound.space.arms(sound.tentative, "full")}
    hint = _arms_to_write("arm: ", arms)
    for place, one in enumerate(reference.arms):
        if identity(one.arm) not in known:
            yield f"`reference.arms.{place}.arm` must be one of the arms, but {one.arm} is not{hint}"


def _arms_to_write(entry: str, arms: Sequence[Arm]) -> str:
    """Return the end of an error message, which shows how the first arms are written as the value of an entry."""
    lines = [f"`{entry}{shown_mapping(arm)}`" for arm in arms[:SHOWN_ARMS]]
    more = len(arms) - len(lines)
    rest = "another arm" if more == 1 else f"one of {more} other arms"
    return f"; write {' or '.join(lines)}{f' or {rest}' if more else ''}."


def _wrong_conditions(resolved: ResolvedSpace) -> dict[str, list[str]]:
    """Return the error messages about useless conditions (setting `when`), keyed by axis.

    An axis varies only in arms that meet its conditions. A condition is useless if it is true in every arm, or if it
    names a hyperparameter or a value that no arm has.
    """
    axes = resolved.space.space
    conditions = Conditions(axes, resolved.tentative)
    arms = resolved.probes if any(axis.when for axis in axes.values()) else []
    found: dict[str, list[str]] = {}
    for key, axis in axes.items():
        when = f"`when` of `space.{key}`"
        for name, values in axis.conditions.items():
            runs = [*{id(run): run for run in (conditions.run(key, arm) for arm in arms)}.values()]
            found.setdefault(key, []).extend(
                f"{when} {problem}" for problem in _wrong_condition(name, values, runs, axes.get(name))
            )
    return {key: messages for key, messages in found.items() if messages}


def _wrong_condition(
    name: str, values: Sequence[Json], runs: Sequence[Mapping[str, Json]], axis: Axis | None
) -> Iterator[str]:
    """Yield what is wrong with the condition that the hyperparameter `name` of a run has one of the `values`."""
    if not any(name in run for run in runs):
        known = sorted({one for run in runs for one in run})
        inside = f"{name}.name" if f"{name}.name" in known else name  # e.g. `method.name` for `method`
        yield f"names `{name}`, which is not a hyperparameter of any arm{near(inside, known) or '.'}"
        return
    never = [value for value in values if not any(holds(name, [value], run) for run in runs)]
    for value in never:
        met = dict.fromkeys(shown_setting(run[name]) for run in runs if name in run)
        has = axis.shown() if axis else ", ".join(met)
        yield f"requires that {condition(name, [value])}, which is true in no arm; the values of {name} are {has}."
    if not never and all(holds(name, values, run) for run in runs):
        yield f"requires that {condition(name, values)}, which is true in every arm; remove this condition."


def _useless_components(resolved: ResolvedSpace) -> dict[str, str]:
    """Return an error message for each component that the setting `ablate` switches off without any effect, by name.

    There is no effect if the full method already has the value that switches the component off.
    """
    found: dict[str, str] = {}
    for full, whole in resolved.resolve_valid([arm for arm in resolved.arms if arm.get(ABLATED) == []])[0]:
        for name, value in resolved.left_out.items():
            if [config for _, config in resolved.resolve_valid([{**full, ABLATED: [name]}])[0]] == [whole]:
                already = f"it already has this value in the arm {arm_label(full)}"
                found.setdefault(name, f"`ablate` sets `{name}` to {shown_setting(value)}, but {already}.")
    return found
