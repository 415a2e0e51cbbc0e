"""FedMS: Federated Learning with Mixture of Sparsely Activated Foundations Models.

Panlong Wu, Kangshuo Li, Ting Wang, Fangxin Wang. Stage one trains a global expert (Section 3.1), stage two a local
expert for each client, with adapters that are activated from the top down (SAL, Section 3.2), and a gate that mixes the
two (MoFM, Section 3.3).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal, cast

import torch
from numpy.random import Generator
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.methods.base import Allocations, FederatedMethod, Needs, Server, state_as
from fedsweep.methods.capabilities import (
    ExportObstacle,
    FrozenBlocks,
    Messages,
    OwnMetrics,
    OwnWeights,
    PersonalModels,
    SideInputs,
    Stages,
    predicted,
)
from fedsweep.methods.fedms.gate import Gate, GateConfig, build_gate, check_gate, mixed, mixing, mixture_loss
from fedsweep.models import BackboneConfig
from fedsweep.models.activation_cache import FrozenFunction, digest_of
from fedsweep.models.base import Reader
from fedsweep.models.layered import Images, LayeredModel
from fedsweep.models.names import names_within
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean
from fedsweep.training.evaluation import accuracy
from fedsweep.training.local_training import CohortTrainer, LocalTask, Objective, cross_entropy
from fedsweep.types import AdapterState, Batch, Client, ClientId, ClientUpdate, ImageSet, LayerAllocation, ServerState

GATE = "gate."
ACTIVE, MIX, SPREAD = "sal/active", "gate/lambda", "gate/spread"


class SALConfig(Config):
    """Sparsely Activated LoRA (Section 3.2)."""

    threshold: float = Field(0.01, description="delta: a smaller gain in accuracy activates the next lower block")
    queue: int = Field(3, gt=0, description="Q, the past accuracies that a gain is measured from")
    initial: int = Field(1, gt=0, description="blocks of each encoder that are active from the start, the topmost")

    def is_stuck(self, past: Sequence[float], accuracy: float) -> bool:
        """Return whether the gain Delta over the mean of a full queue is below delta (Eq. 5)."""
        return len(past) == self.queue and accuracy - sum(past) / self.queue < self.threshold


@dataclass(frozen=True)
class FedMSState(ServerState):
    """The clients' memory besides the server's adapter, which holds the global expert and the gate.

    `experts`: the local expert's own tensors of each client; `queues`: its last accuracies; `active`: its number of
    active blocks.
    """

    stage: int = 1
    experts: dict[ClientId, AdapterState] = field(default_factory=dict)
    queues: dict[ClientId, tuple[float, ...]] = field(default_factory=dict)
    active: dict[ClientId, int] = field(default_factory=dict)


of = partial(state_as, FedMSState)


class FedMS(
    FederatedMethod, OwnWeights, Messages, PersonalModels, FrozenBlocks, SideInputs, Stages, OwnMetrics, ExportObstacle
):
    """Two stages; clients' capacities are ignored. Between a client and the server go adapters, later gates alone."""

    name: Literal["fedms"] = "fedms"
    needs: ClassVar[Needs] = Needs(text=True, validation=True)
    global_rounds: int = Field(25, ge=0, description="rounds of stage one; those after them, if any, are stage two")
    sal: SALConfig = Field(SALConfig(), description="when local experts' adapters become active")
    gate: GateConfig = Field(default_factory=GateConfig, description="what mixes the experts")

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError unless there are as many blocks as are active from the start."""
        if self.sal.initial > num_layers:
            raise ValueError(
                f"`method.sal.initial` must be at most the {num_layers} blocks, but it is {self.sal.initial}"
            )

    def fingerprint(self) -> str:
        """Return the fingerprint of the gate's trunk."""
        return self.gate.trunk.fingerprint()

    def check_weights(self, backbone: BackboneConfig, class_names: Sequence[str]) -> None:
        """Load the gate's trunk, which must take the backbone's images."""
        check_gate(self.gate.trunk, self.gate.hidden, backbone.image_size, self.fingerprint())

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add the gate, as `gate.trunk` and `gate.adapter`."""
        whole, outlined = self.gate.trained == "all", model.mean.is_meta
        model.add_module("gate", build_gate(self.gate.trunk, self.gate.hidden, whole, seed, outlined))

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> FedMSState:
        """Return a state in which no client has an expert of its own yet."""
        layers, active = tuple(range(server.num_layers)), {one.id: self.sal.initial for one in clients}
        return FedMSState(adapter=model.adapter(), layers=layers, active=active)

    def begin_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> FedMSState:
        """After stage one, freeze the global expert, from which local experts start.

        A base optimizer's memory of the global expert's training does not apply to theirs.
        """
        if trainer.round <= self.global_rounds or of(state).stage == 2:
            return of(state)
        return replace(of(state), stage=2, client_memory={}, server_memory={})

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Return all blocks; stage one trains all of their adapters, stage two the active ones and the gate."""
        resting = (GATE,) if of(state).stage == 1 else ()
        return {
            one.id: LayerAllocation(state.layers, state.layers[self.num_frozen_blocks(state, one.id) :], resting)
            for one in cohort
        }

    def objective(self, round: int, rounds: int) -> Objective:
        """Return the cross-entropy, in stage one of the global expert, in stage two of the mixture."""
        return cross_entropy if round <= self.global_rounds else mixture_loss

    def received_names(self, state: ServerState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Return the names of all that the client trains, or of the gate alone once the client has an expert."""
        names = super().received_names(state, client, row)
        return _of_gate(names) if client in of(state).experts else names

    def sent_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the names of all adapters in stage one, and the gate's alone in stage two."""
        trained = self.trained_names(state, names, row)
        return trained if of(state).stage == 1 else _of_gate(trained)

    def trained_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the names of all adapters, or in stage two of the gate and the active blocks' adapters."""
        return names_within(names, row.trained, row.excluded_prefixes)

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train the global expert, or in stage two local experts, which stay with their clients, together with gates.

        Each client's accuracy on the images that it holds out steers SAL.
        """
        if of(state).stage == 1:
            return super().local_updates(state, cohort, allocations, trainer)
        held_out = {one.id: cast(ImageSet, one.validation) for one in cohort}
        inputs = self.side_inputs(state, trainer.reader, {f"train/{one.id}": one.train for one in cohort} | held_out)
        tasks = []
        for one in cohort:
            start, own_inputs = self.client_adapter(state, one.id), inputs[f"train/{one.id}"]
            tasks.append(LocalTask(one, start, allocations[one.id], mixture_loss, side_inputs=own_inputs))
        steered = []
        for client, update in zip(cohort, trainer.fit(tasks), strict=True):
            gate = {name: update.adapter[name] for name in _of_gate(update.adapter)}
            expert = {name: tensor for name, tensor in update.adapter.items() if name not in gate}
            own = replace(update, adapter=gate, private=expert)
            scores = self._steering(of(state), own, trainer.reader, client, inputs[client.id])
            steered.append(replace(own, metrics={**own.metrics, **scores}))
        return steered

    def _steering(
        self, state: FedMSState, update: ClientUpdate, reader: Reader, client: Client, inputs: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """The client's accuracy on the images that it holds out, and lambda's mean and deviation over them."""
        images = cast(ImageSet, client.validation)
        experts = {**state.experts, client.id: state.experts.get(client.id, {}) | update.private}
        now = replace(state, adapter=state.adapter | update.adapter, experts=experts)
        reader.model.load_adapter(self.client_adapter(now, client.id))
        logits = predicted(self, now, reader, images, client, inputs)
        with torch.no_grad():
            parts = torch.split(torch.arange(len(images)), reader.batch_size)
            batches = (cast(Batch, reader.batch(images, one, None, 0, inputs)) for one in parts)
            mix = torch.cat([mixing(reader.model, batch) for batch in batches])
        spread = mix.std(correction=0).item()
        return {"accuracy": accuracy(logits, images.labels), MIX: mix.mean().item(), SPREAD: spread}

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> FedMSState:
        """Average the global expert, or in stage two the gates: Z_g = sum_i (L_i / sum_j L_j) Z_i (Eq. 7).

        L_i is the loss of client i, or its weight in the aggregation.
        """
        if of(state).stage == 1:
            return replace(of(state), adapter=layerwise_mean(state.adapter, updates, server.aggregation))
        weigh = (lambda update: update.metrics["loss"]) if self.gate.weights == "loss" else None
        gates = layerwise_mean(state.adapter, updates, server.aggregation, weigh)
        return replace(self._remembered(of(state), updates), adapter=gates)

    def _remembered(self, state: FedMSState, updates: Sequence[ClientUpdate]) -> FedMSState:
        """Keep the clients' local experts, and activate a block of those that are stuck (Eq. 5)."""
        experts, queues, active = dict(state.experts), dict(state.queues), dict(state.active)
        for update in sorted(updates, key=lambda one: one.client):
            client, score = update.client, update.metrics["accuracy"]
            private = {name: one.clone() for name, one in update.private.items()}
            experts[client] = {**experts.get(client, {}), **private}
            queue, now = queues.get(client, ()), active.get(client, self.sal.initial)
            active[client] = min(now + self.sal.is_stuck(queue, score), len(state.layers))
            queues[client] = (*queue, score)[-self.sal.queue :]
        return replace(state, experts=experts, queues=queues, active=active)

    def stage_states(self, state: ServerState, rounds: int) -> dict[str, ServerState]:
        """Return states of the stages that have rounds; stage two at its end, with all blocks active."""
        everywhere = dict.fromkeys(of(state).active, len(state.layers))
        first = {"stage 1": state} if self.global_rounds else {}
        second = {"stage 2": replace(of(state), stage=2, active=everywhere)} if rounds > self.global_rounds else {}
        return first | second

    def client_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the local expert's adapter with the gate, or the global expert's before the client has its own."""
        own = of(state).experts.get(client)
        return {**state.adapter, **own} if own else state.adapter

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return, in stage two, all blocks of the global expert, or those below a client's active blocks."""
        if of(state).stage == 1:
            return 0
        return len(state.layers) - (of(state).active[client] if client else 0)

    def side_inputs(
        self, state: ServerState, reader: Reader, sets: Mapping[str, ImageSet]
    ) -> dict[str, Mapping[str, Tensor]]:
        """Return, in stage two, the global expert's logits (n, classes) and a frozen trunk's features (n, width)."""
        if of(state).stage == 1:
            return super().side_inputs(state, reader, sets)
        model = reader.model
        model.load_adapter(state.adapter)
        known = {name: {"global": predicted(self, state, reader, images).clone()} for name, images in sets.items()}
        if self.gate.trained == "adapter":
            gate = cast(Gate, model.gate)
            seen = FrozenFunction(digest_of(f"gate {gate.identity}", {}, gate.mean.device), gate.features)
            for name, images in sets.items():
                known[name]["trunk"] = reader.kept.all(seen, images, reader.batch_size).to(gate.mean.device)
        return {**known}

    def predict(
        self, state: ServerState, model: LayeredModel, images: Images, personal: bool = False, domain: str | None = None
    ) -> Tensor:
        """Return the logits of a client's mixture in stage two, and otherwise of the global expert."""
        if personal and of(state).stage == 2:
            return mixed(model, cast(Batch, images), state.layers)
        return super().predict(state, model, images)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return a client's gate; the global model is a CLIP with LoRA in both stages."""
        return "a gate that mixes the global expert with the client's own" if of_client else None

    def metric_names(self, clients: Iterable[ClientId]) -> list[str]:
        """Return the names of the active blocks of every client, their mean, and the gate's metrics."""
        return [ACTIVE, *(f"{ACTIVE}/{client}" for client in sorted(clients)), MIX, SPREAD]

    def measure(self, state: ServerState, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Measure the active blocks, of clients outside the cohort in their next round, and lambda over images."""
        active = of(state).active | {update.client: len(update.allocation.trained) for update in updates}
        gate = {MIX: 1.0, SPREAD: 0.0}
        if of(state).stage == 1:  # the global expert is all there is
            active = dict.fromkeys(active, len(state.layers))
        else:
            gate = {name: sum(update.metrics[name] for update in updates) / len(updates) for name in gate}
        each = {f"{ACTIVE}/{client}": float(count) for client, count in sorted(active.items())}
        return {ACTIVE: sum(each.values()) / len(each), **each, **gate}


def _of_gate(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(GATE)]
