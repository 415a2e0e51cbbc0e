"""FedBRICK: Structural Bias Aware Heterogeneous Foundation Model Federated Tuning.

Yuhang Zhang, Xianda Wang, Wei Sun, Jiaxuan Chen, Fangxin Wang. FedBRICK extends a depth method (FedRA, InclusiveFL or
DepthFL), which decides which client holds which blocks, what a client minimises, and how updates are averaged.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal, cast

import torch
from numpy.random import Generator
from pydantic import Field
from torch import Tensor, nn

from fedsweep.common.randomness import stream
from fedsweep.methods.base import Allocations, FederatedMethod, Needs, Server
from fedsweep.methods.capabilities import ExportObstacle, Messages, StandIns
from fedsweep.methods.depthfl import DepthFL
from fedsweep.methods.fedbrick.bricks import FACTORS, Blend, Brick, Gate, InPlace, activations, add_bricks, distil
from fedsweep.methods.fedra import FedRA
from fedsweep.methods.inclusivefl import InclusiveFL
from fedsweep.models.layered import Images, LayeredModel, Step, Walk, completed
from fedsweep.models.names import names_within
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.training.local_training import CohortTrainer, LocalTask, Objective
from fedsweep.types import AdapterState, Client, ClientUpdate, LayerAllocation, ServerState

DepthMethod = Annotated[FedRA | InclusiveFL | DepthFL, Field(discriminator="name")]
SHARED = "shared"
"""The name of the set of BRICKs that all domains share with `domains: shared`."""


class FedBRICK(FederatedMethod, Messages, StandIns, ExportObstacle):
    """Small modules (BRICKs) in place of the blocks that a client does not hold, trained on the server and on clients.

    A depth method decides which client holds which blocks. For the depth method, a client with BRICKs counts as a
    client of L blocks. Each domain has a set of BRICKs. Their tensors are named `bricks.<set>.<block>.<factor>`.
    """

    name: Literal["fedbrick"] = "fedbrick"
    over: DepthMethod = Field(FedRA(), description="depth method that FedBRICK extends: fedra, inclusivefl or depthfl")
    brick: bool = Field(True, description="use BRICKs; `false`: the depth method alone, with bit-identical results")
    rank: int = Field(8, gt=0, description="r, the rank of a BRICK's two low-rank paths")
    gate: Gate = Field(
        "softmax", description="sigma of Eq. 19: softmax over the features of a token, or the sigmoid of each feature"
    )
    domains: Literal["own", "shared"] = Field(
        "own", description="`own`: separate BRICKs for each domain; `shared`: the same BRICKs for all domains"
    )
    server_epochs: int = Field(
        10, ge=0, description="number of epochs of the server's distillation before each round; 0: no distillation"
    )
    server_lr: float = Field(1e-4, gt=0, description="learning rate of the server's Adam")
    lambda_w: float = Field(
        0.01, ge=0, description="stage I: weight of the penalty on the distance to the server's adapters (Eq. 21)"
    )
    lambda_theta: float = Field(
        0.005, ge=0, description="stage I: weight of the same penalty on the BRICKs of missing blocks (Eq. 21)"
    )
    lambda_d: float = Field(0.01, ge=0, description="stage II: weight of the distillation loss (Eq. 24)")
    compensate: bool = Field(
        True, description="stage I: run and train BRICKs in place of missing blocks; `false`: train as the depth method"
    )
    parallel: bool = Field(
        True, description="stage II: train the BRICKs of the client's own blocks; `false`: leave stage II out"
    )
    anneal: bool = Field(
        True, description="stage II: move from the block to its BRICK over the steps; `false`: use half of each"
    )

    @property
    def needs(self) -> Needs:
        """A backbone with a head and, if the server distils, images on the server."""
        return Needs(head=True, proxy=self.brick and self.server_epochs > 0)

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError if the depth method cannot run, or if `compensate` is false for DepthFL."""
        try:
            self.over.check(capacities, num_layers, aggregation)
        except ValueError as error:
            raise ValueError(str(error).replace("`method.", "`method.over.")) from None
        if self.brick and not self.compensate and self.over.name == "depthfl":
            raise ValueError(
                "`method.compensate` must be true if `method.over` is depthfl, whose heads need BRICKs in place of "
                "missing blocks, but it is false"
            )

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Add the depth method's modules for clients of L blocks, and the sets of BRICKs."""
        self.over.prepare(model, {model.num_layers} if self.brick else depths, domains, seed)
        if self.brick:
            add_bricks(model, {self.set_of(domain) for domain in domains}, self.rank, self.gate, seed)

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """Return the initial state of the depth method; its adapter includes the BRICKs."""
        return self.over.init(model, clients, replace(server, depths=(server.num_layers,)) if self.brick else server)

    def begin_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> ServerState:
        """Distil the global blocks into each set of BRICKs, on the server's images of the set's domain (Eq. 20)."""
        state = self.over.begin_round(state, server, trainer)
        if not self.needs.proxy:
            return state
        model, adapter, size = trainer.model, dict(state.adapter), trainer.local.batch_size
        model.load_adapter(adapter)
        for name in sorted(model.bricks):
            names = {one: [f"bricks.{name}.{layer}.{one}" for layer in range(model.num_layers)] for one in FACTORS}
            stacked = {one: torch.stack([adapter[each] for each in names[one]]) for one in FACTORS}
            own = [images for domain, images in server.proxy.items() if self.set_of(domain) == name]
            passed = activations(model, own or list(server.proxy.values()), size)
            rng = stream(trainer.seed, "distillation", trainer.round, name)
            learned = distil(stacked, passed, self.gate, self.server_epochs, self.server_lr, size, rng)
            for one in FACTORS:
                adapter |= {each: part.clone() for each, part in zip(names[one], learned[one], strict=True)}
        return replace(state, adapter=adapter)

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate the depth method's blocks, the BRICKs of the client's domain, and the heads for L blocks."""
        rows = self.over.allocate(state, cohort, server, rng)
        if not self.brick:
            return rows
        heads: tuple[str, ...] = ()
        if isinstance(self.over, DepthFL):
            heads = self.over.absent_heads(state, server.num_layers, server.num_layers)
        sets = sorted({name.split(".")[1] for name in state.adapter if name.startswith("bricks.")})
        return {
            one.id: replace(
                rows[one.id],
                excluded_prefixes=(*heads, *(f"bricks.{name}." for name in sets if name != self.set_of(one.domain))),
            )
            for one in cohort
        }

    def objective(self, round: int, rounds: int) -> Objective:
        """Return the objective of the depth method, L_task."""
        return self.over.objective(round, rounds)

    def sent_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the depth method's names, and the BRICKs that the client trains.

        Stage I trains the BRICKs of missing blocks, and stage II those of the blocks that the client holds.
        """

        def trained(name: str) -> bool:
            layer = brick_of(name)
            return layer is None or (self.parallel if layer in row.held else self.compensate)

        sent = Messages.of_method(self.over).sent_names(state, names, row)
        return [name for name in sent if trained(name)]

    @property
    def has_stand_ins(self) -> bool:
        """True if stage I is used."""
        return self.brick and self.compensate

    def stand_ins(self, model: LayeredModel, client: Client) -> Mapping[int, Step]:
        """Return the BRICKs of the client's domain by block number."""
        return {one.layer: one for one in self._in_place(model, client)} if self.has_stand_ins else {}

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train adapters, heads and the BRICKs of missing blocks in stage I, and the other BRICKs in stage II."""
        if not self.brick:
            return self.over.local_updates(state, cohort, allocations, trainer)
        live = trainer.model.movable()
        first = [self._stage_one(state, one, allocations[one.id], trainer, live) for one in cohort]
        updates = trainer.fit(first)
        if not self.parallel:
            return updates
        pairs = zip(first, updates, strict=True)
        second = trainer.fit([self._stage_two(task, update, trainer) for task, update in pairs])
        return [replace(one, adapter=one.adapter | other.adapter) for one, other in zip(updates, second, strict=True)]

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> ServerState:
        """Average as the depth method does; a BRICK is averaged within its set, over the clients that trained it."""
        return self.over.aggregate(state, updates, server)

    def predict(
        self, state: ServerState, model: LayeredModel, images: Images, personal: bool = False, domain: str | None = None
    ) -> Tensor:
        """Return the logits of the depth method; the global model has all blocks and needs no BRICKs."""
        return self.over.predict(state, model, images, personal, domain)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return the depth method's obstacle; the global model has all blocks and needs no BRICKs."""
        depths = {num_layers} if self.brick else depths
        return ExportObstacle.of_method(self.over).export_obstacle(depths, num_layers, of_client)

    def _stage_one(
        self, state: ServerState, client: Client, row: LayerAllocation, trainer: CohortTrainer, live: AdapterState
    ) -> LocalTask:
        """Return the task of Eq. 21: L_task + lambda_w sum ||w - w^t||^2 + lambda_theta sum ||theta - theta^t||^2.

        The client runs its own blocks and BRICKs in place of the missing blocks. `live` contains the tensors of the
        model itself, whose adapters w and BRICKs theta change during the training.
        """
        within = names_within(state.adapter, range(trainer.model.num_layers), row.excluded_prefixes)
        start = {name: state.adapter[name] for name in within}
        base = self.objective(trainer.round, trainer.rounds)
        names = names_within(start, row.trained, row.excluded_prefixes)
        if not self.compensate:
            return LocalTask(client, start, row, base, names=[name for name in names if brick_of(name) is None])
        names = [name for name in names if brick_of(name) not in row.held]
        adapters = [name for name in names if ".lora_" in name]
        bricks = [name for name in names if brick_of(name) is not None]
        whole = completed(row.held, self.stand_ins(trainer.model, client))
        pulls = [(self.lambda_w, adapters), (self.lambda_theta, bricks)]
        ties = [(weight, tied, _joined(start, tied)) for weight, tied in pulls if weight and tied]

        def objective(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
            loss = base(model, images, labels, walk)
            for weight, tied, begun in ties:
                loss = loss + weight * (_joined(live, tied) - begun).square().sum()
            return loss

        return LocalTask(client, start, row, objective, lambda _: whole, names)

    def _stage_two(self, task: LocalTask, update: ClientUpdate, trainer: CohortTrainer) -> LocalTask:
        """Return the task of Eq. 24: L_task + lambda_d / |S_k| sum ||E(x) - f(x)||^2.

        Each block f that the client holds runs in parallel with its BRICK E.
        """
        held, base = task.allocation.held, self.objective(trainer.round, trainer.rounds)
        in_place = self._in_place(trainer.model, task.client)

        def walk_at(over: float) -> Walk:
            share = 1 - over if self.anneal else 0.5  # alpha of Eq. 22
            return [Blend(one.layer, one.brick, share) if one.layer in held else one for one in in_place]

        def objective(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
            loss = base(model, images, labels, walk)
            gaps = [step.gap for step in walk if isinstance(step, Blend) and step.gap is not None]
            return loss + self.lambda_d * torch.stack(gaps).mean()

        names = [name for name in task.start if brick_of(name) in held]
        start, session = task.start | update.adapter, task.session + 1
        return LocalTask(task.client, start, task.allocation, objective, walk_at, names, session)

    def set_of(self, domain: str) -> str:
        """Return the name of a domain's set of BRICKs.

        The name is part of tensor names, so it contains no dot and differs from the names of all attributes.
        """
        return SHARED if self.domains == "shared" else "for_" + domain.replace("%", "%25").replace(".", "%2E")

    def _in_place(self, model: LayeredModel, client: Client) -> list[InPlace]:
        bricks = cast(nn.ModuleList, model.bricks[self.set_of(client.domain)])
        return [InPlace(layer, cast(Brick, brick)) for layer, brick in enumerate(bricks)]


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in names])


def brick_of(name: str) -> int | None:
    """Return the block number in the name of a BRICK's tensor, or None for other tensors.

    >>> brick_of("bricks.for_sketch.7.a1"), brick_of("backbone.blocks.7.attn.proj.lora_A.default.weight")
    (7, None)
    """
    return int(name.split(".")[2]) if name.startswith("bricks.") else None
