"""The two stages of FedMS: FedAvg on a global expert, then local experts with SAL and the gate.

Both stages have the same functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.methods.base import Allocations, FederatedMethod, state_as
from fedsweep.methods.capabilities import adapter_of, predicted
from fedsweep.methods.fedms.gate import Gate, GateConfig, mixed, mixing, mixture_loss
from fedsweep.models.activation_cache import FrozenFunction, digest_of
from fedsweep.models.base import Reader
from fedsweep.models.layered import Images, LayeredModel
from fedsweep.models.names import names_within
from fedsweep.training.evaluation import accuracy
from fedsweep.training.local_training import CohortTrainer, LocalTask, cross_entropy
from fedsweep.types import AdapterState, Batch, Client, ClientId, ClientUpdate, ImageSet, LayerAllocation, ServerState

GATE = "gate."
MIX, SPREAD = "gate/lambda", "gate/spread"


class SALConfig(Config):
    """Sparsely Activated LoRA, which decides which blocks of a local expert are trained (Section 3.2)."""

    threshold: float = Field(
        0.01, description="delta: if the accuracy gains less than this, the next lower block is activated (Eq. 5)"
    )
    queue: int = Field(
        3, gt=0, description="Q, the number of past accuracies; a gain is the difference to their mean (Eq. 5)"
    )
    initial: int = Field(1, gt=0, description="number of topmost blocks of each encoder that are active at the start")

    def is_stuck(self, past: Sequence[float], accuracy: float) -> bool:
        """Return whether the queue is full and the gain Delta over its mean is below delta (Eq. 5)."""
        return len(past) == self.queue and accuracy - sum(past) / self.queue < self.threshold


@dataclass(frozen=True)
class FedMSState(ServerState):
    """The server's state with the memory of each client; `adapter` contains the global expert and the gate.

    Attributes:
        stage: The present stage, 1 or 2.
        experts: The tensors in which each client's local expert differs from the global expert.
        queues: The last accuracies of each client.
        active: The number of active blocks of each client.
    """

    stage: int = 1
    experts: dict[ClientId, AdapterState] = field(default_factory=dict)
    queues: dict[ClientId, tuple[float, ...]] = field(default_factory=dict)
    active: dict[ClientId, int] = field(default_factory=dict)


def of(state: ServerState) -> FedMSState:
    """Return `state` as the state of FedMS; raise TypeError for another method's state."""
    return state_as(FedMSState, state)


class GlobalStage:
    """Stage one: FedAvg on the adapters of the global expert (Section 3.1). The gate is not used."""

    objective = staticmethod(cross_entropy)

    def row(self, state: FedMSState, client: ClientId) -> LayerAllocation:
        """Allocate all blocks, to be run and trained."""
        return LayerAllocation(state.layers, state.layers, excluded_prefixes=(GATE,))

    def received_names(self, state: FedMSState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Return the names of the tensors of the global expert."""
        return names_within(state.adapter, row.held, row.excluded_prefixes)

    def sent_names(self, names: Sequence[str]) -> list[str]:
        """Return `names`: a client sends all tensors that it trains."""
        return list(names)

    def num_frozen_blocks(self, state: FedMSState, client: ClientId | None) -> int:
        """Return 0: all blocks are trained."""
        return 0

    def side_inputs(
        self, state: FedMSState, reader: Reader, sets: Mapping[str, ImageSet]
    ) -> dict[str, Mapping[str, Tensor]]:
        """Return no side inputs."""
        return {name: {} for name in sets}

    def local_updates(
        self, state: FedMSState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train all clients, starting from the global expert."""
        return trainer.fit([LocalTask(one, state.adapter, allocations[one.id], self.objective) for one in cohort])

    def keep(self, state: FedMSState, updates: Sequence[ClientUpdate]) -> FedMSState:
        """Return `state`: clients keep no tensors of their own."""
        return state

    def predict(self, state: FedMSState, model: LayeredModel, images: Images) -> Tensor:
        """Return the logits of the global expert, which all clients share."""
        return cast(Tensor, model(images, state.layers))

    def active(self, state: FedMSState, updates: Sequence[ClientUpdate]) -> Mapping[ClientId, int]:
        """Return the number of active blocks of each client: all blocks."""
        return dict.fromkeys(state.active, len(state.layers))

    def gate_metrics(self, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Return the mean and standard deviation of lambda over images: 1 and 0, as there are no local experts."""
        return {MIX: 1.0, SPREAD: 0.0}


@dataclass(frozen=True)
class LocalStage:
    """Stage two: each client trains the active blocks of its local expert together with the gate (Section 3.3).

    The global expert is frozen, and local experts stay with their clients. Only gates are sent and averaged.
    """

    objective = staticmethod(mixture_loss)
    method: FederatedMethod
    sal: SALConfig
    gate: GateConfig

    def row(self, state: FedMSState, client: ClientId) -> LayerAllocation:
        """Allocate all blocks, of which the active ones are trained."""
        return LayerAllocation(state.layers, state.layers[self.num_frozen_blocks(state, client) :])

    def received_names(self, state: FedMSState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Return the names of the gate's tensors and, if the client has no local expert yet, the global expert's."""
        names = names_within(state.adapter, row.held, row.excluded_prefixes)
        return self.sent_names(names) if client in state.experts else names

    def sent_names(self, names: Sequence[str]) -> list[str]:
        """Return the names of the gate's tensors."""
        return [name for name in names if name.startswith(GATE)]

    def num_frozen_blocks(self, state: FedMSState, client: ClientId | None) -> int:
        """Return the number of blocks below a local expert's active blocks, or all blocks for the global expert."""
        return len(state.layers) - (state.active[client] if client else 0)

    def side_inputs(
        self, state: FedMSState, reader: Reader, sets: Mapping[str, ImageSet]
    ) -> dict[str, Mapping[str, Tensor]]:
        """Return the logits (n, classes) of the global expert and, if the trunk is frozen, its features (n, width)."""
        model = reader.model
        model.load_adapter(state.adapter)
        known: dict[str, dict[str, Tensor]] = {
            name: {"global": predicted(self.method, state, reader, images).clone()} for name, images in sets.items()
        }
        if self.gate.trained == "adapter":
            gate = cast(Gate, model.gate)
            seen = FrozenFunction(digest_of(f"gate {gate.identity}", {}, gate.mean.device), gate.features)
            for name, images in sets.items():
                known[name]["trunk"] = reader.kept.all(seen, images, reader.batch_size).to(gate.mean.device)
        return {**known}

    def local_updates(
        self, state: FedMSState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train local experts and gates, and measure each client's accuracy on its validation images for SAL."""
        held_out = {one.id: cast(ImageSet, one.validation) for one in cohort}
        seen = {f"train/{one.id}": one.train for one in cohort} | held_out
        inputs = self.side_inputs(state, trainer.reader, seen)
        tasks = []
        for one in cohort:
            start, own_inputs = adapter_of(self.method, state, one.id), inputs[f"train/{one.id}"]
            tasks.append(LocalTask(one, start, allocations[one.id], self.objective, side_inputs=own_inputs))
        steered = []
        for client, update in zip(cohort, trainer.fit(tasks), strict=True):
            gate, expert = (
                {name: tensor for name, tensor in update.adapter.items() if name.startswith(GATE) == of_gate}
                for of_gate in (True, False)
            )
            own = replace(update, adapter=gate, private=expert)
            scores = self._steering(state, own, trainer.reader, client, inputs[client.id])
            steered.append(replace(own, metrics={**own.metrics, **scores}))
        return steered

    def _steering(
        self, state: FedMSState, update: ClientUpdate, reader: Reader, client: Client, inputs: Mapping[str, Tensor]
    ) -> dict[str, float]:
        images = cast(ImageSet, client.validation)
        experts = {**state.experts, client.id: state.experts.get(client.id, {}) | update.private}
        now = replace(state, adapter=state.adapter | update.adapter, experts=experts)
        reader.model.load_adapter(adapter_of(self.method, now, client.id))
        logits = predicted(self.method, now, reader, images, client, inputs)
        with torch.no_grad():
            parts = torch.split(torch.arange(len(images)), reader.batch_size)
            batches = (cast(Batch, reader.batch(images, one, None, 0, inputs)) for one in parts)
            mix = torch.cat([mixing(reader.model, batch) for batch in batches])
        return {
            "accuracy": accuracy(logits, images.labels),
            MIX: mix.mean().item(),
            SPREAD: mix.std(correction=0).item(),
        }

    def keep(self, state: FedMSState, updates: Sequence[ClientUpdate]) -> FedMSState:
        """Store the local experts, and activate one more block for each client whose accuracy is stuck (Eq. 5)."""
        experts, queues, active = dict(state.experts), dict(state.queues), dict(state.active)
        for update in sorted(updates, key=lambda one: one.client):
            client, score = update.client, update.metrics["accuracy"]
            private = {name: one.clone() for name, one in update.private.items()}
            experts[client] = {**experts.get(client, {}), **private}
            queue, now = queues.get(client, ()), active.get(client, self.sal.initial)
            active[client] = min(now + self.sal.is_stuck(queue, score), len(state.layers))
            queues[client] = (*queue, score)[-self.sal.queue :]
        return replace(state, experts=experts, queues=queues, active=active)

    def predict(self, state: FedMSState, model: LayeredModel, images: Images) -> Tensor:
        """Return the logits of a client's mixture (Eq. 6)."""
        return mixed(model, cast(Batch, images), state.layers)

    def active(self, state: FedMSState, updates: Sequence[ClientUpdate]) -> Mapping[ClientId, int]:
        """Return the number of blocks that each client trained, or will train next if it was not in the cohort."""
        return state.active | {update.client: len(update.allocation.trained) for update in updates}

    def gate_metrics(self, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Return the mean and standard deviation of lambda over images, each as a mean over the cohort."""
        return {name: sum(update.metrics[name] for update in updates) / len(updates) for name in (MIX, SPREAD)}
