"""The checks of the comparisons and the excluded arms of a search space, without torch and ray."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fedsweep.common.errors import near
from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import Arm, agrees, arm_label, counterparts, equality, identity, shown_mapping, shown_setting
from fedsweep.results.declared_comparisons import (
    Declared,
    DeclaredComparison,
    Pair,
    baselines,
    declared_pairs,
    family_of,
    pairs_of,
)

if TYPE_CHECKING:
    from fedsweep.sweep.space.search_space import SearchSpace

MOST = 1000  # a report with more comparisons would take minutes and detect hardly any difference
SHOWN_VALUES = 12  # largest number of values in an error message


def wrong_comparisons(
    declared: Declared, arms: Sequence[Arm], objective: str, lacking: Collection[str] = ()
) -> Iterator[str]:
    """Yield error messages about the setting `comparisons` of a grid.

    Args:
        declared: The setting.
        arms: All arms of the grid.
        objective: The metric of comparisons that name no metric.
        lacking: Dotted names that `arms` lack because of other mistakes. Comparisons with these names are not checked.
    """
    if declared != "all":
        known = [(place, one) for place, one in enumerate(declared) if not {*one.arm, *one.against} & {*lacking}]
        messages = [message for place, one in known for message in _wrong(place, one, arms)]
        yield from messages
        if messages or lacking:
            return
        yield from _given_twice(declared, arms, objective)
    elif len(arms) < 2 and not lacking:
        yield "`comparisons` all needs at least two arms, but there is only one."
    many = math.comb(len(arms), 2) if declared == "all" else len(declared_pairs(declared, arms, objective, {}))
    if many > MOST:
        yield f"`comparisons` must contain at most {MOST:,} pairs of arms, but it contains {many:,}."


def wrong_family(space: SearchSpace, arms: Sequence[Arm]) -> Iterator[str]:
    """Yield an error message if an arm of a grid with seeds until decided is compared with nothing.

    No message is yielded if the setting `comparisons` has mistakes, since it could follow from them.
    """
    objective, rule, against = space.goal.metric, "`seeds` {until: decided} needs", baselines(arms, space.baseline)
    if space.comparisons:
        family = family_of(space.comparisons, arms, objective, against)
        compared = {arm for pair in family for arm in (pair.arm, pair.against)}
        lonely = [arm for arm in arms if identity(arm) not in compared]
        if lonely and not any(wrong_comparisons(space.comparisons, arms, objective)):
            rule = f"{rule} a comparison for every arm, but the arm {arm_label(lonely[0])} is compared with nothing"
            yield f"{rule}; add one to `comparisons`, or leave the arm out."
    elif lonely := [arm for arm in arms if identity(arm) not in against]:
        yield f"{rule} a baseline for every arm, but the arm {arm_label(lonely[0])} has none."
    elif all(one == other for one, other in against.items()):
        yield f"{rule} an arm to compare with the baseline, but there is none."


def wrong_exclusions(space: SearchSpace, every: Sequence[Arm], kept: Sequence[Arm]) -> Iterator[str]:
    """Yield error messages about the setting `exclude` of a grid.

    Args:
        space: The search space.
        every: All arms of the grid.
        kept: The arms that `exclude` does not leave out.
    """
    for place, part in enumerate(space.exclude):
        if not any(agrees(part, arm) for arm in every):
            rule = f"must match an arm, but {shown_mapping(part)} matches none"
            yield f"`exclude.{place}` {rule}{_hint(part, every)}"
    if not kept:
        yield "`exclude` must leave at least one arm, but it leaves none."
    elif (baseline := space.baseline) is not None:
        of_all, of_kept = (any(agrees(baseline, arm) for arm in arms) for arms in (every, kept))
        if of_all and not of_kept:
            yield f"`exclude` must not leave out the `baseline` {arm_label(baseline)}."


def _wrong(place: int, one: DeclaredComparison, arms: Sequence[Arm]) -> Iterator[str]:
    """Yield an error message if a declared comparison contains no arm, or an arm without a counterpart."""
    where, wrong = f"`comparisons.{place}", False
    for entry, part in (("arm", one.arm), ("against", one.against)):
        if not any(agrees(part, arm) for arm in arms):
            wrong = True
            yield f"{where}.{entry}` must match an arm, but {shown_mapping(part)} matches none{_hint(part, arms)}"
    if wrong:
        return
    others, matching = counterparts(arms, one.against), [arm for arm in arms if agrees(one.arm, arm)]
    if lonely := [arm for arm in matching if identity(arm) not in others]:
        rule = f"compares the arm {arm_label(lonely[0])} with {shown_mapping(one.against)}"
        yield f"{where}` {rule}, but no arm has these values and otherwise those of the arm."
    elif all(others[identity(arm)] == arm for arm in matching):
        yield f"{where}` must compare different arms, but it compares {arm_label(matching[0])} with itself."


def _hint(part: Mapping[str, Json], arms: Sequence[Arm]) -> str:
    """Return the end of an error message about an incomplete arm that matches no arm of the grid."""
    names = list(dict.fromkeys(name for arm in arms for name in arm))
    for name, value in part.items():
        if name not in names:
            return f"; `{name}` is not varied{near(name, names) or f', but {_listed(names)}.'}"
        values = list({equality(arm[name]): arm[name] for arm in arms if name in arm}.values())
        if equality(value) not in map(equality, values):
            close = near(value, [one for one in values if isinstance(one, str)]) if isinstance(value, str) else ""
            return f"; the values of `{name}` are {_listed(map(shown_setting, values))}{close or '.'}"
    return "; no arm has all these values together."


def _listed(values: Iterable[str]) -> str:
    shown = list(values)
    return ", ".join([*shown[:SHOWN_VALUES], *["..."] * (len(shown) > SHOWN_VALUES)])


def _given_twice(declared: Sequence[DeclaredComparison], arms: Sequence[Arm], objective: str) -> Iterator[str]:
    """Yield an error message about the first two declared comparisons that contain the same test."""
    seen: dict[object, tuple[int, Pair]] = {}
    labels = {identity(arm): arm_label(arm) for arm in arms}
    for place, one in enumerate(declared):
        for pair in pairs_of(one, arms, objective):
            first, _ = seen.setdefault(pair.test, (place, pair))
            if first != place:
                test = f"{labels[pair.arm]} with {labels[pair.against]} by {pair.metric}"
                yield f"`comparisons` must contain each comparison once, but {first} and {place} both compare {test}."
                return
