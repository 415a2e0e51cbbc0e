"""FedMS: Federated Learning with Mixture of Sparsely Activated Foundations Models.

Panlong Wu, Kangshuo Li, Ting Wang, Fangxin Wang. Stage one trains a global expert. Stage two trains a local expert for
each client, whose adapters are activated from the top block down (SAL), and a gate that mixes the two experts (MoFM).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from numpy.random import Generator
from pydantic import Field
from torch import Tensor

from fedsweep.methods.base import Allocations, FederatedMethod, Needs, Server
from fedsweep.methods.capabilities import (
    ExportObstacle,
    FrozenBlocks,
    Messages,
    OwnMetrics,
    OwnWeights,
    PersonalModels,
    SideInputs,
    Stages,
)
from fedsweep.methods.fedms.gate import GateConfig, average_gates, build_gate, check_gate
from fedsweep.methods.fedms.stages import MIX, SPREAD, FedMSState, GlobalStage, LocalStage, SALConfig, of
from fedsweep.models import BackboneConfig
from fedsweep.models.base import Reader
from fedsweep.models.layered import Images, LayeredModel
from fedsweep.models.names import names_within
from fedsweep.training.aggregation import AggregationConfig, layerwise_mean
from fedsweep.training.local_training import CohortTrainer, Objective
from fedsweep.types import AdapterState, Client, ClientId, ClientUpdate, ImageSet, LayerAllocation, ServerState

ACTIVE = "sal/active"


class FedMS(
    FederatedMethod, OwnWeights, Messages, PersonalModels, FrozenBlocks, SideInputs, Stages, OwnMetrics, ExportObstacle
):
    """A global expert in stage one, then a local expert for each client and a gate in stage two.

    Clients send LoRA adapters in stage one, and only gates in stage two. The depths of the clients are ignored.
    """

    name: Literal["fedms"] = "fedms"
    needs: ClassVar[Needs] = Needs(text=True, validation=True)
    global_rounds: int = Field(
        25, ge=0, description="number of rounds of stage one; the remaining rounds are stage two"
    )
    sal: SALConfig = Field(SALConfig(), description="activation of the blocks of local experts (SAL)")
    gate: GateConfig = Field(default_factory=GateConfig, description="gate that mixes the global and the local expert")

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError if `sal.initial` exceeds the number of blocks."""
        if self.sal.initial > num_layers:
            raise ValueError(
                f"`method.sal.initial` must be at most {num_layers}, the number of blocks, but it is {self.sal.initial}"
            )

    def fingerprint(self) -> str:
        """Return the fingerprint of the gate's trunk."""
        return self.gate.trunk.fingerprint()

    def check_weights(self, backbone: BackboneConfig, class_names: Sequence[str]) -> None:
        """Load the gate's trunk; raise UserError unless it can process images of the backbone's size."""
        check_gate(self.gate.trunk, self.gate.hidden, backbone.image_size, self.fingerprint())

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add the gate as `gate.trunk` and `gate.adapter`."""
        whole, outlined = self.gate.trained == "all", model.mean.is_meta
        model.add_module("gate", build_gate(self.gate.trunk, self.gate.hidden, whole, seed, outlined))

    def stage(self, number: int) -> GlobalStage | LocalStage:
        """Return the stage with this number, 1 or 2."""
        return GlobalStage() if number == 1 else LocalStage(self, self.sal, self.gate)

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> FedMSState:
        """Return the initial state, in which no client has a local expert."""
        layers, active = tuple(range(server.num_layers)), {one.id: self.sal.initial for one in clients}
        return FedMSState(adapter=model.adapter(), layers=layers, active=active)

    def begin_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> FedMSState:
        """Start stage two after `global_rounds` rounds.

        This clears the memory of the base optimizer, which belongs to the training of the global expert.
        """
        if trainer.round <= self.global_rounds or of(state).stage == 2:
            return of(state)
        return replace(of(state), stage=2, client_memory={}, server_memory={})

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate all blocks. Stage one trains all adapters, and stage two trains those of the active blocks."""
        stage = self.stage(of(state).stage)
        return {one.id: stage.row(of(state), one.id) for one in cohort}

    def objective(self, round: int, rounds: int) -> Objective:
        """Return the cross-entropy of the global expert in stage one, and of the mixture in stage two."""
        return self.stage(1 if round <= self.global_rounds else 2).objective

    def received_names(self, state: ServerState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Return the names of the tensors that a client receives in the present stage."""
        return self.stage(of(state).stage).received_names(of(state), client, row)

    def sent_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the names of all adapters in stage one, and of the gate alone in stage two."""
        return self.stage(of(state).stage).sent_names(self.trained_names(state, names, row))

    def trained_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return all adapters' names in stage one, and those of the gate and the active blocks in stage two."""
        return names_within(names, row.trained, row.excluded_prefixes)

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train the global expert in stage one, and local experts together with gates in stage two."""
        return self.stage(of(state).stage).local_updates(of(state), cohort, allocations, trainer)

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> FedMSState:
        """Average the global expert in stage one, and the gates in stage two (Eq. 7)."""
        state, stage = of(state), self.stage(of(state).stage)
        if state.stage == 1:
            adapter = layerwise_mean(state.adapter, updates, server.aggregation)
        else:
            adapter = average_gates(state.adapter, updates, server.aggregation, self.gate.weights == "loss")
        return replace(stage.keep(state, updates), adapter=adapter)

    def stage_states(self, state: ServerState, rounds: int) -> dict[str, ServerState]:
        """Return a state for each stage with at least one round; in stage two, all blocks are active."""
        everywhere = dict.fromkeys(of(state).active, len(state.layers))
        first = {"stage 1": state} if self.global_rounds else {}
        second = {"stage 2": replace(of(state), stage=2, active=everywhere)} if rounds > self.global_rounds else {}
        return first | second

    def client_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the gate with the client's local expert, or with the global expert if there is none yet."""
        own = of(state).experts.get(client)
        return {**state.adapter, **own} if own else state.adapter

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return 0 in stage one, and the number of blocks without trained adapters in stage two."""
        return self.stage(of(state).stage).num_frozen_blocks(of(state), client)

    def side_inputs(
        self, state: ServerState, reader: Reader, sets: Mapping[str, ImageSet]
    ) -> dict[str, Mapping[str, Tensor]]:
        """Return no side inputs in stage one, and the global expert's logits and the trunk's features in stage two."""
        return self.stage(of(state).stage).side_inputs(of(state), reader, sets)

    def predict(
        self, state: ServerState, model: LayeredModel, images: Images, personal: bool = False, domain: str | None = None
    ) -> Tensor:
        """Return the logits of the client's mixture if `personal` in stage two, or else of the global expert."""
        stage = self.stage(of(state).stage if personal else 1)
        return stage.predict(of(state), model, images)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Describe the gate of a client's model, or return None for the global model, a CLIP with LoRA."""
        return "a gate that mixes the global expert with the client's own" if of_client else None

    def metric_names(self, clients: Iterable[ClientId]) -> list[str]:
        """Return the names of the mean number of active blocks, of each client's number, and of the gate's metrics."""
        return [ACTIVE, *(f"{ACTIVE}/{client}" for client in sorted(clients)), MIX, SPREAD]

    def measure(self, state: ServerState, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Return the numbers of active blocks, and the gate's metrics.

        A client outside the cohort counts with its number in the next round.
        """
        stage = self.stage(of(state).stage)
        each = {f"{ACTIVE}/{one}": float(count) for one, count in sorted(stage.active(of(state), updates).items())}
        return {ACTIVE: sum(each.values()) / len(each), **each, **stage.gate_metrics(updates)}
