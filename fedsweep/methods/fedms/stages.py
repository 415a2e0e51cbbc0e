"""The two stages of FedMS, implemented by two classes with the same interface.

`GlobalStage` trains the global expert with FedAvg. `LocalStage` then trains the local experts and the gate.
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
    """The settings of Sparsely Activated LoRA (SAL), which selects the blocks that are trained in a local expert.

    Source: FedMS, Section 3.2.
    """

    threshold: float = Field(
        0.01,
        description="delta of Eq. 5: a client's next lower block is activated if the client's accuracy, from 0 to 1, "
        "exceeds the mean of its past accuracies by less than delta",
    )
    queue: int = Field(
        3, gt=0, description="Q of Eq. 5: number of past accuracies in the mean to which the accuracy is compared"
    )
    initial: int = Field(
        1, gt=0, description="number of topmost blocks of each encoder that are active when stage two starts"
    )

    def is_stuck(self, past: Sequence[float], accuracy: float) -> bool:
        """Return whether a client's accuracy has stalled, in which case SAL activates one more block (Eq. 5).

        The accuracy has stalled if `accuracy` minus the mean of the earlier accuracies in `past` is less than the
        option `threshold`. If `past` contains fewer accuracies than the option `queue` requires, return False.
        """
        return len(past) == self.queue and accuracy - sum(past) / self.queue < self.threshold


@dataclass(frozen=True)
class FedMSState(ServerState):
    """The state of FedMS's server, including the data that each client keeps between rounds.

    The field `adapter` contains the global expert and the gate.

    Attributes:
        stage: The number of the current stage, 1 or 2.
        experts: A dict from each client to the trained tensors of its local expert. The local expert shares all other
            tensors with the global expert.
        queues: A dict from each client to its latest accuracies on its validation images, oldest first.
        active: A dict from each client to the number of active (trained) blocks of its local expert.
    """

    stage: int = 1
    experts: dict[ClientId, AdapterState] = field(default_factory=dict)
    queues: dict[ClientId, tuple[float, ...]] = field(default_factory=dict)
    active: dict[ClientId, int] = field(default_factory=dict)


def of(state: ServerState) -> FedMSState:
    """Return `state` if it is a state of FedMS; raise TypeError if it is the state of another method."""
    return state_as(FedMSState, state)


class GlobalStage:
    """Stage one of FedMS: FedAvg on the LoRA adapters of the global expert, without a gate (Section 3.1)."""

    objective = staticmethod(cross_entropy)

    def row(self, state: FedMSState, client: ClientId) -> LayerAllocation:
        """Return a client's allocation, in which the client holds and trains all blocks."""
        return LayerAllocation(state.layers, state.layers, excluded_prefixes=(GATE,))

    def received_names(self, state: FedMSState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Return the names of the global expert's tensors, all of which the server sends to the client."""
        return names_within(state.adapter, row.held, row.excluded_prefixes)

    def sent_names(self, names: Sequence[str]) -> list[str]:
        """Return all `names`; in stage one, a client sends back every tensor that it trains."""
        return list(names)

    def num_frozen_blocks(self, state: FedMSState, client: ClientId | None) -> int:
        """Return 0; in stage one, all blocks are trained."""
        return 0

    def side_inputs(
        self, state: FedMSState, reader: Reader, sets: Mapping[str, ImageSet]
    ) -> dict[str, Mapping[str, Tensor]]:
        """Return an empty dict for each image set; in stage one, the models have no side inputs."""
        return {name: {} for name in sets}

    def local_updates(
        self, state: FedMSState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train all clients of the cohort, starting from the global expert."""
        return trainer.fit([LocalTask(one, state.adapter, allocations[one.id], self.objective) for one in cohort])

    def keep(self, state: FedMSState, updates: Sequence[ClientUpdate]) -> FedMSState:
        """Return `state` unchanged; in stage one, clients keep no tensors of their own."""
        return state

    def predict(self, state: FedMSState, model: LayeredModel, images: Images) -> Tensor:
        """Return the logits (batch, classes) of the global expert, which all clients share."""
        return cast(Tensor, model(images, state.layers))

    def active(self, state: FedMSState, updates: Sequence[ClientUpdate]) -> Mapping[ClientId, int]:
        """Return each client's number of active blocks; in stage one, all blocks are active."""
        return dict.fromkeys(state.active, len(state.layers))

    def gate_metrics(self, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Return the mean and the standard deviation of the weight lambda of the global expert.

        The mean is 1 and the standard deviation is 0, because stage one has only the global expert.
        """
        return {MIX: 1.0, SPREAD: 0.0}


@dataclass(frozen=True)
class LocalStage:
    """Stage two of FedMS: each client trains the gate and the active blocks of its local expert (Section 3.3).

    The global expert is frozen, and local experts stay on their clients. Only gates are sent and averaged.
    """

    objective = staticmethod(mixture_loss)
    method: FederatedMethod
    sal: SALConfig
    gate: GateConfig

    def row(self, state: FedMSState, client: ClientId) -> LayerAllocation:
        """Return a client's allocation, in which the client holds all blocks and trains the active ones."""
        return LayerAllocation(state.layers, state.layers[self.num_frozen_blocks(state, client) :])

    def received_names(self, state: FedMSState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Return the names of the tensors that the server sends to a client with the allocation `row`.

        These are the gate's tensors and, if the client has no local expert yet, the global expert's tensors.
        """
        names = names_within(state.adapter, row.held, row.excluded_prefixes)
        return self.sent_names(names) if client in state.experts else names

    def sent_names(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that belong to the gate, the only part of the model that a client sends back."""
        return [name for name in names if name.startswith(GATE)]

    def num_frozen_blocks(self, state: FedMSState, client: ClientId | None) -> int:
        """Return the number of blocks below the active blocks of a client's local expert.

        If `client` is None, return the total number of blocks of the global expert, all of which are frozen.
        """
        return len(state.layers) - (state.active[client] if client else 0)

    def side_inputs(
        self, state: FedMSState, reader: Reader, sets: Mapping[str, ImageSet]
    ) -> dict[str, Mapping[str, Tensor]]:
        """Return the values that the clients' models use for each image in addition to its pixels.

        Args:
            state: The server's state.
            reader: The reader of image batches, which can compute the outputs of frozen networks.
            sets: The image sets, keyed by names that the caller chooses.

        Returns:
            A dict from each name in `sets` to the values for that set's n images: the logits (n, classes) of the global
            expert as `global` and, if the network that computes the gate's image features is frozen, these features
            (n, width) as `trunk`.
        """
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
        """Train the local experts and the gates, and measure each client's accuracy on its validation images.

        The function `keep` uses a client's accuracy to decide whether one more block of its local expert is activated,
        that is, trained from the next round on.
        """
        held_out = {one.id: cast(ImageSet, one.validation) for one in cohort}
        seen = {f"train/{one.id}": one.train for one in cohort} | held_out
        inputs = self.side_inputs(state, trainer.reader, seen)
        tasks = []
        for one in cohort:
            start, own_inputs = adapter_of(self.method, state, one.id), inputs[f"train/{one.id}"]
            tasks.append(LocalTask(one, start, allocations[one.id], self.objective, side_inputs=own_inputs))
        fitted, steered = trainer.fit(tasks), []
        if trainer.counts_only:
            return fitted
        for client, update in zip(cohort, fitted, strict=True):
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
        """Store the local experts, and activate one more block for each client whose accuracy has stalled (Eq. 5)."""
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
        """Return the logits (batch, classes) of a client's mixture of the global and the local expert (Eq. 6)."""
        return mixed(model, cast(Batch, images), state.layers)

    def active(self, state: FedMSState, updates: Sequence[ClientUpdate]) -> Mapping[ClientId, int]:
        """Return each client's number of active blocks, that is, trained blocks.

        For a client of the cohort, this is the number of blocks that it trained in this round. For any other client, it
        is the number of blocks that the client trains in the next round in which it takes part.
        """
        return state.active | {update.client: len(update.allocation.trained) for update in updates}

    def gate_metrics(self, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Return the mean and the standard deviation of the weight lambda of the global expert.

        Each client of the round measures its own mean and standard deviation on its validation images. The returned
        values are the averages over these clients.
        """
        return {name: sum(update.metrics[name] for update in updates) / len(updates) for name in (MIX, SPREAD)}
