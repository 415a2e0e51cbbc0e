"""FedBRICK: Structural Bias Aware Heterogeneous Foundation Model Federated Tuning.

Yuhang Zhang, Xianda Wang, Wei Sun, Jiaxuan Chen, Fangxin Wang. FedBRICK extends another method (FedRA, InclusiveFL or
DepthFL), which allocates blocks to clients, defines the clients' loss and averages their updates.
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
from fedsweep.methods.fedbrick.bricks import FACTORS, Blend, Brick, Gate, InPlace, Norm, activations, add_bricks, distil
from fedsweep.methods.fedra import FedRA
from fedsweep.methods.inclusivefl import InclusiveFL
from fedsweep.models.layered import Images, LayeredModel, Step, Walk, completed
from fedsweep.models.names import names_within
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.training.local_training import CohortTrainer, LocalTask, Objective
from fedsweep.types import AdapterState, Client, ClientUpdate, LayerAllocation, ServerState

DepthMethod = Annotated[FedRA | InclusiveFL | DepthFL, Field(discriminator="name")]
SHARED = "shared"
"""The name of the only set of BRICKs if `domains` is `shared`."""


class FedBRICK(FederatedMethod, Messages, StandIns, ExportObstacle):
    """An extension of FedRA, InclusiveFL or DepthFL, with small modules (BRICKs) in place of missing blocks.

    The extended method (option `over`) decides which client holds which blocks; the other blocks are missing on this
    client. Before each round, the server trains the BRICKs to imitate the blocks. In stage I of a round, a client
    trains its own blocks and the BRICKs that replace its missing blocks. In stage II, it trains the BRICKs of its own
    blocks. With the option `domains: own`, each domain has its own set of BRICKs; with `domains: shared`, all domains
    share one set.
    """

    name: Literal["fedbrick"] = "fedbrick"
    over: DepthMethod = Field(
        FedRA(), description="method that FedBRICK extends (the depth method): fedra, inclusivefl or depthfl"
    )
    brick: bool = Field(True, description="use BRICKs; `false`: run only the depth method, with bit-identical results")
    rank: int = Field(8, gt=0, description="r, the rank of a BRICK's two low-rank paths")
    gate: Gate = Field(
        "softmax",
        description="function sigma of Eq. 19. `softmax`: over the features of a token; `sigmoid`: of each feature",
    )
    domains: Literal["own", "shared"] = Field(
        "own", description="`own`: separate BRICKs for each domain; `shared`: the same BRICKs for all domains"
    )
    server_epochs: int = Field(
        10,
        ge=0,
        description="number of epochs in which the server trains the BRICKs before each round; 0: no such training",
    )
    server_lr: float = Field(1e-4, gt=0, description="learning rate of the server's Adam")
    lambda_w: float = Field(
        0.01,
        ge=0,
        description="stage I: weight of the squared distance between the client's and the server's LoRA adapters "
        "(Eq. 21); on digits, 0.01 makes this term 0.04 % of the loss (seed 0, first two rounds)",
    )
    lambda_theta: float = Field(
        0.005,
        ge=0,
        description="stage I: weight of the squared distance between the client's and the server's BRICKs of missing "
        "blocks (Eq. 21); on digits, 0.005 makes this term 0.16 % of the loss (seed 0, first two rounds)",
    )
    lambda_d: float = Field(
        0.01,
        ge=0,
        description="stage II: weight of the squared difference between the outputs of BRICKs and blocks (Eq. 24); "
        "on digits, 0.01 makes this term 0.016 % of the loss with `distillation_norm` `mean`, and 15 % with `sum` "
        "(seed 0, first two rounds)",
    )
    distillation_norm: Norm = Field(
        "mean",
        description="norm of Eq. 24. `mean`: the mean over all elements; `sum`: the sum over an image's tokens and "
        "features (Eq. 24 as printed), which is larger by their number: 151,296 with ViT-B/16, 1,088 with digits_vit",
    )
    compensate: bool = Field(
        True, description="stage I: run and train BRICKs in place of missing blocks; `false`: skip missing blocks"
    )
    parallel: bool = Field(
        True, description="stage II: train the BRICKs of the client's own blocks; `false`: skip stage II"
    )
    anneal: bool = Field(
        True,
        description="stage II: shift the weight from a block to its BRICK, step by step; `false`: weigh both equally",
    )

    @property
    def needs(self) -> Needs:
        """The parts of a run that FedBRICK requires.

        The backbone needs LoRA adapters and a head. If the server trains BRICKs, it also needs real images of its own.
        """
        return Needs(head=True, proxy=self.brick and self.server_epochs > 0)

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError if the method that FedBRICK extends (option `over`) cannot run with these settings.

        DepthFL with BRICKs requires the option `compensate`, which replaces missing blocks with BRICKs. With BRICKs, a
        client of DepthFL gets all heads, including heads that follow missing blocks.
        """
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
        """Add BRICKs to the model, and the modules of the method that FedBRICK extends (option `over`).

        BRICKs are added for all domains, unless the option `brick` is false. With BRICKs, every client can run a model
        of full depth. The extended method then adds only the modules that a client of full depth needs.
        """
        self.over.prepare(model, {model.num_layers} if self.brick else depths, domains, seed)
        if self.brick:
            add_bricks(model, {self.set_of(domain) for domain in domains}, self.rank, self.gate, seed)

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> ServerState:
        """Return the initial state of the method that FedBRICK extends (option `over`).

        The state contains all trainable tensors, including those of the BRICKs.
        """
        return self.over.init(model, clients, replace(server, depths=(server.num_layers,)) if self.brick else server)

    def begin_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> ServerState:
        """Train all BRICKs on the server's images, so that they imitate the global model's blocks (Eq. 20).

        The BRICKs of a single domain are trained on the server's images of this domain. If the server has no such
        images, they are trained on all of its images. BRICKs that all domains share are trained on all images.
        """
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

    def draws_blocks(self, depths: Collection[int], num_layers: int) -> bool:
        """Return whether the method that FedBRICK extends (option `over`) draws the clients' blocks."""
        return self.over.draws_blocks(depths, num_layers)

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Return the allocations of the method that FedBRICK extends (option `over`).

        Unless the option `brick` is false, each client also gets the BRICKs of its own domain. If the extended method
        is DepthFL, BRICKs replace the client's missing blocks, so its model has full depth and gets all heads.
        """
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
        """Return the loss of the method that FedBRICK extends (option `over`).

        Stages I and II of the local training add terms to this loss.
        """
        return self.over.objective(round, rounds)

    def sent_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the subset of `names` whose tensors are sent back by a client with the allocation `row`.

        The method that FedBRICK extends (option `over`) selects this subset. FedBRICK removes the tensors of BRICKs
        that the client does not train: those of missing blocks if the option `compensate` is false, and those of the
        client's own blocks if the option `parallel` is false.
        """

        def trained(name: str) -> bool:
            layer = brick_of(name)
            return layer is None or (self.parallel if layer in row.held else self.compensate)

        sent = Messages.of_method(self.over).sent_names(state, names, row)
        return [name for name in sent if trained(name)]

    @property
    def has_stand_ins(self) -> bool:
        """True if, with these hyperparameters, clients run BRICKs in place of missing blocks."""
        return self.brick and self.compensate

    def stand_ins(self, model: LayeredModel, client: Client) -> Mapping[int, Step]:
        """Return the BRICKs of the client's domain, keyed by block number.

        The result is empty if clients run no BRICKs in place of missing blocks.
        """
        return {one.layer: one for one in self._in_place(model, client)} if self.has_stand_ins else {}

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train the clients in stage I and then in stage II, and return their updates.

        Stage I trains LoRA adapters, heads and the BRICKs of missing blocks. Stage II trains the BRICKs of the client's
        own blocks.
        """
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
        """Average the updates in the same way as the method that FedBRICK extends (option `over`).

        Each BRICK is averaged over the clients that trained it.
        """
        return self.over.aggregate(state, updates, server)

    def predict(
        self, state: ServerState, model: LayeredModel, images: Images, personal: bool = False, domain: str | None = None
    ) -> Tensor:
        """Return the logits of the global model, computed by the method that FedBRICK extends (option `over`).

        The global model has all blocks, so it needs no BRICKs.
        """
        return self.over.predict(state, model, images, personal, domain)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return a description of the model's parts that cannot be exported, or None if all parts can be exported.

        Such parts can come only from the method that FedBRICK extends (option `over`), such as DepthFL's heads. The
        exported global model needs no BRICKs, because it has all blocks.
        """
        depths = {num_layers} if self.brick else depths
        return ExportObstacle.of_method(self.over).export_obstacle(depths, num_layers, of_client)

    def _stage_one(
        self, state: ServerState, client: Client, row: LayerAllocation, trainer: CohortTrainer, live: AdapterState
    ) -> LocalTask:
        """Return the task of stage I, in which the client runs its own blocks, and BRICKs in place of missing blocks.

        The loss is L_task + lambda_w sum ||w - w^t||^2 + lambda_theta sum ||theta - theta^t||^2 (Eq. 21). Here L_task
        is the loss of the method that FedBRICK extends, w denotes the LoRA adapters, and theta denotes the BRICKs of
        missing blocks. The values w^t and theta^t are those that the server sent. If the option `compensate` is false,
        missing blocks are skipped and the loss is L_task. `live` contains the tensors of the model during the training,
        keyed by name.
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
        """Return the task of stage II, in which each block that the client holds runs in parallel with its BRICK.

        For a block f with the BRICK E, let the gap be the squared difference (E(x) - f(x))^2, reduced as the option
        `distillation_norm` says. The loss is L_task, the loss of the method that FedBRICK extends, plus lambda_d times
        the mean gap of the client's blocks (Eq. 24). `task` is the task of stage I, and `update` is its result.

        In step e = 0, 1, ..., E_2 - 1, the weight alpha of a block is 1 - e / E_2 (Eq. 22). The last step therefore has
        alpha = 1 / E_2. Eq. 22 also lists e = E_2, where alpha is 0, but stage II has only E_2 steps.
        """
        held, base = task.allocation.held, self.objective(trainer.round, trainer.rounds)
        in_place = self._in_place(trainer.model, task.client)

        def walk_at(over: float) -> Walk:
            share = 1 - over if self.anneal else 0.5  # alpha of Eq. 22
            norm = self.distillation_norm
            return [Blend(one.layer, one.brick, share, norm) if one.layer in held else one for one in in_place]

        def objective(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
            loss = base(model, images, labels, walk)
            gaps = [step.gap for step in walk if isinstance(step, Blend) and step.gap is not None]
            return loss + self.lambda_d * torch.stack(gaps).mean()

        names = [name for name in task.start if brick_of(name) in held]
        start, session = task.start | update.adapter, task.session + 1
        return LocalTask(task.client, start, task.allocation, objective, walk_at, names, session)

    def set_of(self, domain: str) -> str:
        """Return the name of the set of BRICKs for a domain.

        In the names of tensors, the name of the set stands between two dots, so any dots in it are replaced. The prefix
        `for_` prevents clashes with the attributes of PyTorch's ModuleDict.
        """
        return SHARED if self.domains == "shared" else "for_" + domain.replace("%", "%25").replace(".", "%2E")

    def _in_place(self, model: LayeredModel, client: Client) -> list[InPlace]:
        bricks = cast(nn.ModuleList, model.bricks[self.set_of(client.domain)])
        return [InPlace(layer, cast(Brick, brick)) for layer, brick in enumerate(bricks)]


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in names])


def brick_of(name: str) -> int | None:
    """Return the number of the block that a BRICK imitates, given the name of one of the BRICK's tensors.

    Return None if the tensor is not part of a BRICK.

    >>> brick_of("bricks.for_sketch.7.a1"), brick_of("backbone.blocks.7.attn.proj.lora_A.default.weight")
    (7, None)
    """
    return int(name.split(".")[2]) if name.startswith("bricks.") else None
