"""Error messages about impossible arms, and the smallest parts of arms that explain them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from fedsweep.results.arms import Arm, agrees, arm_label, identity

SHOWN = 3
"""Number of causes that an error message names."""
TRIED = 16
"""Number of messages among which the simplest cause is searched."""
Items = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class WrongArm:
    """An impossible arm, or the part that makes every arm with it impossible, and the message about it."""

    arm: Arm
    message: str


def causes(wrong: Sequence[WrongArm], arms: Collection[Arm], most: int = SHOWN) -> list[WrongArm]:
    """Return at most `most` parts of arms that make every arm with them impossible, the smallest first.

    An arm with two causes has the message of only one. A part is therefore reduced as long as every arm with it has its
    message or is explained by a part found before.
    """
    everything = {_items(arm): arm for arm in arms}
    left = {_items(one.arm): one.message for one in wrong}
    explained: set[Items] = set()

    def shrunk(whole: Items) -> Items:
        part = whole
        for name in reversed([*everything[whole]]):
            smaller = frozenset(one for one in part if one[0] != name)
            having = (one for one in everything if smaller <= one)
            if smaller and all(one in explained or left.get(one) == left[whole] for one in having):
                part = smaller
        return part

    found: list[WrongArm] = []
    while left and len(found) < most:
        first: dict[str, Items] = {}
        for arm, message in left.items():
            first.setdefault(message, arm)
        arm, part = min(((arm, shrunk(arm)) for arm in islice(first.values(), TRIED)), key=lambda one: len(one[1]))
        names = {name for name, _ in part}
        found.append(WrongArm({one: value for one, value in everything[arm].items() if one in names}, left[arm]))
        explained |= {one for one in left if part <= one}
        left = {one: message for one, message in left.items() if one not in explained}
    return found


def describe(where: str, wrong: Sequence[WrongArm], arms: Collection[Arm]) -> str:
    """Return one sentence about all impossible arms among `arms`."""
    if len(wrong) == len(arms) > 1 and len({one.message for one in wrong}) == 1:
        return f"{where}, all {len(arms)} arms: {wrong[0].message}"
    found = causes(wrong, arms)
    explained = sum(any(agrees(cause.arm, one.arm) for cause in found) for one in wrong)
    if len(found) == 1 and explained == len(wrong) and (len(wrong) == 1 or len(found[0].arm) == 1):
        return f"{where}, arm {arm_label(found[0].arm)}: {found[0].message}"
    parts = "; ".join(f"those with {arm_label(one.arm)}, where {one.message.rstrip('.?')}" for one in found)
    others = "; and others" if explained < len(wrong) else ""
    return f"{where}: {len(wrong)} of {len(arms)} arms are wrong: {parts}{others}."


def _items(arm: Arm) -> Items:
    return frozenset((name, identity(value)) for name, value in arm.items())
