"""The outer loop of every paper. It yields after each round; the caller records, prunes or stops."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.randomness import stream
from fedsweep.methods import FederatedMethod, Server
from fedsweep.methods.base import Allocations
from fedsweep.methods.capabilities import (
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
from fedsweep.training.aggregation import lora_residual
from fedsweep.training.attacks import Attack, attacked, malicious_clients
from fedsweep.training.costs import round_costs
from fedsweep.training.drift_and_structural_bias import Placed, drift, structural_bias
from fedsweep.training.evaluation import EvaluationConfig, accuracy, client_scores, evaluate
from fedsweep.training.local_training import CohortTrainer
from fedsweep.training.tsne import draw, embed
from fedsweep.types import AdapterState, Client, ClientId, ClientUpdate, Domain, RoundResult, ServerState

GAMMA, GAMMA_STAR, IDLE = "allocation/gamma", "allocation/gamma_star", "allocation/idle"
RESIDUAL, NORM = "lora/residual", "lora/relative_norm"
PROBED = 16
"""Test images of each domain that drift is measured on."""
ROUND_METRICS = [GAMMA, GAMMA_STAR, IDLE, RESIDUAL, NORM]


class FederationConfig(Config):
    """Rounds, cohorts and the clients' capacities."""

    rounds: int = Field(100, gt=0, description="communication rounds")
    depths: tuple[int, ...] | Literal["dynamic"] = Field(
        description="L_i, the number of blocks that fit: one for each client, for each domain's clients, or for all; "
        "or drawn anew from 1 to L for every client in every round"
    )
    clients_per_round: Literal["one_per_domain"] | Annotated[int, Field(gt=0)] | None = Field(
        None, description="size of the random cohort, or one random client of each domain; null for all clients"
    )
    malicious_share: float = Field(
        0.0, ge=0, lt=1, description="share of all clients that attack, the same ones in every round"
    )
    attack: Attack = Field(
        "reversed_update",
        description="what they send: reversed_update, as far from the global model in the other direction; or "
        "reversed_weights, all that they trained with its sign turned",
    )


@dataclass(frozen=True)
class Federation:
    """Everything that stays the same over the rounds of one run."""

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

    def initial_state(self) -> ServerState:
        """Return the state before the first round, however far the resident model has been trained since."""
        self.model.load_adapter(self.fresh)
        return self.method.init(self.model, self.clients, self.server)

    def cohort(self, round: int) -> list[Client]:
        """Return the clients of a round by ascending id, so that the order of the client list does not matter."""
        chosen = self._chosen(round)
        if self.config.depths != "dynamic":
            return chosen
        draws = [stream(self.seed, "depth", round, client.id) for client in chosen]
        depths = [int(rng.integers(1, self.model.num_layers + 1)) for rng in draws]
        return [replace(client, capacity=depth) for client, depth in zip(chosen, depths, strict=True)]

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
        """Return the weights of all clients in averages, including those outside a cohort; they sum to one."""
        weights = {client.id: self.server.aggregation.weight_of(len(client.train)) for client in self.clients}
        total = sum(weights[client] for client in sorted(weights))
        return {client: weight / total for client, weight in weights.items()}

    def malicious(self) -> frozenset[ClientId]:
        """Return the clients that attack."""
        return malicious_clients([one.id for one in self.clients], self.config.malicious_share, self.seed)

    def evaluate(self, state: ServerState) -> dict[str, float]:
        """Return the metrics of the global model on the domains, and of clients' models on their own test images."""
        of_clients = self._evaluate_clients(state)
        self.model.load_adapter(state.adapter)
        predict = partial(predicted, self.method, state, self.trainer.reader)
        return {**evaluate(predict, self.domains, self.held_out), **of_clients}

    def _evaluate_clients(self, state: ServerState) -> dict[str, float]:
        sets = {one.id: one.test for one in self.clients if one.test is not None}
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
        """Return the cohort with the blocks and stand-ins of each client, for `evaluation.metrics`; none without."""
        if not self.evaluation.metrics:
            return []
        stand_ins = StandIns.of_method(self.method).stand_ins
        return [Placed(one, allocations[one.id].held, stand_ins(self.model, one)) for one in cohort]

    def drifted(
        self, sent: ServerState, state: ServerState, placed: Sequence[Placed], updates: Sequence[ClientUpdate]
    ) -> dict[str, float]:
        """Measure client drift on the same test images of all domains, if `evaluation.metrics` asks for it."""
        if "drift" not in self.evaluation.metrics:
            return {}
        images = []
        for domain in self.domains:
            chosen = stream(self.seed, "probe", domain.name).permutation(len(domain.test))[:PROBED]
            images.append(domain.test.take(torch.from_numpy(chosen))[0])
        return drift(self.model, sent.adapter, state.adapter, updates, placed, torch.cat(images))

    def biased(self, sent: ServerState, placed: Sequence[Placed], round: int) -> dict[str, float]:
        """Measure structural bias as before the clients train, if `evaluation.metrics` asks for it."""
        if "structural_bias" not in self.evaluation.metrics:
            return {}
        self.model.load_adapter(sent.adapter)
        objective = self.method.objective(round, self.config.rounds)
        return structural_bias(self.model, objective, sent.layers, placed, self.seed, round)

    def embed(self, state: ServerState) -> Embedding | None:
        """Return the t-SNE of the global model's features; None if none is asked for, or the run diverged."""
        classes, images = self.evaluation.tsne_classes, self.evaluation.tsne_images
        if classes is None:
            return None
        sample = draw(self.domains, self.class_names, classes, images, self.seed)
        self.model.load_adapter(state.adapter)
        return embed(self.model, state.layers, sample, self.class_names, self.evaluation.batch_size, self.seed)


def federate(federation: Federation, start: RoundResult | None = None) -> Iterator[RoundResult]:
    """Yield the untuned model (round 0), then the result of every round; with `start`, only the rounds after it."""
    method, server, shares = federation.method, federation.server, federation.shares()
    malicious = federation.malicious()
    if start is None:
        begun = time.monotonic()
        state = federation.initial_state()
        yield RoundResult(0, state, federation.evaluate(state), time.monotonic() - begun)
        done = 0
    else:
        state, done = start.state, start.round
    for round in range(done + 1, federation.config.rounds + 1):
        begun = time.monotonic()
        cohort, trainer = federation.cohort(round), federation.trainer.at(round, state.client_memory)
        state = method.begin_round(state, server, trainer)
        trainer = trainer.at(round, state.client_memory)  # which the method may have cleared
        allocations = method.allocate(state, cohort, server, stream(federation.seed, "allocation", round))
        sent = state
        trained = method.local_updates(state, cohort, allocations, trainer)
        sent_to = {
            one: SeparateModels.of_method(method).sent_adapter(sent, one) for one in malicious & allocations.keys()
        }
        updates = attacked(sent_to, trained, federation.config.attack)
        messages = Messages.of_method(method)
        received = {client: messages.received_names(sent, client, row) for client, row in allocations.items()}
        costs = round_costs(federation.model, state.adapter, allocations, received, updates)
        residual = lora_residual(state.adapter, updates, server.aggregation)
        covered = coverage(state, allocations)
        placed = federation.placed(cohort, allocations)
        biased = federation.biased(state, placed, round)
        aggregate = method.aggregate(state, updates, server)
        state = federation.trainer.base.conclude(sent, aggregate, updates, shares)
        if malicious:  # who attacks remembers what it has trained, not what it has sent
            honest = federation.trainer.base.conclude(sent, aggregate, trained, shares)
            state = replace(state, client_memory=honest.client_memory)
        state = method.end_round(replace(state, gamma_star=int(covered[GAMMA_STAR])), server, trainer)
        drifted = federation.drifted(sent, state, placed, updates)
        scores = federation.evaluate(state)
        # Evaluated last, the model holds the state's adapter.
        lora = {RESIDUAL: residual, NORM: relative_norm(federation.model, state.layers)}
        own = OwnMetrics.of_method(method).measure(state, updates)
        images = sum(update.num_examples for update in updates)
        loss = sum(update.metrics["loss"] * update.num_examples for update in updates) / images
        metrics = {**scores, "loss/train": loss, **covered, **lora, **costs, **own, **drifted, **biased}
        yield RoundResult(round, state, metrics, time.monotonic() - begun)


def coverage(state: ServerState, allocations: Allocations) -> dict[str, float]:
    """Return the smallest number of clients that hold an active block, and the number of idle blocks.

    An active block of the server's model has a holder, an idle one has none. Gamma* of FedRA's Theorem 1 (second
    version) is the smallest number of all rounds so far.
    """
    holders = [sum(layer in row.held for row in allocations.values()) for layer in state.layers]
    fewest = min((count for count in holders if count), default=0)
    star = fewest if state.gamma_star is None else min(fewest, state.gamma_star)
    return {GAMMA: float(fewest), GAMMA_STAR: float(star), IDLE: float(holders.count(0))}
