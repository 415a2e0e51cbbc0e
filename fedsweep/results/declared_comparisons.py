"""Comparisons of arms that a search space declares before its sweep, besides those with the baseline.

This module does not import torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import Arm, agrees, counterparts, identity


class DeclaredComparison(Config):
    """A comparison between arms that a search space declares, by the objective or by another metric.

    If neither `arm` nor `against` has a value for an axis, arms are compared within each value of that axis.
    """

    arm: Arm = Field(
        description="arms to compare, as values by dotted name (like `baseline`); an empty mapping means all arms"
    )
    against: Arm = Field(
        min_length=1, description="values of the arms to compare with; for other axes, they have the values of the arm"
    )
    metric: str | None = Field(
        None, description="metric after the last round, by which the arms are compared; `null` means the objective"
    )


Declared = Literal["all"] | tuple[DeclaredComparison, ...]
"""The setting `comparisons`: all pairs of arms, or a list of comparisons."""


class Pair(NamedTuple):
    """Two arms, as JSON text (see `identity`), and the metric of their comparison: `arm` minus `against`."""

    arm: str
    against: str
    metric: str

    @property
    def test(self) -> tuple[frozenset[str], str]:
        """A key that two pairs share if they are the same test, perhaps in the opposite direction."""
        return frozenset((self.arm, self.against)), self.metric


def pairs_of(one: DeclaredComparison, arms: Sequence[Mapping[str, Json]], objective: str) -> list[Pair]:
    """Return the pairs of arms that a declared comparison contains.

    Pairs of an arm with itself are left out, and so are arms whose counterpart is not in `arms`.

    >>> arms = [{"rank": 4, "lr": 0.1}, {"rank": 8, "lr": 0.1}, {"rank": 4, "lr": 0.2}, {"rank": 8, "lr": 0.2}]
    >>> declared = DeclaredComparison(arm={"rank": 4}, against={"rank": 8})
    >>> [(pair.arm, pair.against) for pair in pairs_of(declared, arms, "loss/test")]  # doctest: +NORMALIZE_WHITESPACE
    [('{"lr": 0.1, "rank": 4}', '{"lr": 0.1, "rank": 8}'), ('{"lr": 0.2, "rank": 4}', '{"lr": 0.2, "rank": 8}')]
    """
    others = {key: identity(other) for key, other in counterparts(arms, one.against).items()}
    keys = [identity(arm) for arm in arms if agrees(one.arm, arm)]
    return [Pair(key, others[key], one.metric or objective) for key in keys if others.get(key, key) != key]


def declared_pairs(
    declared: Declared, arms: Sequence[Mapping[str, Json]], objective: str, against: Mapping[str, str]
) -> list[Pair]:
    """Return the pairs of arms that the setting `comparisons` declares, each test once.

    Args:
        declared: The setting.
        arms: All arms of the sweep.
        objective: The metric of comparisons that name no metric.
        against: The baseline of each arm that has one. If all pairs are declared, a pair with a baseline has the
            direction of the comparison with the baseline. In any other pair, the later arm is compared with the earlier
            arm.
    """
    return [*{pair.test: pair for pair in _in_order(declared, arms, objective, against)}.values()]


def baselines(arms: Sequence[Mapping[str, Json]], baseline: Mapping[str, Json] | None) -> dict[str, str]:
    """Map the `identity` of each arm to that of its baseline (see `counterparts`); empty without a baseline."""
    others = {} if baseline is None else counterparts(arms, baseline)
    return {arm: identity(other) for arm, other in others.items()}


def family_of(
    declared: Declared, arms: Sequence[Mapping[str, Json]], objective: str, against: Mapping[str, str]
) -> list[Pair]:
    """Return all pairs of arms that are tested: those with the baseline, and then the declared ones, each test once.

    The arguments are those of `declared_pairs`. A baseline, which is its own baseline, is not compared with itself.
    """
    planned = [Pair(key, other, objective) for key, other in against.items() if key != other]
    distinct: dict[object, Pair] = {}
    for pair in (*planned, *declared_pairs(declared, arms, objective, against)):
        distinct.setdefault(pair.test, pair)
    return [*distinct.values()]


def _in_order(
    declared: Declared, arms: Sequence[Mapping[str, Json]], objective: str, against: Mapping[str, str]
) -> Iterator[Pair]:
    if declared != "all":
        for one in declared:
            yield from pairs_of(one, arms, objective)
        return
    for first, second in combinations(map(identity, arms), 2):
        yield Pair(first, second, objective) if against.get(first) == second else Pair(second, first, objective)
