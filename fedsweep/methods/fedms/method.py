"""FedMS: Federated Learning with Mixture of Sparsely Activated Foundations Models.

Panlong Wu, Kangshuo Li, Ting Wang, Fangxin Wang. Stage one trains a global expert, stage two a local expert for each
client, with adapters that are activated from the top down (SAL), and a gate that mixes the two (MoFM).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.methods.base import Allocations, FederatedMethod, Server, predicted, state_as
from fedsweep.methods.fedms.gate import Gate, build_gate, check_gate, mixed, mixing
from fedsweep.methods.fedms.trunk import TimmTrunk, TrunkConfig
from fedsweep.models import BackboneConfig
from fedsweep.models.activation_cache import FrozenFunction, digest_of
from fedsweep.models.feature_reader import Reader
from fedsweep.models.layered import Images, LayeredModel, Walk
from fedsweep.models.names import names_within
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean
from fedsweep.training.evaluation import accuracy
from fedsweep.training.local_training import CohortTrainer, LocalTask, Objective, cross_entropy
from fedsweep.types import (
    AdapterState,
    Batch,
    Client,
    ClientId,
    ClientUpdate,
    ImageSet,
    LayerAllocation,
    ServerState,
)

GATE = "gate."
ACTIVE, MIX, SPREAD = "sal/active", "gate/lambda", "gate/spread"


class SALConfig(Config):
    """Sparsely Activated LoRA (Section 3.2)."""

    threshold: float = Field(0.01, description="delta: a smaller gain in accuracy activates the next lower block")
    queue: int = Field(3, gt=0, description="Q, the past accuracies that a gain is measured from")
    initial: int = Field(1, gt=0, description="blocks of each encoder that are active from the start, the topmost")


class GateConfig(Config):
    """The gate of the mixture (Section 3.3)."""

    trunk: TrunkConfig = Field(
        default_factory=TimmTrunk, description="the network below the gate's adapter: timm or digits_resnet"
    )
    hidden: int | None = Field(None, gt=0, description="width of the adapter; null for that of the trunk's features")
    trained: Literal["adapter", "all"] = Field("adapter", description="the gate's adapter alone, or its trunk too")
    weights: Literal["loss", "aggregation"] = Field(
        "loss", description="a client's weight in the gate's mean: its loss (Eq. 7), or that of `aggregation.weights`"
    )


@dataclass(frozen=True)
class FedMSState(ServerState):
    """What clients remember beside the server's adapter, which holds the global expert and the gate.

    `experts`: what a client's local expert has of its own; `queues`: its last accuracies; `active`: its active blocks.
    """

    stage: int = 1
    experts: dict[ClientId, AdapterState] = field(default_factory=dict)
    queues: dict[ClientId, tuple[float, ...]] = field(default_factory=dict)
    active: dict[ClientId, int] = field(default_factory=dict)


class FedMS(FederatedMethod):
    """Two stages; clients' capacities are ignored. Between a client and the server go adapters, later gates alone."""

    needs_text: ClassVar = True
    needs_validation: ClassVar = True

    name: Literal["fedms"] = "fedms"
    global_rounds: int = Field(25, ge=0, description="rounds of stage one; those after them, if any, are stage two")
    sal: SALConfig = Field(SALConfig(), description="when local experts' adapters become active")
    gate: GateConfig = Field(default_factory=GateConfig, description="what mixes the experts")

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """There must be as many blocks."""
        if self.sal.initial > num_layers:
            raise ValueError(
                f"`method.sal.initial` must be at most the {num_layers} blocks, but it is {self.sal.initial}"
            )

    def fingerprint(self) -> str:
        """That of the gate's trunk."""
        return self.gate.trunk.fingerprint()

    def check_weights(self, backbone: BackboneConfig, class_names: Sequence[str]) -> None:
        """Those of the gate's trunk, which must take the backbone's images."""
        check_gate(self.gate.trunk, self.gate.hidden, backbone.image_size, self.fingerprint())

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """The gate, as `gate.trunk` and `gate.adapter`."""
        whole, outlined = self.gate.trained == "all", model.mean.is_meta
        model.add_module("gate", build_gate(self.gate.trunk, self.gate.hidden, whole, seed, outlined))

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> FedMSState:
        """No client has an expert of its own yet."""
        layers, active = tuple(range(server.num_layers)), {one.id: self.sal.initial for one in clients}
        return FedMSState(adapter=model.adapter(), layers=layers, active=active)

    def begin_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> FedMSState:
        """After stage one the global expert is frozen, and local experts start from it.

        What a base optimizer remembers of the global expert's training says nothing of theirs.
        """
        if trainer.round <= self.global_rounds or of(state).stage == 2:
            return of(state)
        return replace(of(state), stage=2, client_memory={}, server_memory={})

    def allocate(
        self, state: ServerState, cohort: Sequence[Client], server: Server, rng: np.random.Generator
    ) -> dict[ClientId, LayerAllocation]:
        """All blocks are run. In stage one all adapters are trained, in stage two those of the active blocks."""
        if of(state).stage == 1:
            return {one.id: LayerAllocation(state.layers, state.layers, excluded_prefixes=(GATE,)) for one in cohort}
        return {
            one.id: LayerAllocation(state.layers, state.layers[self.num_frozen_blocks(state, one.id) :])
            for one in cohort
        }

    def objective(self, round: int, rounds: int) -> Objective:
        """Cross-entropy, in stage one of the global expert, in stage two of the mixture."""
        return cross_entropy if round <= self.global_rounds else mixed_cross_entropy

    def received_names(self, state: ServerState, client: ClientId, row: LayerAllocation) -> list[str]:
        """In stage two the gate, and the global expert once, before the client's own begins."""
        names = super().received_names(state, client, row)
        if of(state).stage == 1 or client not in of(state).experts:
            return names
        return [name for name in names if name.startswith(GATE)]

    def sent_names(self, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """In stage two, in which a client trains the gate, nothing else."""
        sent = super().sent_names(names, row)
        return sent if GATE in row.excluded_prefixes else [name for name in sent if name.startswith(GATE)]

    def trained_names(self, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """The gate, and the adapters of the active blocks."""
        return names_within(names, row.trained, row.excluded_prefixes)

    def stages(self, state: ServerState, rounds: int) -> dict[str, ServerState]:
        """Those of stage one and stage two that have rounds; stage two at its end, with all blocks active."""
        everywhere = dict.fromkeys(of(state).active, len(state.layers))
        first = {"stage 1": state} if self.global_rounds else {}
        second = {"stage 2": replace(of(state), stage=2, active=everywhere)} if rounds > self.global_rounds else {}
        return first | second

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """In stage two local expert and gate are trained together; the expert stays, its accuracy steers SAL."""
        if of(state).stage == 1:
            return super().local_updates(state, cohort, allocations, trainer)
        held_out = {one.id: cast(ImageSet, one.validation) for one in cohort}
        seen = {f"train/{one.id}": one.train for one in cohort} | held_out
        side_inputs = self.side_inputs(state, trainer.reader, seen)
        objective = self.objective(trainer.round, trainer.rounds)
        updates = trainer.fit(
            [
                LocalTask(
                    one,
                    self.adapter_of(state, one.id),
                    allocations[one.id],
                    objective,
                    side_inputs=side_inputs[f"train/{one.id}"],
                )
                for one in cohort
            ]
        )
        steered = []
        for client, update in zip(cohort, updates, strict=True):
            parts = [
                {name: tensor for name, tensor in update.adapter.items() if name.startswith(GATE) == gate}
                for gate in (True, False)
            ]
            own = replace(update, adapter=parts[0], private=parts[1])
            scores = self._steering(of(state), own, trainer.reader, client, side_inputs[client.id])
            steered.append(replace(own, metrics={**own.metrics, **scores}))
        return steered

    def _steering(
        self, state: FedMSState, update: ClientUpdate, reader: Reader, client: Client, side_inputs: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """Accuracy of the mixture that a client has just trained, on the images that it holds out; and its lambda."""
        images = cast(ImageSet, client.validation)
        experts = {**state.experts, client.id: state.experts.get(client.id, {}) | update.private}
        now = replace(state, adapter=state.adapter | update.adapter, experts=experts)
        reader.model.load_adapter(self.adapter_of(now, client.id))
        logits = predicted(self, now, reader, images, client, side_inputs)
        with torch.no_grad():
            parts = torch.split(torch.arange(len(images)), reader.batch_size)
            batches = (cast(Batch, reader.batch(images, one, None, 0, side_inputs)) for one in parts)
            mix = torch.cat([mixing(reader.model, batch) for batch in batches])
        return {
            "accuracy": accuracy(logits, images.labels),
            MIX: mix.mean().item(),
            SPREAD: mix.std(correction=0).item(),
        }

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> FedMSState:
        """Stage one: FedAvg. Stage two: Z_g = sum_i (L_i / sum_j L_j) Z_i (Eq. 7), and what clients keep is kept."""
        state = of(state)
        if state.stage == 1:
            return replace(state, adapter=layerwise_mean(state.adapter, updates, server.aggregation))
        weigh = (lambda update: update.metrics["loss"]) if self.gate.weights == "loss" else None
        experts, queues, active = dict(state.experts), dict(state.queues), dict(state.active)
        for update in sorted(updates, key=lambda one: one.client):
            client, score = update.client, update.metrics["accuracy"]
            experts[client] = {**experts.get(client, {}), **{name: one.clone() for name, one in update.private.items()}}
            queue, now = queues.get(client, ()), active.get(client, self.sal.initial)
            active[client] = min(now + stuck(queue, score, self.sal), len(state.layers))
            queues[client] = (*queue, score)[-self.sal.queue :]
        adapter = layerwise_mean(state.adapter, updates, server.aggregation, weigh)
        return replace(state, adapter=adapter, experts=experts, queues=queues, active=active)

    def adapter_of(self, state: ServerState, client: ClientId | None = None) -> AdapterState:
        """The local expert's with the gate; the global expert's where a client has none of its own."""
        own = of(state).experts.get(client, {}) if client else {}
        return {**state.adapter, **own} if own else state.adapter

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """In stage two all of the global expert, and of a local one the blocks below the lowest active one."""
        state = of(state)
        if state.stage == 1:
            return 0
        return len(state.layers) - (state.active[client] if client else 0)

    def side_inputs(
        self, state: ServerState, reader: Reader, sets: Mapping[str, ImageSet]
    ) -> dict[str, Mapping[str, Tensor]]:
        """The global expert's logits (n, classes), and what the gate's trunk sees (n, width), where it is frozen."""
        if of(state).stage == 1:
            return super().side_inputs(state, reader, sets)
        model = reader.model
        model.load_adapter(state.adapter)
        known: dict[str, dict[str, Tensor]] = {
            name: {"global": predicted(self, state, reader, images).clone()} for name, images in sets.items()
        }
        if self.gate.trained == "adapter":
            gate = cast(Gate, model.gate)
            seen = FrozenFunction(digest_of(f"gate {gate.identity}", {}, gate.mean.device), gate.features)
            for name, images in sets.items():
                known[name]["trunk"] = reader.kept.all(seen, images, reader.batch_size).to(gate.mean.device)
        return {**known}

    def predict(
        self,
        state: ServerState,
        model: LayeredModel,
        images: Images,
        client: Client | None = None,
        domain: str | None = None,
    ) -> Tensor:
        """A client's mixture; without a client, and in stage one, the global expert."""
        if client is None or of(state).stage == 1:
            return super().predict(state, model, images)
        return mixed(model, cast(Batch, images), state.layers)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """A client mixes two experts; the global one is a CLIP with LoRA in both stages."""
        return "a gate that mixes the global expert with the client's own" if of_client else None

    def metrics(self, clients: Iterable[ClientId]) -> list[str]:
        """Active blocks of every client, their mean, and the gate's."""
        return [ACTIVE, *(f"{ACTIVE}/{client}" for client in sorted(clients)), MIX, SPREAD]

    def measured(
        self, state: ServerState, clients: Iterable[ClientId], updates: Sequence[ClientUpdate]
    ) -> dict[str, float]:
        """Active blocks, of those outside the cohort in their next round; lambda's mean and deviation over images.

        In stage one all blocks are, and the global expert is all there is: lambda is 1.
        """
        state = of(state)
        first = state.stage == 1
        trained = {update.client: len(update.allocation.trained) for update in updates}
        now = dict.fromkeys(clients, len(state.layers)) if first else state.active | trained
        active = {one: float(now[one]) for one in sorted(clients)}
        gate = {
            name: default if first else sum(update.metrics[name] for update in updates) / len(updates)
            for name, default in ((MIX, 1.0), (SPREAD, 0.0))
        }
        mean = sum(active.values()) / len(active)
        return {ACTIVE: mean, **{f"{ACTIVE}/{one}": count for one, count in active.items()}, **gate}


def of(state: ServerState) -> FedMSState:
    """The state as this method's.

    Raises:
        TypeError: it is another method's.
    """
    return state_as(FedMSState, state)


def stuck(queue: Sequence[float], accuracy: float, sal: SALConfig) -> bool:
    """Whether the gain Delta over the mean of a full queue is below delta (Eq. 5); before it is full, never."""
    return len(queue) == sal.queue and accuracy - sum(queue) / sal.queue < sal.threshold


def mixed_cross_entropy(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
    """Cross-entropy of the mixture; of the local expert alone for images of which nothing else is known."""
    logits = mixed(model, images, walk) if isinstance(images, Batch) else model(images, walk)
    return F.cross_entropy(logits, labels)
