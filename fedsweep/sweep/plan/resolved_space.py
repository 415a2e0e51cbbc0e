"""A search space resolved over its experiment: its arms and their configurations. No Ray."""

from collections.abc import Collection, Iterator
from functools import cached_property

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import Json
from fedsweep.federation.run_config import RunConfig
from fedsweep.results.arms import Arm, arm_label, identity
from fedsweep.sweep.plan.wrong_arms import WrongArm, describe
from fedsweep.sweep.space.ablation import changes, left_out_values
from fedsweep.sweep.space.designs import Design
from fedsweep.sweep.space.requested_space import RequestedSpace


class ResolvedSpace:
    """The arms of a requested space and their configurations, each of which is validated once."""

    def __init__(self, request: RequestedSpace, base: RunConfig) -> None:
        self.request, self.name, self.space, self.base = request, request.name, request.space, base
        self._of_base = flat(base)
        self.left_out = left_out_values(self.space.ablate or {}, self._of_base)
        self._configs: dict[tuple[str, int], RunConfig] = {}

    @property
    def sampled(self) -> int | None:
        """Number of samples, or None for a grid."""
        return None if self.space.search.name == "grid" else self.space.search.samples

    @property
    def num_trials(self) -> int:
        """Number of trials of the sweep, without the successors in a population."""
        return self.sampled if self.sampled is not None else len(self.arms) * len(self.space.seeds)

    @cached_property
    def arms(self) -> list[Arm]:
        """The arms of the design; empty for a sampled search."""
        return self._arms(self.space.design)

    @cached_property
    def crossed(self) -> list[Arm]:
        """The arms of the full grid, whatever the design."""
        return self._arms("full")

    def _arms(self, design: Design) -> list[Arm]:
        try:
            return [] if self.sampled is not None else self.space.arms(self.tentative, design)
        except ValueError as error:
            raise UserError(f"{self.request.where}: {error}.") from None

    @cached_property
    def probes(self) -> list[Arm]:
        """The arms of a grid, or the arms of a sampled search that are validated in place of all."""
        return self.arms if self.sampled is None else self.space.probes(self.tentative)

    @cached_property
    def configs(self) -> list[tuple[Arm, RunConfig]]:
        """The probes and their configurations under the first seed."""
        return self.resolve_all(self.probes)

    def reachable(self) -> Iterator[RunConfig]:
        """Yield the configuration of every probe and seed."""
        yield from (config for _, config in self.configs)
        yield from (self.resolve(arm, seed) for arm in self.probes for seed in self.space.seeds[1:])

    def resolve(self, arm: Arm, seed: int) -> RunConfig:
        """Return the configuration of one trial; raise UserError if the arm is impossible."""
        key = identity(arm), seed
        if key not in self._configs:
            changed = {**changes(arm, self.left_out, self.space.named), "seed": seed}
            known = {name: self._of_base.get(name) for name in changed}
            same = identity(known) == identity(changed) and changed.keys() <= self._of_base.keys()
            self._configs[key] = self.base if same else self.base.override(changed, self.where(arm))
        return self._configs[key]

    def resolve_all(self, arms: Collection[Arm]) -> list[tuple[Arm, RunConfig]]:
        """Return the configuration of each arm under the first seed; raise one UserError about all impossible arms."""
        found: list[tuple[Arm, RunConfig]] = []
        wrong: list[WrongArm] = []
        for arm in arms:
            try:
                found.append((arm, self.resolve(arm, self.space.seeds[0])))
            except UserError as error:
                wrong.append(WrongArm(arm, str(error).removeprefix(self.where(arm)).lstrip(": ")))
        if wrong:
            raise UserError(describe(self.request.where, wrong, arms))
        return found

    def where(self, arm: Arm) -> str:
        """Return the beginning of an error message about an arm."""
        return f"{self.request.where}, arm {arm_label(arm)}"

    def tentative(self, part: Arm) -> dict[str, Json]:
        """Return the values of an arm, or of a part of one, by dotted name, without validation."""
        return self.base.tentative(changes(part, self.left_out, self.space.named))
