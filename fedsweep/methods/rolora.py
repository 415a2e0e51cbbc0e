"""RoLoRA: Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA.

Shuangyi Chen, Yuanxin Guo, Yue Ju, Harik Dalal, Zhongwen Zhu, Ashish Khisti. NeurIPS 2025. The factors B and A are
trained in alternate rounds. Rounds are counted from 1, and p_i is the weight of client i in the cohort:

    round 1, 3, 5, ...:  B^{t+1} = sum_i p_i B_i,  A^{t+1} = A^t
    round 2, 4, 6, ...:  A^{t+1} = sum_i p_i A_i,  B^{t+1} = B^t

All clients have the same frozen factor, so the mean of the products is the product of the means:

    sum_i p_i B_i A^t = (sum_i p_i B_i) A^t
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from numpy.random import Generator

from fedsweep.methods.base import Allocations, FederatedMethod, Server, first_blocks, state_as
from fedsweep.methods.capabilities import LoraRule, Messages, Stages
from fedsweep.models.layered import LayeredModel
from fedsweep.models.names import is_folded, names_within
from fedsweep.training.aggregation import layerwise_mean
from fedsweep.training.local_training import CohortTrainer, LocalTask
from fedsweep.types import Client, ClientId, ClientUpdate, LayerAllocation, ServerState

Factor = Literal["A", "B"]


@dataclass(frozen=True)
class RoLoRAState(ServerState):
    """The server's state, including the factor that is trained next.

    Attributes:
        rank: The full rank.
        factor: The factor that clients train in the next round.
        latest: A dict from each client of the latest round to the blocks that it held and the rank of its adapters.
            These clients still have the factor that they did not train.
    """

    rank: int
    factor: Factor = "B"
    latest: dict[ClientId, tuple[tuple[int, ...], int]] = field(default_factory=dict)


def of(state: ServerState) -> RoLoRAState:
    """Return `state` if it is a state of RoLoRA; raise TypeError if it is the state of another method."""
    return state_as(RoLoRAState, state)


class RoLoRA(FederatedMethod, LoraRule, Messages, Stages):
    """A method that trains LoRA's factors in alternate rounds: B in round 1, A in round 2, and so on.

    A client neither trains nor sends the other factor. The head is trained and averaged in every round. A client of
    depth L_i holds the first L_i blocks.
    """

    name: Literal["rolora"] = "rolora"
    remember_cohort: ClassVar[bool] = True

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> RoLoRAState:
        """Return the initial state, in which B is trained next; a round of A would do nothing while B is 0."""
        layers, rank = tuple(range(server.num_layers)), server.lora.rank if server.lora else 0
        return RoLoRAState(adapter=model.adapter(), layers=layers, rank=rank)

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate the first L_i blocks to each client i, where L_i is the number of blocks that fit on the client."""
        return first_blocks(cohort)

    def received_names(self, state: ServerState, client: ClientId, row: LayerAllocation) -> list[str]:
        """Return the names of the tensors that the server sends to a client with the allocation `row`.

        The frozen factor of a round is the one that changed in the previous round, and every client receives it. The
        trained factor did not change in the previous round, so only clients that lack it receive it: those that did
        not take part in the previous round, or that had fewer blocks or a smaller rank then.
        """
        names = names_within(state.adapter, row.held, row.excluded_prefixes)
        if client not in of(state).latest:
            return names
        held, rank = of(state).latest[client]
        if not set(row.held) <= set(held) or (row.rank or of(state).rank) > rank:
            return names
        return [name for name in names if f".lora_{of(state).factor}." not in name]

    def sent_names(self, state: ServerState, names: Iterable[str], row: LayerAllocation) -> list[str]:
        """Return the subset of `names` that a client trains and sends back: one of the two factors, and the head."""
        frozen = f".lora_{_other(of(state).factor)}."
        within = names_within(names, row.trained, row.excluded_prefixes)
        return [name for name in within if frozen not in name and not is_folded(name)]

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train one factor and the head of each client; the other factor is frozen."""
        objective, tasks = self.objective(trainer.round, trainer.rounds), []
        for one in cohort:
            row = allocations[one.id]
            names = self.sent_names(state, state.adapter, row)
            tasks.append(LocalTask(one, state.adapter, row, objective, names=names))
        return trainer.fit(tasks)

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> RoLoRAState:
        """Average the trained factor and the head, and let the other factor be trained next."""
        ordered = sorted(updates, key=lambda one: one.client)
        latest = {one.client: (one.allocation.held, one.allocation.rank or of(state).rank) for one in ordered}
        mean = layerwise_mean(state.adapter, updates, server.aggregation)
        return replace(of(state), adapter=mean, factor=_other(of(state).factor), latest=latest)

    def stage_states(self, state: ServerState, rounds: int) -> dict[str, ServerState]:
        """Return a state for the rounds in which B is trained, and one for the rounds in which A is trained."""
        factors: Sequence[Factor] = ("B", "A") if rounds > 1 else ("B",)
        return {f"rounds of {factor}": replace(of(state), factor=factor) for factor in factors}

    def stage_of(self, state: ServerState) -> str:
        """Return the name of the stage that trains the factor of the next round."""
        return f"rounds of {of(state).factor}"


def _other(factor: Factor) -> Factor:
    return "A" if factor == "B" else "B"
