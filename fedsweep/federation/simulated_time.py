"""The simulated time of a round on the clients' devices, computed from the shapes of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from fedsweep.common.errors import UserError
from fedsweep.federation.client_costs import CostCounter, classes_of, cost_counter
from fedsweep.federation.devices import DeviceProfile
from fedsweep.methods.base import Allocations
from fedsweep.methods.capabilities import Messages, Stages, StandIns
from fedsweep.models.names import layer_of, moved_to
from fedsweep.results.history import SIMULATED
from fedsweep.training.costs import size_in_bytes
from fedsweep.types import Client, ClientId, ClientUpdate, LayerAllocation, ServerState

if TYPE_CHECKING:
    from fedsweep.federation.run_config import RunConfig


@dataclass(frozen=True)
class Clock:
    """A clock that computes how long the rounds of a run would take on the clients' devices.

    Attributes:
        config: The run.
        devices: The device of each client, keyed by client id.
        fewest: The smallest number of training images of any client.
    """

    config: RunConfig
    devices: Mapping[ClientId, DeviceProfile]
    fewest: int
    _known: dict[object, int] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, config: RunConfig, fewest: int) -> Clock | None:
        """Return the clock of a run, or None if the run has no devices; `fewest` is the attribute of this name."""
        devices = config.client_devices()
        return cls(config, devices, fewest) if devices else None

    def measure(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, updates: Sequence[ClientUpdate]
    ) -> dict[str, float]:
        """Return the simulated seconds of a round, which lasts as long as its slowest client.

        Args:
            state: The server's state before local training.
            cohort: The clients of the round.
            allocations: The blocks that each client of the cohort holds and trains, keyed by client id.
            updates: The updates of the cohort.

        Raises:
            UserError: The FLOPs of a client cannot be counted.
        """
        messages = Messages.of_method(self.config.method)
        everyone = size_in_bytes(messages.broadcast(state))
        sent = {one.client: size_in_bytes(one.adapter) + size_in_bytes(one.extra) for one in updates}
        seconds = []
        for client in cohort:
            row = allocations[client.id]
            down = size_in_bytes(messages.received(state, client.id, row)) + everyone
            flops = self.flops_per_step(state, client, row) * self._steps(client)
            seconds.append(self.devices[client.id].seconds(down, flops, sent.get(client.id, 0)))
        return {SIMULATED: max(seconds)}

    @cached_property
    def counter(self) -> CostCounter:
        """The counter of the clients' FLOPs."""
        return cost_counter(self.config, classes_of(self.config))

    def flops_per_step(self, state: ServerState, client: Client, row: LayerAllocation) -> int:
        """Return the FLOPs of one local step of a client. Allocations of equal size are counted once.

        Args:
            state: The server's state, which determines the stage of the method.
            client: The client.
            row: The blocks that the client holds and trains.

        Raises:
            UserError: The FLOPs cannot be counted.
        """
        stage = Stages.of_method(self.config.method).stage_of(state)
        key = stage, client.capacity, row.rank, row.excluded_prefixes, self._size(row)
        if key not in self._known:
            known = next((one for one in self.counter.clients if one.id == client.id), self.counter.clients[0])
            costs = self.counter.costs(replace(client, id=known.id), row, stage)
            if costs.flops_per_step is None:
                raise UserError(f"`devices` need the FLOPs of training, which are unknown: {costs.missing}")
            self._known[key] = costs.flops_per_step
        return self._known[key]

    def _steps(self, client: Client) -> int:
        return self.config.local.steps_for(len(client.train), self.fewest)

    def _size(self, row: LayerAllocation) -> object:
        """Return a key that is the same for allocations whose training takes the same FLOPs.

        Blocks of equal shapes are interchangeable. If BRICKs or other stand-ins replace missing blocks, the lowest held
        block also counts, because the backward pass ends there.
        """
        pattern = tuple((self._kinds[layer], layer in row.trained) for layer in row.held)
        lowest = min(row.held, default=None) if StandIns.of_method(self.config.method).has_stand_ins else None
        return pattern, lowest

    @cached_property
    def _kinds(self) -> Mapping[int, int]:
        """The first block whose tensors have the same shapes, keyed by block."""
        shapes: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        for name, tensor in self.counter.model.named_parameters():
            if (layer := layer_of(name)) is not None:
                shapes.setdefault(layer, []).append((moved_to(name, 0), tuple(tensor.shape)))
        known: dict[object, int] = {}
        return {layer: known.setdefault(tuple(sorted(one)), layer) for layer, one in shapes.items()}


def check_devices(config: RunConfig) -> None:
    """Raise UserError if a run has devices, but the FLOPs of its clients cannot be counted in one of its stages."""
    if (clock := Clock.of(config, config.local.batch_size)) is None:
        return
    client = clock.counter.clients[0]
    for stage, state in clock.counter.states.items():
        clock.flops_per_step(state, client, clock.counter.row(client, stage))
