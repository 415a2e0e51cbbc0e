"""The costs of one client: bytes, FLOPs and memory, counted from the shapes of tensors, without data and training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fedsweep.common.errors import one_line
from fedsweep.common.randomness import stream
from fedsweep.data.data_config import load
from fedsweep.methods import Server
from fedsweep.methods.base import with_ranks
from fedsweep.methods.capabilities import Messages, Stages
from fedsweep.models import LayeredModel, add_lora, train_head_alone
from fedsweep.models.client_rank import cut
from fedsweep.models.names import is_statistic, names_within
from fedsweep.training.costs import size_in_bytes
from fedsweep.training.counting_trainer import CountingTrainer, MetaReader, MetaRows
from fedsweep.training.local_training import LocalConfig
from fedsweep.types import Client, ClientId, ClientUpdate, ImageSet, LayerAllocation, ServerState

if TYPE_CHECKING:
    from fedsweep.federation.run_config import RunConfig

NAMES_NEEDED = "FLOPs and memory of a text encoder depend on the lengths of the class names, which are unknown."
NO_STEP = "No training step was counted."
NO_AUTOCAST = "The memory of `precision` bfloat16 is not counted, because the meta device has no autocast."


@dataclass(frozen=True)
class ClientCosts:
    """The costs of one client in one round.

    Attributes:
        bytes_down: The bytes of the tensors that the client receives, as in the metric `bytes/down`. In all rounds but
            the first, clients of FLoRA and FedEx-LoRA also receive the changes of the frozen weights, and clients of
            RoLoRA need not receive both factors. The value is that of such a round, after a round of the largest
            cohort, unless the run has only one round.
        bytes_up: The bytes of the tensors that the client sends, as in the metric `bytes/up`. FedAG's quality scores
            are not counted: 4 bytes for each synthetic image of the client's domain.
        trained: The number of trained parameters.
        weights: The bytes of the client's model: frozen and trained tensors of the blocks that the client holds, and of
            the layers outside the blocks.
        forward: The FLOPs of the forward pass of one local step with `local.batch_size` images; None if unknown. A
            multiplication and an addition are two FLOPs. Only matrix products, convolutions and attention are counted.
        backward: The FLOPs of the backward pass of one local step; None if unknown.
        memory: The peak of the bytes that training this client alone takes: `weights`, the optimizer's state,
            gradients, activations, temporary tensors, and the batch; None if unknown.
        missing: A sentence that explains why values are None; empty if no value is None.

    If a method trains a client in several sessions per round, as FedBRICK does, `forward` and `backward` are the sums
    of one step of each session, and `memory` is the largest peak. Forward passes outside of training, for example for
    FedMS's validation images, are not counted.
    """

    bytes_down: int
    bytes_up: int
    trained: int
    weights: int
    forward: int | None
    backward: int | None
    memory: int | None
    missing: str = ""

    @property
    def flops_per_step(self) -> int | None:
        """The FLOPs of the forward and the backward pass of one local step; None if unknown."""
        return None if self.forward is None or self.backward is None else self.forward + self.backward

    def flops_per_round(self, local: LocalConfig, images: int, fewest: int) -> int | None:
        """Return the FLOPs of a client's training in a round, in which every step counts as a whole batch.

        Args:
            local: The options of local training.
            images: The number of the client's training images.
            fewest: The smallest number of training images of any client.
        """
        step = self.flops_per_step
        return None if step is None else step * local.steps_for(images, fewest)


def client_costs(
    config: RunConfig,
    classes: int | tuple[str, ...],
    client: Client,
    row: LayerAllocation | None = None,
    stage: str = "",
) -> ClientCosts:
    """Return the costs of one client of a run. Equal questions are answered from a cache.

    Args:
        config: The run.
        classes: The number of classes or their names. A backbone with a text encoder needs the names, because its FLOPs
            depend on the lengths of the prompts.
        client: The client, whose id and domain must be those of a client of the run. Its images are ignored.
        row: The blocks that the client holds and trains. By default, the method allocates `client.capacity` blocks.
        stage: The stage of the method, such as `stage 1`; most methods have a single stage, whose name is empty.
    """
    return cost_counter(config, classes).costs(client, row, stage)


def classes_of(config: RunConfig) -> int | tuple[str, ...]:
    """Return the classes of a run's data: their names if the backbone has a text encoder, and else their number."""
    names = load(config.data).class_names
    return names if config.backbone.has_text else len(names)


def cost_counter(config: RunConfig, classes: int | tuple[str, ...]) -> CostCounter:
    """Return an object that counts the costs of a run's clients; runs with equal shapes share it.

    `classes` is the number of classes or their names.
    """
    lora = config.lora.model_copy(update={"alpha": 1.0, "scaling": None})
    optimizer = config.optimizer.model_copy(update={"lr": 1.0})
    shapes = {"seed": 0, "seed_streams": "all", "lora": lora, "optimizer": optimizer, "devices": "none"}
    return _counter(_Question(config.model_copy(update=shapes), classes))


class _Question:
    """A run and its classes, which can be the key of a cache, although a RunConfig may contain dicts."""

    def __init__(self, config: RunConfig, classes: int | tuple[str, ...]) -> None:
        self.config, self.classes = config, classes
        self._key = config.model_dump_json(), classes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=64)
def _counter(question: _Question) -> CostCounter:
    return CostCounter(question.config, question.classes)


class CostCounter:
    """Counts the costs of the clients of one run on torch's meta device.

    Attributes:
        config: The run.
        model: The full model, on the meta device.
        clients: The run's clients, without images. If `federation.depths` is `dynamic`, there is a client for each
            possible depth.
        server: The server.
        states: The server's state in each stage of the method, keyed by the name of the stage.
        senders: The server's state before a round of each stage; before the first round of all, if the messages do not
            depend on the previous round.
    """

    def __init__(self, config: RunConfig, classes: int | tuple[str, ...]) -> None:
        method = config.method
        self.config, self.model = config, outlined(config, classes)
        self.clients = clients_of(config)
        self.lora = config.lora if method.needs.lora else None
        depths = tuple(sorted(config.depths()))
        self.server = Server(self.model.num_layers, config.aggregation, depths, self.lora)
        first = method.init(self.model, self.clients, self.server)
        self.states = Stages.of_method(method).stage_states(first, config.federation.rounds)
        self.senders = self.states | self._later_states()
        for layer in self.model.modules():  # a client adds folded changes to its frozen weights, and keeps only the sum
            layer._buffers.pop("folded", None)
        self._prompts_known = not config.backbone.has_text or not isinstance(classes, int)
        self._known: dict[tuple[str, str, int, LayerAllocation, bool, int], ClientCosts] = {}

    def _later_states(self) -> dict[str, ServerState]:
        """Return the server's state after a round of each stage, keyed by the stage of the next round.

        All values are zero, and the dict is empty if all rounds have the same messages.
        """
        method, found = self.config.method, dict[str, ServerState]()
        messages = Messages.of_method(method)
        if not messages.remember_cohort or self.config.federation.rounds == 1:
            return found
        cohort = largest_cohort(self.config)
        for state in self.states.values():
            zeros = {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in state.adapter.items()}
            before = replace(state, adapter=zeros)
            rng = stream(self.config.streams, "allocation", 1)
            rows = with_ranks(method.allocate(before, cohort, self.server, rng), cohort)
            sent = {client: messages.sent_names(before, zeros, row) for client, row in rows.items()}
            updates = [
                ClientUpdate(client, row, cut({name: zeros[name] for name in sent[client]}, row.rank), 1, {})
                for client, row in rows.items()
            ]
            after = method.aggregate(before, updates, self.server)
            found[Stages.of_method(method).stage_of(after)] = after
        return found

    def row(self, client: Client, stage: str = "") -> LayerAllocation:
        """Return the blocks that a client holds and trains, as the method allocates them in the first round."""
        allocate, state = self.config.method.allocate, self.states[stage]
        whole = replace(client, id=f"{client.id}+", capacity=self.model.num_layers)
        try:
            rng = stream(self.config.streams, "allocation", 1)
            rows = allocate(state, [client], self.server, rng)
        except ValueError:  # FedRA's option `ensure_cover` needs a cohort that can hold all blocks
            rng = stream(self.config.streams, "allocation", 1)
            rows = allocate(state, [client, whole], self.server, rng)
        return with_ranks({client.id: rows[client.id]}, [client])[client.id]

    def costs(
        self, client: Client, row: LayerAllocation | None = None, stage: str = "", count_step: bool = True
    ) -> ClientCosts:
        """Return the costs of one client; the other arguments are those of `client_costs`.

        If `count_step` is false, do not count a training step, which takes most of the time: FLOPs and memory are None.
        """
        row, state = row or self.row(client, stage), self.senders[stage]
        messages = Messages.of_method(self.config.method)
        down = sum(map(size_in_bytes, (messages.received(state, client.id, row), messages.broadcast(state))))
        key = stage, client.domain, client.capacity, row, count_step, down
        if key not in self._known:
            self._known[key] = self._counted(client, row, stage, count_step, down)
        return self._known[key]

    def largest_costs(self, client: Client, count_step: bool = True) -> ClientCosts:
        """Return the largest value of each cost over all stages of the method; None if it is unknown in one of them.

        `count_step` is that of `costs`.
        """
        found = [self.costs(client, stage=stage, count_step=count_step) for stage in self.states]
        names = [one.name for one in fields(ClientCosts) if one.name != "missing"]
        values = {name: [getattr(one, name) for one in found] for name in names}
        known = {name: None if None in each else max(each) for name, each in values.items()}
        return ClientCosts(**cast(Any, known), missing=next((one.missing for one in found if one.missing), ""))

    def _counted(self, client: Client, row: LayerAllocation, stage: str, count_step: bool, down: int) -> ClientCosts:
        state, messages = self.states[stage], Messages.of_method(self.config.method)
        movable = cut(self.model.movable(), row.rank)
        tensors = cut(dict(self.model.named_parameters()) | dict(self.model.named_buffers()), row.rank)

        def size(source: Mapping[str, Tensor], names: Iterable[str]) -> int:
            return size_in_bytes({name: source[name] for name in names})

        trained = [name for name in messages.trained_names(state, movable, row) if not is_statistic(name)]
        costs = ClientCosts(
            bytes_down=down,
            bytes_up=size(movable, messages.sent_names(state, movable, row)),
            trained=sum(movable[name].numel() for name in trained),
            weights=size(tensors, names_within(tensors, row.held, row.excluded_prefixes)),
            forward=None,
            backward=None,
            memory=None,
            missing="" if count_step else NO_STEP,
        )
        return self._trained(costs, client, row, state) if count_step else costs

    def _trained(self, costs: ClientCosts, client: Client, row: LayerAllocation, state: ServerState) -> ClientCosts:
        """Return `costs` with the FLOPs and the memory of training."""
        method, trainer = self.config.method, self._trainer()
        if not self._prompts_known:
            return replace(costs, missing=NAMES_NEEDED)
        client = self._with_images(client)
        try:
            with trainer.meter:
                method.local_updates(state, [client], {client.id: row}, trainer)
        except Exception as error:  # a method of another package may use the values of tensors
            return replace(costs, missing=f"`method` {method.name} cannot be counted without data: {one_line(error)}.")
        sessions = trainer.sessions
        if not sessions and costs.trained:
            return replace(costs, missing=f"`method` {method.name} does not train clients with `trainer.fit`.")
        if not sessions:
            return replace(costs, forward=0, backward=0, missing=f"`method` {method.name} trains nothing.")
        forward, backward = sum(one.forward for one in sessions), sum(one.backward for one in sessions)
        costs = replace(costs, forward=forward, backward=backward)
        if self.config.precision == "bfloat16":
            return replace(costs, missing=NO_AUTOCAST)
        return replace(costs, memory=costs.weights + max(one.memory for one in sessions))

    def _trainer(self) -> CountingTrainer:
        config = self.config
        return CountingTrainer(
            self.model,
            config.optimizer,
            config.base_optimizer,
            config.local,
            config.streams,
            rounds=config.federation.rounds,
            fewest=config.local.batch_size,
            reader=MetaReader(self.model, "", MetaRows(), config.evaluation.batch_size),
            round=1,
            lora=self.lora,
        )

    def _with_images(self, client: Client) -> Client:
        """Return the client with one batch of images without values in each of its image sets."""
        size, count = self.config.backbone.image_size, self.config.local.batch_size
        images = ImageSet(
            torch.empty(count, 3, size, size, dtype=torch.uint8, device="meta"),
            torch.empty(count, dtype=torch.int64, device="meta"),
        )
        return replace(client, train=images, validation=images, test=images, synthetic=images)


def clients_of(config: RunConfig) -> list[Client]:
    """Return the clients of a run without their images.

    If `federation.depths` is `dynamic`, return a client for each possible depth instead, with adapters of full rank.
    """
    domains, capacities, ranks = config.client_domains(), config.capacities(), config.client_ranks()
    if config.federation.depths == "dynamic":
        capacities = {f"{depth} blocks": depth for depth in config.depths()}
        domains = dict.fromkeys(capacities, next(iter(domains.values())))
    return [_without_images(one, domains[one], depth, ranks.get(one)) for one, depth in capacities.items()]


def largest_cohort(config: RunConfig) -> list[Client]:
    """Return the largest clients of a run that can be a cohort, without their images.

    If depths or ranks are drawn in each round, they are as large as possible.
    """
    domains, depths, ranks = config.client_domains(), config.capacities(), config.client_ranks()
    if config.federation.depths == "dynamic":
        depths = dict.fromkeys(domains, config.backbone.depth)
    largest = sorted(domains, key=lambda one: (-depths[one], -(ranks[one] or config.lora.rank), one))
    chosen = sorted(config.first_cohort(largest))
    return [_without_images(one, domains[one], depths[one], ranks[one]) for one in chosen]


def _without_images(client: ClientId, domain: str, depth: int, rank: int | None) -> Client:
    return Client(client, domain, cast(Any, None), depth, rank=rank)


def outlined(config: RunConfig, classes: int | tuple[str, ...]) -> LayeredModel:
    """Return a run's model with its adapters and the method's modules, but without weights.

    The tensors are on torch's meta device, so they have shapes but no values. `classes` is the number of classes, or
    their names, from which a text encoder derives the lengths of its prompts.
    """
    count, names = (classes, None) if isinstance(classes, int) else (len(classes), classes)
    model: LayeredModel = config.backbone.outlined(count, names)
    if config.method.needs.lora:
        add_lora(model, config.lora, config.streams, config.aggregation.lora == "freeze_a")
    else:
        train_head_alone(model)
    config.method.prepare(model, config.depths(), set(config.client_domains().values()), config.streams)
    return model.to("meta")
