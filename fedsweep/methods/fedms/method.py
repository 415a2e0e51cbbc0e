"""FedMS: Federated Learning with Mixture of Sparsely Activated Foundations Models.

Panlong Wu, Kangshuo Li, Ting Wang, Fangxin Wang. Stage one trains a global expert. Stage two trains a local expert for
each client, and a gate that mixes the global and the local expert. In stage two, Sparsely Activated LoRA (SAL) first
trains only the top blocks of a local expert and then activates more blocks, one by one from the top down.
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
    """A method that trains a global expert in stage one, and a gate and each client's local expert in stage two.

    All experts are CLIP models with LoRA adapters. In stage one, clients send the LoRA adapters of the global expert.
    In stage two, they send only the gate. All clients run all blocks, and the hyperparameter `federation.depths` is
    ignored.
    """

    name: Literal["fedms"] = "fedms"
    needs: ClassVar[Needs] = Needs(text=True, validation=True)
    global_rounds: int = Field(
        25, ge=0, description="number of rounds of stage one; the remaining rounds are stage two"
    )
    sal: SALConfig = Field(
        SALConfig(), description="Sparsely Activated LoRA (SAL), which activates the blocks of local experts"
    )
    gate: GateConfig = Field(default_factory=GateConfig, description="gate that mixes the global and the local expert")

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError if `sal.initial`, the initial number of active blocks, exceeds the number of blocks."""
        if self.sal.initial > num_layers:
            raise ValueError(
                f"`method.sal.initial` must be at most {num_layers}, the number of blocks, but it is {self.sal.initial}"
            )

    def fingerprint(self) -> str:
        """Return a string that identifies the weights of the network that computes the gate's image features.

        Raises:
            UserError: The weights are missing.
        """
        return self.gate.trunk.fingerprint()

    def check_weights(self, backbone: BackboneConfig, class_names: Sequence[str]) -> None:
        """Check before a run that the gate can process images of the backbone's image size.

        Raises:
            UserError: The network that computes the gate's image features cannot process such images, or its weights
                are missing or do not fit its architecture.
        """
        check_gate(self.gate.trunk, self.gate.hidden, backbone.image_size, self.fingerprint())

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add the gate to the model as the module `gate`.

        The gate's image features come from a pre-trained network, and the layers after this network are untrained.
        """
        whole, outlined = self.gate.trained == "all", model.mean.is_meta
        model.add_module("gate", build_gate(self.gate.trunk, self.gate.hidden, whole, seed, outlined))

    def stage(self, number: int) -> GlobalStage | LocalStage:
        """Return the object that implements stage `number`, which is 1 or 2."""
        return GlobalStage() if number == 1 else LocalStage(self, self.sal, self.gate)

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> FedMSState:
        """Return the initial state, in which no client has a local expert yet."""
        layers, active = tuple(range(server.num_layers)), {one.id: self.sal.initial for one in clients}
        return FedMSState(adapter=model.adapter(), layers=layers, active=active)

    def begin_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> FedMSState:
        """Return `state`, switched to stage two if `global_rounds` rounds of stage one have been completed.

        At the switch, all values that the federated optimizer (option `base_optimizer`) has stored are deleted, because
        they concern only the global expert. FedDyn, for example, stores gradients.
        """
        if trainer.round <= self.global_rounds or of(state).stage == 2:
            return of(state)
        return replace(of(state), stage=2, client_memory={}, server_memory={})

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate all blocks to each client.

        A client trains all blocks in stage one, and the active blocks of its local expert in stage two.
        """
        stage = self.stage(of(state).stage)
        return {one.id: stage.row(of(state), one.id) for one in cohort}

    def objective(self, round: int, rounds: int) -> Objective:
        """Return the cross-entropy of the global expert (stage one) or of a client's mixture of experts (stage two)."""
        return self.stage(1 if round <= self.global_rounds else 2).objective

    def received_names(self, state: ServerState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Return the names of the tensors that the server sends to a client with the allocation `row`.

        In stage one, the server sends the global expert's tensors. In stage two, it sends the gate's tensors. A client
        without a local expert also receives the global expert in stage two.
        """
        return self.stage(of(state).stage).received_names(of(state), client, row)

    def sent_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the subset of `names` whose tensors are sent back by a client with the allocation `row`.

        In stage one, the client sends back all LoRA adapters. In stage two, it sends back only the gate.
        """
        return self.stage(of(state).stage).sent_names(self.trained_names(state, names, row))

    def trained_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the subset of `names` whose tensors are trained by a client with the allocation `row`.

        In stage one, the client trains all LoRA adapters. In stage two, it trains the gate and the LoRA adapters of the
        active blocks.
        """
        return names_within(names, row.trained, row.excluded_prefixes)

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train the clients and return their updates.

        In stage one, the clients train the global expert. In stage two, each client trains its local expert and its
        gate.
        """
        return self.stage(of(state).stage).local_updates(of(state), cohort, allocations, trainer)

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> FedMSState:
        """Average the clients' updates of the global expert in stage one, or their gates in stage two (Eq. 7)."""
        state, stage = of(state), self.stage(of(state).stage)
        if state.stage == 1:
            adapter = layerwise_mean(state.adapter, updates, server.aggregation)
        else:
            adapter = average_gates(state.adapter, updates, server.aggregation, self.gate.weights == "loss")
        return replace(stage.keep(state, updates), adapter=adapter)

    def stage_states(self, state: ServerState, rounds: int) -> dict[str, ServerState]:
        """Return a state for each stage that takes place in a run of `rounds` rounds, keyed by `stage 1` and `stage 2`.

        In the state of stage two, all blocks of the local experts are active. `fedsweep counts` therefore lists the
        largest possible number of trained parameters for this stage.
        """
        everywhere = dict.fromkeys(of(state).active, len(state.layers))
        first = {"stage 1": state} if self.global_rounds else {}
        second = {"stage 2": replace(of(state), stage=2, active=everywhere)} if rounds > self.global_rounds else {}
        return first | second

    def stage_of(self, state: ServerState) -> str:
        """Return `stage 1` or `stage 2`."""
        return f"stage {of(state).stage}"

    def client_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the tensors of a client's model: the gate and the client's local expert.

        A client without a local expert uses the global expert instead.
        """
        own = of(state).experts.get(client)
        return {**state.adapter, **own} if own else state.adapter

    def num_frozen_blocks(self, state: ServerState, client: ClientId | None = None) -> int:
        """Return the number of frozen blocks in a client's model, or in the global model if `client` is None.

        In stage one, no blocks are frozen. In stage two, all blocks of the global model are frozen, and in a client's
        model, all blocks below the active blocks are frozen.
        """
        return self.stage(of(state).stage).num_frozen_blocks(of(state), client)

    def side_inputs(
        self, state: ServerState, reader: Reader, sets: Mapping[str, ImageSet]
    ) -> dict[str, Mapping[str, Tensor]]:
        """Return the values that the clients' models use for each image in addition to its pixels.

        In stage one, there are no such values. In stage two, they are the logits of the global expert and, if the
        gate's trunk (the network that computes its image features) is frozen, these image features.

        Args:
            state: The server's state.
            reader: The reader of image batches, which can compute the outputs of frozen networks.
            sets: The image sets, keyed by names that the caller chooses.

        Returns:
            A dict from each name in `sets` to the values for that set's n images: the logits (n, classes) as `global`
            and the features (n, width) as `trunk`, if they are used.
        """
        return self.stage(of(state).stage).side_inputs(of(state), reader, sets)

    def predict(
        self, state: ServerState, model: LayeredModel, images: Images, personal: bool = False, domain: str | None = None
    ) -> Tensor:
        """Return the logits of the global expert or of a client's mixture of experts.

        The mixture is used in stage two if `personal` is true. In all other cases, the global expert is used.
        """
        stage = self.stage(of(state).stage if personal else 1)
        return stage.predict(of(state), model, images)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return a description of a client's gate, which cannot be exported, or None for the global model."""
        return "a gate that mixes the global expert with the client's local expert" if of_client else None

    def metric_names(self, clients: Iterable[ClientId]) -> list[str]:
        """Return the names of the metrics that FedMS adds.

        The metrics are each client's number of active blocks, the mean of these numbers, and the mean and the standard
        deviation of the gate's output.
        """
        return [ACTIVE, *(f"{ACTIVE}/{client}" for client in sorted(clients)), MIX, SPREAD]

    def measure(self, state: ServerState, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Return the metrics of the active (trained) blocks and of the gate.

        The metrics are each client's number of active blocks, the mean of these numbers, and the mean and the standard
        deviation of the gate's output. A client outside the cohort trains no blocks in this round; its number is the
        number of blocks that will be active when it trains again.
        """
        stage = self.stage(of(state).stage)
        each = {f"{ACTIVE}/{one}": float(count) for one, count in sorted(stage.active(of(state), updates).items())}
        return {ACTIVE: sum(each.values()) / len(each), **each, **stage.gate_metrics(updates)}
