"""The loop over communication rounds, which yields the result of each round before the next round starts."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from fedsweep.common.randomness import stream
from fedsweep.federation.federation_config import FederationConfig
from fedsweep.federation.lora_metrics import NORM, RESIDUAL, of_average
from fedsweep.federation.simulated_time import Clock
from fedsweep.methods import FederatedMethod, Server
from fedsweep.methods.base import Allocations, with_ranks
from fedsweep.methods.capabilities import (
    DomainModels,
    FrozenBlocks,
    Messages,
    OwnMetrics,
    SeparateModels,
    SideInputs,
    StandIns,
    adapter_of,
    predicted,
)
from fedsweep.models import LayeredModel, relative_norm
from fedsweep.results.tsne_files import Embedding
from fedsweep.training.attacks import attacked, malicious_clients
from fedsweep.training.costs import round_costs
from fedsweep.training.coverage import GAMMA, GAMMA_STAR, IDLE, coverage
from fedsweep.training.drift_and_structural_bias import Placed, drift, structural_bias
from fedsweep.training.evaluation import (
    EvaluationConfig,
    Predict,
    accuracy,
    client_scores,
    evaluate,
    in_one_pass,
    of_validation,
    stratified,
    under_validation_names,
    validate,
)
from fedsweep.training.local_training import CohortTrainer
from fedsweep.training.precision import Precision, arithmetic
from fedsweep.training.round_metrics import MeasuredRound, measure, names_of
from fedsweep.training.tsne import draw, embed
from fedsweep.types import AdapterState, Client, ClientId, ClientUpdate, Domain, ImageSet, RoundResult, ServerState

PROBED = 16
"""Number of test images of each domain on which client drift is measured."""
ROUND_METRICS = [GAMMA, GAMMA_STAR, IDLE, RESIDUAL, NORM]


@dataclass(frozen=True)
class Federation:
    """The parts of a run that do not change between rounds."""

    method: FederatedMethod
    model: LayeredModel
    fresh: AdapterState
    clients: Sequence[Client]
    domains: Sequence[Domain]
    held_out: Sequence[Domain]
    class_names: tuple[str, ...]
    server: Server
    trainer: CohortTrainer
    config: FederationConfig
    evaluation: EvaluationConfig
    seed: int
    compared: Collection[int] = ()
    """Rounds that are evaluated in addition to those of `federation.evaluate_every`."""
    data_digest: str = ""
    precision: Precision = "float32"
    clock: Clock | None = None
    """The clock of the simulated time; None if the run has no devices."""

    def initial_state(self) -> ServerState:
        """Return the server's state before the first round.

        The state does not depend on earlier training of `model`.
        """
        self.model.load_adapter(self.fresh)
        return self.method.init(self.model, self.clients, self.server)

    def cohort(self, round: int) -> list[Client]:
        """Return the clients of a round, sorted by id.

        If `federation.depths` is `dynamic`, the depth of each client is drawn anew for the round, and if
        `federation.ranks` is `dynamic`, so is its rank.
        """
        chosen = self._chosen(round)
        if self.config.depths == "dynamic":
            depths = self._drawn("depth", round, chosen, self.model.num_layers)
            chosen = [replace(client, capacity=depth) for client, depth in zip(chosen, depths, strict=True)]
        if self.config.ranks == "dynamic" and self.server.lora is not None:
            ranks = self._drawn("rank", round, chosen, self.server.lora.rank)
            chosen = [replace(client, rank=rank) for client, rank in zip(chosen, ranks, strict=True)]
        return chosen

    def _drawn(self, purpose: str, round: int, clients: Sequence[Client], most: int) -> list[int]:
        draws = [stream(self.seed, purpose, round, client.id) for client in clients]
        return [int(rng.integers(1, most + 1)) for rng in draws]

    def allocate(self, state: ServerState, cohort: Sequence[Client], round: int) -> Allocations:
        """Return the blocks and the ranks that each client of the cohort runs and trains in a round."""
        rng = stream(self.seed, "allocation", round)
        return with_ranks(self.method.allocate(state, cohort, self.server, rng), cohort)

    def sent(self, state: ServerState, allocations: Allocations) -> list[AdapterState]:
        """Return the tensors that the server sends in a round: to each client of the cohort, and to all clients."""
        messages = Messages.of_method(self.method)
        everyone = messages.broadcast(state)
        own = [messages.received(state, client, row) for client, row in allocations.items()]
        return [*own, *([everyone] * len(self.clients) if everyone else [])]

    def _chosen(self, round: int) -> list[Client]:
        clients = sorted(self.clients, key=lambda client: client.id)
        size = self.config.clients_per_round
        if size is None:
            return clients
        rng = stream(self.seed, "cohort", round)
        if size == "one_per_domain":
            by_domain: dict[str, list[Client]] = {}
            for client in clients:
                by_domain.setdefault(client.domain, []).append(client)
            drawn = [group[rng.integers(len(group))] for group in by_domain.values()]
            return sorted(drawn, key=lambda client: client.id)
        return [clients[i] for i in sorted(rng.choice(len(clients), size=size, replace=False))]

    def shares(self) -> dict[ClientId, float]:
        """Return the weight of each client in averages over all clients, keyed by client id. The weights sum to one."""
        weights = {client.id: self.server.aggregation.weight_of(len(client.train)) for client in self.clients}
        total = sum(weights[client] for client in sorted(weights))
        return {client: weight / total for client, weight in weights.items()}

    def malicious(self) -> frozenset[ClientId]:
        """Return the ids of the malicious clients."""
        return malicious_clients([one.id for one in self.clients], self.config.malicious_share, self.seed)

    def evaluates(self, round: int) -> bool:
        """Return whether the model is evaluated after a round."""
        return round % self.config.evaluate_every == 0 or round == self.config.rounds or round in self.compared

    def tests(self, round: int) -> bool:
        """Return whether an evaluated round measures the test images."""
        return self.evaluation.test_rounds == "all" or round in (0, self.config.rounds)

    def tested(self, round: int) -> tuple[Sequence[Domain], Sequence[Domain]]:
        """Return the clients' domains and the held-out domains, with the images on which a round is evaluated."""
        if self.evaluation.images_per_domain is None or round in (0, self.config.rounds):
            return self.domains, self.held_out
        return self._samples

    @cached_property
    def _samples(self) -> tuple[Sequence[Domain], Sequence[Domain]]:
        count = self.evaluation.images_per_domain or 0
        domains, held_out = (
            [stratified(one, count, self.seed) for one in given] for given in (self.domains, self.held_out)
        )
        return domains, held_out

    def evaluate(self, state: ServerState, round: int, right: dict[str, Tensor] | None = None) -> dict[str, float]:
        """Evaluate the global model and the clients' models after a round, and return the metrics.

        The global model is tested and validated on all domains. The model of each client is tested on the client's own
        test images, and validated on its tuning images. If `right` is given, a tensor of each domain is added to it:
        for each test image, whether the global model predicts its class, bool (n,).
        """
        domains, held_out = self.tested(round)
        tests, clients = self.tests(round), self.clients if self.tests(round) else ()
        sets = [*(domains if tests else ()), *(held_out if tests else ()), *of_validation(domains)]
        own = {one.id: one.test for one in clients if one.test is not None}
        tuning = {one.id: one.tuning for one in self.clients if one.tuning is not None}
        of_all = (*(one.test for one in sets), *own.values(), *tuning.values())
        self.trainer.reader.listener.testing(sum(map(len, of_all)))
        of_clients = self._evaluate_clients(state, own) | under_validation_names(self._evaluate_clients(state, tuning))
        self.model.load_adapter(state.adapter)
        predict: Predict = partial(predicted, self.method, state, self.trainer.reader)
        frozen = FrozenBlocks.of_method(self.method).num_frozen_blocks(state)
        if round == 0 and not frozen and type(self.method).predict is FederatedMethod.predict:
            # Arms that differ only in their training share these logits, which are cached on the node.
            predict = partial(self.trainer.reader.untuned_logits, state.layers, state.adapter)
        if sets and not DomainModels.of_method(self.method).uses_domains:
            predict = in_one_pass(predict, sets)
        of_test = evaluate(predict, domains, held_out, right) if tests else {}
        return {**of_test, **validate(predict, domains), **of_clients}

    def _evaluate_clients(self, state: ServerState, sets: Mapping[ClientId, ImageSet]) -> dict[str, float]:
        if not sets:
            return {}
        side_inputs = SideInputs.of_method(self.method).side_inputs(state, self.trainer.reader, sets)
        found, loaded = {}, None
        for client in (one for one in self.clients if one.id in sets):
            if (adapter := adapter_of(self.method, state, client.id)) is not loaded:
                self.model.load_adapter(adapter)
                loaded = adapter
            images = sets[client.id]
            logits = predicted(self.method, state, self.trainer.reader, images, client, side_inputs[client.id])
            found[client.id] = accuracy(logits, images.labels)
        return client_scores(found, self.malicious())

    def placed(self, cohort: Sequence[Client], allocations: Allocations) -> list[Placed]:
        """Return the blocks and the stand-ins of each client of the cohort.

        A stand-in is a module that replaces a block that the client does not hold. If `evaluation.metrics` is empty,
        the blocks and stand-ins are not needed, and the list is empty.
        """
        if not self.evaluation.metrics:
            return []
        stand_ins = StandIns.of_method(self.method).stand_ins
        return [Placed(one, allocations[one.id].held, stand_ins(self.model, one)) for one in cohort]

    def drifted(
        self, sent: ServerState, state: ServerState, placed: Sequence[Placed], updates: Sequence[ClientUpdate]
    ) -> dict[str, float]:
        """Return the metrics of client drift, or an empty dict if they are not measured in this round.

        There are two metrics of client drift. The first is the mean cosine distance between the clients'
        representations of the same test images. The second is the mean cosine distance between a client's update of the
        head and the server's update of the head.

        Args:
            sent: The server's state before local training.
            state: The server's state at the end of the round.
            placed: The clients of the cohort, with their blocks and stand-ins.
            updates: The updates of the cohort.
        """
        if "drift" not in self.evaluation.metrics or not placed:
            return {}
        return drift(self.model, sent.adapter, state.adapter, updates, placed, self._probed())

    def _probed(self) -> Tensor:
        images = []
        for domain in self.domains:
            chosen = stream(self.seed, "probe", domain.name).permutation(len(domain.test))[:PROBED]
            images.append(domain.test.take(torch.from_numpy(chosen))[0])
        return torch.cat(images)

    def of_plugins(
        self,
        round: int,
        sent: ServerState,
        state: ServerState,
        placed: Sequence[Placed],
        updates: Sequence[ClientUpdate],
    ) -> dict[str, float]:
        """Return the metrics of plug-ins, or an empty dict if they are not measured in this round (see `drifted`)."""
        if not placed or not names_of(self.evaluation.metrics):
            return {}
        objective = self.method.objective(round, self.config.rounds)
        parts = (objective, sent, state, updates, placed, self._probed())
        return measure(self.evaluation.metrics, MeasuredRound(round, self.seed, self.model, *parts))

    def biased(self, sent: ServerState, placed: Sequence[Placed], round: int) -> dict[str, float]:
        """Return the metrics of structural bias, or an empty dict if they are not measured in this round.

        Structural bias is the effect of missing blocks on a client's gradients.

        Args:
            sent: The server's state before local training.
            placed: The clients of the cohort, with their blocks and stand-ins.
            round: The number of the round.
        """
        if "structural_bias" not in self.evaluation.metrics or not placed:
            return {}
        self.model.load_adapter(sent.adapter)
        objective = self.method.objective(round, self.config.rounds)
        return structural_bias(self.model, objective, sent.layers, placed, self.seed, round)

    def embed(self, state: ServerState) -> Embedding | None:
        """Return a t-SNE of the global model's features on test images.

        Return None if no t-SNE is configured, if a feature is not finite, or if all images have the same features.
        """
        classes, images = self.evaluation.tsne_classes, self.evaluation.tsne_images
        if classes is None:
            return None
        sample = draw(self.domains, self.class_names, classes, images, self.seed)
        self.model.load_adapter(state.adapter)
        return embed(self.model, state.layers, sample, self.class_names, self.evaluation.batch_size, self.seed)


def federate(federation: Federation, start: RoundResult | None = None) -> Iterator[RoundResult]:
    """Yield the result of each round. Round 0 evaluates the untuned model.

    If `start`, the result of an earlier round, is given, only the rounds after it are run and yielded.
    """
    rounds = _federate(federation, start)
    while True:
        with arithmetic(federation.precision, federation.model.mean.device):
            result = next(rounds, None)
        if result is None:
            return
        yield result


def _federate(federation: Federation, start: RoundResult | None) -> Iterator[RoundResult]:
    method, server, shares = federation.method, federation.server, federation.shares()
    malicious = federation.malicious()
    if start is None:
        begun = time.monotonic()
        state = federation.initial_state()
        yield RoundResult(0, state, federation.evaluate(state, 0), time.monotonic() - begun)
        done = 0
    else:
        state, done = start.state, start.round
    for round in range(done + 1, federation.config.rounds + 1):
        begun = time.monotonic()
        cohort, trainer = federation.cohort(round), federation.trainer.at(round, state.client_memory)
        state = method.begin_round(state, server, trainer)
        trainer = trainer.at(round, state.client_memory)  # the method may have cleared the memory
        allocations = federation.allocate(state, cohort, round)
        sent = state
        trained = method.local_updates(state, cohort, allocations, trainer)
        sent_to = {
            one: SeparateModels.of_method(method).sent_adapter(sent, one) for one in malicious & allocations.keys()
        }
        updates = attacked(sent_to, trained, federation.config.attack)
        costs = round_costs(federation.model, allocations, federation.sent(sent, allocations), updates)
        if federation.clock is not None:
            costs |= federation.clock.measure(sent, cohort, allocations, updates)
        covered = coverage(state, allocations)
        evaluates = federation.evaluates(round)
        placed = federation.placed(cohort, allocations) if evaluates else []
        biased = federation.biased(state, placed, round)
        aggregate = method.aggregate(state, updates, server)
        averaged = of_average(method, federation.model, server, state, aggregate, updates)
        state = federation.trainer.base.conclude(sent, aggregate, updates, shares)
        if malicious:  # a malicious client remembers the tensors that it trained, not those that it sent
            honest = federation.trainer.base.conclude(sent, aggregate, trained, shares)
            state = replace(state, client_memory=honest.client_memory)
        state = method.end_round(replace(state, gamma_star=int(covered[GAMMA_STAR])), server, trainer)
        drifted = federation.drifted(sent, state, placed, updates)
        others = federation.of_plugins(round, sent, state, placed, updates)
        right: dict[str, Tensor] = {}
        scores = federation.evaluate(state, round, right) if evaluates else {}
        if not evaluates:  # the evaluation loads the state's adapter into the model
            federation.model.load_adapter(state.adapter)
        norm = relative_norm(federation.model, state.layers)
        lora = {RESIDUAL: averaged.pop(RESIDUAL), NORM: norm, **averaged}
        own = OwnMetrics.of_method(method).measure(state, updates)
        images = sum(update.num_examples for update in updates)
        loss = sum(update.metrics["loss"] * update.num_examples for update in updates) / images
        metrics = {**scores, "loss/train": loss, **covered, **lora, **costs, **own, **drifted, **biased, **others}
        yield RoundResult(round, state, metrics, time.monotonic() - begun, right)
