"""Small adapters of unequal rank, for tests of the methods that aggregate LoRA's factors by a rule of their own."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedsweep.federation.rounds import Federation
from fedsweep.methods import Server
from fedsweep.models import LoraConfig
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.types import AdapterState, ClientUpdate, LayerAllocation, ServerState
from tests.references.flexlora import Factors

HEAD = "backbone.head.weight"
SHAPES = {
    "backbone.blocks.0.mlp.fc2": ((11,), (9,)),
    "backbone.blocks.1.attn.proj": ((8,), (13,)),
    "backbone.patch_embed.proj": ((3, 2, 2), (10,)),
}
"""The input and the output sizes of each adapted layer: a linear layer in each of two blocks, and a convolution."""


def names(layer: str) -> tuple[str, str]:
    """Return the names of a layer's factors A and B."""
    return f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight"


def drawn(rng: np.random.Generator, rank: int, depth: int = 2) -> AdapterState:
    """Return random tensors of a client of rank `rank` that holds the first `depth` blocks, in double precision."""
    found = {}
    for layer, (inside, out) in SHAPES.items():
        if ".blocks." not in layer or int(layer.split(".")[2]) < depth:
            a, b = names(layer)
            found[a] = torch.tensor(rng.normal(size=(rank, *inside)))
            found[b] = torch.tensor(rng.normal(size=(*out, rank, *[1] * (len(inside) - 1))))
    return found | {HEAD: torch.tensor(rng.normal(size=4))}


def sent(client: str, adapter: AdapterState, examples: int = 1) -> ClientUpdate:
    """Return the update of a client with `examples` images."""
    return ClientUpdate(client, LayerAllocation.of([0, 1]), adapter, examples, {"loss": 0.0})


def server(rank: int, ranks: Sequence[int] = ()) -> Server:
    """Return the constants of a server of rank `rank` whose clients can have the ranks `ranks`."""
    return Server(2, AggregationConfig(), (2,), LoraConfig(rank=rank, scaling=1.0), ranks=tuple(sorted(set(ranks))))


def factors(adapter: AdapterState, layer: str) -> Factors:
    """Return a layer's factors A (r, in) and B (out, r) as matrices in double precision."""
    a, b = (adapter[name].flatten(1).double().numpy() for name in names(layer))
    return a, b


def product(adapter: AdapterState, layer: str, rank: int | None = None) -> np.ndarray:
    """Return the product B A (out, in) of the first `rank` components of a layer's factors."""
    a, b = factors(adapter, layer)
    return b[:, :rank] @ a[:rank]


def layers_of(adapter: AdapterState) -> list[str]:
    """Return the adapted layers whose factors are among the tensors."""
    return [layer for layer in SHAPES if names(layer)[0] in adapter]


def played(small: Federation, rounds: int = 2) -> Iterator[tuple[ServerState, list[ClientUpdate], ServerState]]:
    """Yield the state before each round, the updates, and the state after the aggregation."""
    state = small.initial_state()
    for round in range(1, rounds + 1):
        cohort = small.cohort(round)
        rows = small.allocate(state, cohort, round)
        updates = small.method.local_updates(state, cohort, rows, small.trainer.at(round))
        after = small.method.aggregate(state, updates, small.server)
        yield state, updates, after
        state = after
