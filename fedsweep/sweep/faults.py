"""Which values of wrong arms are to blame, in one sentence. No ray, no torch."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from fedsweep.results.arms import Arm, agrees, arm_label, identity

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
