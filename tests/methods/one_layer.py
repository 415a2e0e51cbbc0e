"""The server's state of one linear layer, and clients that know only what they receive."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from fedsweep.methods import Server
from fedsweep.models import LoraConfig
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.types import ClientUpdate, LayerAllocation
from tests.references.folding import Learner

LAYER = "backbone.blocks.0.mlp.fc2"
A, B, FOLDED = f"{LAYER}.lora_A.default.weight", f"{LAYER}.lora_B.default.weight", f"{LAYER}.folded"
HEAD = "backbone.head.weight"
OUT, WIDTH, RANK = 5, 7, 3
ROW = LayerAllocation.of((0,))


def server_of(rank_scaling="held", **changes) -> Server:
    """Return the constants of a server with the full rank 3."""
    lora = LoraConfig(rank=RANK, alpha=6.0, rank_scaling=rank_scaling, **changes)
    return Server(1, AggregationConfig(), (1,), lora)


def trainer_at(round: int) -> SimpleNamespace:
    """Return the parts of a trainer that `begin_round` reads."""
    return SimpleNamespace(seed=4, round=round)


def start_of(dtype=torch.float64, seed=0) -> dict[str, torch.Tensor]:
    """Return the tensors before the first round."""
    drawn = torch.randn(RANK, WIDTH, generator=torch.Generator().manual_seed(seed))
    tensors = {A: drawn, B: torch.zeros(OUT, RANK), FOLDED: torch.zeros(OUT, WIDTH), HEAD: torch.ones(2, OUT)}
    return {name: one.to(dtype) for name, one in tensors.items()}


def learners(server: Server, ranks: list[int], shares: list[float], seed: int = 0) -> list[Learner]:
    """Return clients with the scalings that the server's configuration gives their ranks."""
    rng = np.random.default_rng(seed)
    return [
        Learner(rank, server.lora.scaling_of(rank), share, rng.normal(size=(9, WIDTH)), rng.normal(size=(9, OUT)))
        for rank, share in zip(ranks, shares, strict=True)
    ]


@dataclass
class Replica:
    """A client's copy of W, to which it adds each message of the server with its own arithmetic."""

    weight: np.ndarray
    scaling: float
    heard: list[int] = field(default_factory=list)

    def hear(self, round: int, message: dict[str, torch.Tensor]) -> None:
        """Add a message's change to the weight."""
        if A in message:
            self.weight = self.weight + self.scaling * message[B].numpy() @ message[A].numpy()
        if FOLDED in message:
            self.weight = self.weight + message[FOLDED].numpy()
        self.heard.append(round)


def sent(number: int, images: float, a: np.ndarray, b: np.ndarray, dtype=torch.float64) -> ClientUpdate:
    """Return the update of a client; `b` is in the server's scaling."""
    tensors = {A: torch.tensor(a, dtype=dtype), B: torch.tensor(b, dtype=dtype)}
    tensors[HEAD] = torch.full((2, OUT), float(number), dtype=dtype)
    return ClientUpdate(f"client {number}", ROW, tensors, int(images), {})


def weight_of(state, frozen: np.ndarray, scaling: float) -> np.ndarray:
    """Return the weight with which the server evaluates: W, the folded changes and s B A."""
    own = {name: state.adapter[name].double().numpy() for name in (A, B, FOLDED)}
    return frozen + own[FOLDED] + scaling * own[B] @ own[A]


def random_updates(ranks: list[int], images: list[int], seed: int = 1, dtype=torch.float64) -> list[ClientUpdate]:
    """Return updates with factors that share nothing with the server's."""
    rng = np.random.default_rng(seed)
    return [
        sent(number, count, rng.normal(size=(rank, WIDTH)), rng.normal(size=(OUT, rank)), dtype)
        for number, (rank, count) in enumerate(zip(ranks, images, strict=True))
    ]


def mean_of_products(updates: list[ClientUpdate]) -> np.ndarray:
    """Return the mean of B A, weighted by the clients' images, in double precision."""
    total = sum(one.num_examples for one in updates)
    factors = [(one.num_examples / total, *(one.adapter[name].double().numpy() for name in (B, A))) for one in updates]
    return sum(share * b @ a for share, b, a in factors)
