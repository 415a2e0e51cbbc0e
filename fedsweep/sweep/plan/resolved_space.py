"""The arms of a search space with their configurations, and error messages about invalid arms.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Self

from fedsweep.common.config import flat
from fedsweep.common.errors import InvalidValuesError, UserError
from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import Arm, agrees, arm_label, identity
from fedsweep.sweep.space.designs import changes, left_out_values
from fedsweep.sweep.space.mistakes import Mistake
from fedsweep.sweep.space.requested_space import RequestedSpace
from fedsweep.sweep.space.settings import Resources

if TYPE_CHECKING:
    from fedsweep.federation.run_config import RunConfig

SHOWN = 3  # largest number of causes in an error message
TRIED = 16  # largest number of different messages whose causes are compared to find the simplest one
Items = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class WrongArm:
    """The error message about an invalid arm. `arm` is the whole arm, or only the entries that cause the error."""

    arm: Arm
    message: str


def causes(wrong: Sequence[WrongArm], arms: Collection[Arm], most: int = SHOWN) -> list[WrongArm]:
    """Return the simplest causes of the errors in `wrong`, at most `most` of them.

    A cause is a set of entries, such as `{"lora.rank": 0}`, that makes every arm with these entries invalid. To find a
    cause, the entries of an invalid arm are dropped one by one. An entry stays dropped if every arm with the remaining
    entries has the same error message as the invalid arm. Arms that contain a cause found earlier are not considered.
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


def describe(wrong: Sequence[WrongArm], arms: Collection[Arm]) -> Mistake:
    """Return one mistake that stands for all invalid arms.

    Args:
        wrong: The invalid arms.
        arms: All arms of the search space.
    """
    if len(wrong) == len(arms) > 1 and len({one.message for one in wrong}) == 1:
        return Mistake(wrong[0].message, about=f"all {len(arms)} arms")
    found = causes(wrong, arms)
    explained = sum(any(agrees(cause.arm, one.arm) for cause in found) for one in wrong)
    if len(found) == 1 and explained == len(wrong) and (len(wrong) == 1 or len(found[0].arm) == 1):
        return Mistake(found[0].message).of_arm(found[0].arm, f"arm {arm_label(found[0].arm)}")
    parts = "; ".join(f"those with {arm_label(one.arm)}, because {one.message.rstrip('.?')}" for one in found)
    others = "; other arms have other errors" if explained < len(wrong) else ""
    rule = f"{len(wrong)} of {len(arms)} arms are invalid: {parts}{others}."
    return Mistake(rule, arm=found[0].arm, rule=found[0].message)


def _items(arm: Arm) -> Items:
    return frozenset((name, identity(value)) for name, value in arm.items())


class ResolvedSpace:
    """The arms of a search space and the configurations of their runs. Each configuration is validated only once."""

    def __init__(self, request: RequestedSpace, base: RunConfig) -> None:
        self.request, self.name, self.space, self.base = request, request.name, request.space, base
        self.sampled = None if self.space.search.name == "grid" else self.space.search.samples
        """Number of samples, or None for a grid."""
        self._of_base = {name: identity(value) for name, value in flat(base).items()}
        self.left_out = left_out_values(self.space.ablate or {}, flat(base))
        self._configs: dict[tuple[str, int], RunConfig] = {}

    def on(self, resources: Resources) -> Self:
        """Return a shallow copy in which each trial uses `resources`."""
        changed = copy(self)
        changed.space = self.space.model_copy(update={"resources": resources})
        return changed

    @property
    def num_trials(self) -> int:
        """Number of trials of the sweep, not counting those that population-based training adds during the sweep."""
        return self.sampled or len(self.arms) * len(self.space.planned_seeds)

    @cached_property
    def all_arms(self) -> list[Arm]:
        """The arms of a grid, including those that `exclude` leaves out, before each is tuned."""
        try:
            return self.space.arms(self.tentative, self.space.design)
        except ValueError as error:
            raise self.request.origin.error([Mistake(f"{error}.")]) from None

    @cached_property
    def arms(self) -> list[Arm]:
        """The arms of a grid without those that `exclude` leaves out; empty for a sampled search."""
        if self.sampled is not None:
            return []
        arms = [arm for arm in self.all_arms if not any(agrees(one, arm) for one in self.space.exclude)]
        stage = self.request.stage
        if stage is None or stage.name != "tuning":
            return arms
        return [one for arm in arms for one in stage.with_samples(arm, self.tentative(arm))]

    @cached_property
    def probes(self) -> list[Arm]:
        """The arms to validate: all arms of a grid, or representative arms of a sampled search."""
        return self.arms if self.sampled is None else self.space.probes(self.tentative)

    @cached_property
    def configs(self) -> list[tuple[Arm, RunConfig]]:
        """The arms in `probes`, each with its configuration for the first seed."""
        return self.resolve_all(self.probes)

    def reachable(self) -> Iterator[RunConfig]:
        """Yield the configuration of each arm in `probes` for each seed."""
        yield from (config for _, config in self.configs)
        yield from (self.resolve(arm, seed) for arm in self.probes for seed in self.space.planned_seeds[1:])

    def resolve(self, arm: Arm, seed: int) -> RunConfig:
        """Return the configuration of one trial; raise UserError if it is invalid."""
        key = identity(arm), seed
        if key not in self._configs:
            changed = {**self.changes(arm), "seed": seed}
            same = all(self._of_base.get(name) == identity(value) for name, value in changed.items())
            self._configs[key] = self.base if same else self.base.override(changed, self.where(arm))
        return self._configs[key]

    def changes(self, arm: Mapping[str, Json]) -> dict[str, Json]:
        """Return the changes of an arm to the experiment, by dotted name, including the values tuned for the arm."""
        tuned = stage.changes(arm) if (stage := self.request.stage) is not None else {}
        return {**changes(arm, self.left_out, self.space.named), **tuned}

    def resolve_all(self, arms: Collection[Arm]) -> list[tuple[Arm, RunConfig]]:
        """Return each arm with its configuration for the first seed; raise one UserError about all invalid arms."""
        found, wrong = self.resolve_valid(arms)
        if wrong:
            raise self.request.origin.error([describe(wrong, arms)])
        return found

    def resolve_valid(self, arms: Collection[Arm]) -> tuple[list[tuple[Arm, RunConfig]], list[WrongArm]]:
        """Return each valid arm with its configuration for the first seed, and the first mistake of each other arm."""
        found: list[tuple[Arm, RunConfig]] = []
        wrong: list[WrongArm] = []
        for arm in arms:
            try:
                found.append((arm, self.resolve(arm, self.space.planned_seeds[0])))
            except InvalidValuesError as error:
                wrong.append(WrongArm(arm, next(iter(error.mistakes.values()))))
            except UserError as error:
                wrong.append(WrongArm(arm, str(error).removeprefix(self.where(arm)).lstrip(": ")))
        return found, wrong

    def where(self, arm: Arm) -> str:
        """Return the beginning of an error message about an arm, e.g. `search space lora_rank, arm lora.rank=4`."""
        return f"{self.request.where}, arm {arm_label(arm)}"

    def tentative(self, part: Arm) -> dict[str, Json]:
        """Return the hyperparameters of a run with the incomplete arm `part`, by dotted name.

        The values are not validated.
        """
        return self.base.tentative(changes(part, self.left_out, self.space.named))
