"""Functions and classes that count the parameters of a run and the costs of its clients, using only tensor shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsweep.common.randomness import stream
from fedsweep.federation.client_costs import ClientCosts, CostCounter, cost_counter
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.base import with_ranks
from fedsweep.methods.capabilities import Messages
from fedsweep.models.client_rank import cut
from fedsweep.models.names import is_statistic, layer_of, names_within
from fedsweep.training.costs import held_parameters, sizes_of, transmission_seconds
from fedsweep.types import Client

if TYPE_CHECKING:
    from torch import Tensor

ALL, BLOCK, LORA, HEAD, BRICK = (f"parameters/{part}" for part in ("all", "block", "lora_per_block", "head", "brick"))
FROZEN, GATE, ADAPTER, MIXTURE = (f"parameters/{part}" for part in ("backbone", "gate", "gate_adapter", "mixture"))
SERVER, TAUGHT = "parameters/server", "parameters/server_adapters"
BANDWIDTHS = (0.1, 1.0, 10.0)  # megabytes per second (FedMS, Section 4.2.3)
STAGES = ("", "/stage_2")
TRAINED = [f"percent/trained{stage}" for stage in STAGES]
SECONDS = [f"seconds/{bandwidth:g}MBps{stage}" for stage in STAGES for bandwidth in BANDWIDTHS]
COUNTS = [ALL, BLOCK, LORA, HEAD, BRICK, FROZEN, GATE, ADAPTER, MIXTURE, SERVER, TAUGHT, *TRAINED, *SECONDS]
BF16, FP32 = 2, 4
"""Bytes per transmitted value: bfloat16 as in FedBRICK, single precision as in FedMS."""


@dataclass(frozen=True)
class ClientCount:
    """The numbers of values that one client holds, trains and sends in one stage of the method.

    Only FedMS has two stages. For all other methods, `stage` is empty.
    """

    stage: str
    depth: int
    """Number of blocks that the client holds."""
    rank: int | None
    """Rank of the client's adapters; None for the full rank."""
    held: int
    """Number of values that the client holds, including its BRICKs (FedBRICK's modules in place of absent blocks)."""
    bricks: int
    trained: int
    percent: float
    """The trained parameters as a percentage of the backbone's parameters."""
    sent: int
    """Number of values that the client sends in one round, including running statistics of batch norms."""
    costs: ClientCosts | None = None
    """The bytes, FLOPs and memory of the client's training; None if they were not asked for."""

    @property
    def bytes_up(self) -> int:
        """Number of bytes that the client sends in one round, at 2 bytes per value (bfloat16) as in FedBRICK."""
        return BF16 * self.sent

    def seconds(self, megabytes_per_second: float) -> float:
        """Return how many seconds the client needs to send one round's values, at 4 bytes per value as in FedMS."""
        return transmission_seconds(FP32 * self.sent, megabytes_per_second)


@dataclass(frozen=True)
class Counted:
    """The parameter counts of a run's model and of its clients."""

    parameters: Mapping[str, int]
    """Number of parameters by metric name. `parameters/all` excludes BRICKs, gates and the server's own modules."""
    shares: Mapping[str, float]
    """Trained percentage and seconds for sending of the deepest client in each stage, by metric name."""
    clients: tuple[ClientCount, ...]


def count_parameters(config: RunConfig, classes: int, costs: bool = False) -> Counted:
    """Count the parameters of a run's model and of one client per depth (number of blocks).

    Args:
        config: The run.
        classes: Number of classes of the model's head.
        costs: Whether to count the costs of the clients' training too, which takes up to a second per client.
    """
    counter = cost_counter(config, classes)
    model = counter.model
    sizes = sizes_of(model)

    def under(prefix: str) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(prefix))

    top = model.num_layers - 1  # the last block exists in both encoders, even if one has more blocks
    lora = sum(size for name, size in sizes.items() if layer_of(name) == top and ".lora_" in name)
    backbone = sum(size for name, size in sizes.items() if name.startswith("backbone.") and ".lora_" not in name)
    parameters = {
        ALL: held_parameters(sizes, range(model.num_layers), ("bricks.", "gate.", "server.")),
        BLOCK: held_parameters(sizes, [top]) - held_parameters(sizes, []) - lora,
        LORA: lora,
        HEAD: under(model.head_prefix),
        FROZEN: backbone,
    }
    if gate := under("gate."):
        parameters |= {GATE: gate, ADAPTER: under("gate.adapter."), MIXTURE: 2 * backbone + gate}
    if server := under("server."):
        parameters |= {SERVER: server, TAUGHT: server - under("server.clip.")}
    if brick := next((name for name in sizes if name.startswith("bricks.")), None):
        parameters[BRICK] = under(f"{brick.rpartition('.')[0]}.")
    clients = tuple(_clients(config, counter, backbone, costs))
    shares: dict[str, float] = {}
    for one in reversed(clients):  # so that the deepest client of each stage comes last
        suffix = STAGES[one.stage == "stage 2"]
        shares[f"percent/trained{suffix}"] = one.percent
        shares |= {f"seconds/{speed:g}MBps{suffix}": one.seconds(speed) for speed in BANDWIDTHS}
    return Counted(parameters, shares, clients)


def _clients(config: RunConfig, counter: CostCounter, backbone: int, costs: bool) -> Iterator[ClientCount]:
    """Yield the counts of one client per depth and rank, deepest first, for each stage of the method.

    The depth of a client is the number of blocks that it holds.
    """
    messages, clients = Messages.of_method(config.method), counter.clients
    parameters = dict(counter.model.named_parameters())
    for stage, state in counter.states.items():
        rng = stream(config.streams, "allocation", 1)
        rows = with_ranks(config.method.allocate(state, clients, counter.server, rng), clients)
        of_size: dict[tuple[int, int | None], Client] = {}
        for client in sorted(clients, key=lambda one: (-one.capacity, -(rows[one.id].rank or 0))):
            of_size.setdefault((len(rows[client.id].held), rows[client.id].rank), client)
        for (depth, rank), client in of_size.items():
            row, movable, sizes = rows[client.id], _sizes(counter.model.movable(), rank), _sizes(parameters, rank)
            held = names_within(sizes, row.held, row.excluded_prefixes)
            trained_names = messages.trained_names(state, movable, row)
            trained = sum(movable[name] for name in trained_names if not is_statistic(name))
            yield ClientCount(
                stage=stage,
                depth=depth,
                rank=rank,
                held=sum(sizes[name] for name in held),
                bricks=sum(sizes[name] for name in held if name.startswith("bricks.")),
                trained=trained,
                percent=100 * trained / backbone,
                sent=sum(movable[name] for name in messages.sent_names(state, movable, row)),
                costs=counter.costs(client, row, stage) if costs else None,
            )


def _sizes(tensors: Mapping[str, Tensor], rank: int | None) -> dict[str, int]:
    """Return the number of values of each tensor of a client with the given rank, keyed by name."""
    return {name: tensor.numel() for name, tensor in cut(dict(tensors), rank).items()}
