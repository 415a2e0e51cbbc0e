"""FedSA-LoRA: Selective Aggregation for Low-Rank Adaptation in Federated Learning.

Pengxin Guo, Shuang Zeng, Yanran Wang, Huijie Fan, Feifei Wang, Liangqiong Qu. ICLR 2025. Clients train both factors of
LoRA, and the server averages only A. Each client i keeps its own B_i:

    A^{t+1} = sum_i p_i A_i,    model of client i: W + s B_i A^{t+1}

Here p_i is the weight of client i in the cohort.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsweep.methods.base import Allocations, FederatedMethod, Server, state_as
from fedsweep.methods.capabilities import DomainModels, ExportObstacle, LoraRule, Messages, SeparateModels, adapter_of
from fedsweep.models.client_rank import widened
from fedsweep.models.layered import Images, LayeredModel
from fedsweep.models.names import names_within, rank_dim
from fedsweep.training.aggregation import layerwise_mean
from fedsweep.training.local_training import CohortTrainer, LocalTask
from fedsweep.types import AdapterState, Client, ClientId, ClientUpdate, LayerAllocation, ServerState


@dataclass(frozen=True)
class FedSAState(ServerState):
    """The state of the server, including the tensors that each client keeps.

    In `adapter`, the factors B keep their initial zeros.

    Attributes:
        domains: A dict from each client to its domain.
        own: A dict from each client that has trained to the tensors that it never sends.
    """

    domains: dict[ClientId, str] = field(default_factory=dict)
    own: dict[ClientId, AdapterState] = field(default_factory=dict)


def of(state: ServerState) -> FedSAState:
    """Return `state` if it is a state of FedSA-LoRA; raise TypeError if it is the state of another method."""
    return state_as(FedSAState, state)


class FedSALoRA(FederatedMethod, LoraRule, Messages, SeparateModels, DomainModels, ExportObstacle):
    """A method in which clients share the factors A and keep their own factors B.

    There is no global model. An image of a domain is predicted with the mean of the logits of the personal models of
    this domain's clients. Every client holds all blocks, and the hyperparameter `federation.depths` is ignored.
    """

    name: Literal["fedsa_lora"] = "fedsa_lora"
    head: Literal["shared", "personal"] = Field(
        "shared", description="whether the head is sent and averaged like A (`shared`) or kept like B (`personal`)"
    )

    def keeps(self, name: str) -> bool:
        """Return whether clients keep a tensor: a factor B and, if the option `head` is `personal`, the head."""
        return rank_dim(name) == 1 or (self.head == "personal" and rank_dim(name) is None)

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> FedSAState:
        """Return the initial state, in which no client has trained yet."""
        layers, domains = tuple(range(server.num_layers)), {one.id: one.domain for one in clients}
        return FedSAState(adapter=model.adapter(), layers=layers, domains=domains)

    def received_names(self, state: ServerState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Return the names of the tensors that the server sends to a client: those that the client does not keep."""
        names = names_within(state.adapter, row.held, row.excluded_prefixes)
        return [name for name in names if not self.keeps(name)]

    def sent_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the subset of `names` that a client sends back: those that the client does not keep."""
        return [name for name in self.trained_names(state, names, row) if not self.keeps(name)]

    def trained_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the subset of `names` that a client trains: both factors of its blocks, and the head."""
        return names_within(names, row.trained, row.excluded_prefixes)

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train both factors of each client, starting from the server's A and the client's own B."""
        objective = self.objective(trainer.round, trainer.rounds)
        starts = {one.id: adapter_of(self, state, one.id) for one in cohort}
        tasks = [LocalTask(one, starts[one.id], allocations[one.id], objective) for one in cohort]
        updates = []
        for update in trainer.fit(tasks):
            sent, kept = (
                {name: one for name, one in update.adapter.items() if self.keeps(name) == keep}
                for keep in (False, True)
            )
            updates.append(replace(update, adapter=sent, private=kept))
        return updates

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> FedSAState:
        """Average the factors A, and store the tensors that the clients keep.

        Columns of B beyond a client's current rank keep their values.
        """
        mean, own = layerwise_mean(state.adapter, updates, server.aggregation), dict(of(state).own)
        for update in sorted(updates, key=lambda one: one.client):
            before = adapter_of(self, state, update.client)
            kept = {name: one.clone() for name, one in widened(update.private, before).items()}
            own[update.client] = own.get(update.client, {}) | kept
        return replace(of(state), adapter=mean, own=own)

    def client_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the tensors of a client's personal model: the server's A and the client's own B."""
        return state.adapter | of(state).own.get(client, {})

    def sent_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the tensors with which a client begins a round: those that it receives, and those that it keeps."""
        return self.client_adapter(state, client)

    @property
    def uses_domains(self) -> bool:
        """True, because images are predicted with the models of the clients of their domain."""
        return True

    def predict(
        self, state: ServerState, model: LayeredModel, images: Images, personal: bool = False, domain: str | None = None
    ) -> Tensor:
        """Return the logits of a client's model, or the mean over the clients of a domain if `personal` is false.

        If no client has the domain, the mean is taken over all clients.
        """
        if personal:
            return super().predict(state, model, images)
        domains = of(state).domains
        clients = sorted(one for one in domains if domains[one] == domain) or sorted(domains)
        logits = []
        for client in clients:
            model.load_adapter(adapter_of(self, state, client))
            logits.append(super().predict(state, model, images))
        model.load_adapter(state.adapter)
        return torch.stack(logits).mean(0)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return a description of the clients' own factors; None for a client's model, which can be exported."""
        return None if of_client else "a LoRA factor B for each client, and no global model"
