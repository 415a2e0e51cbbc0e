"""Functions and classes that count the parameters and transmitted bytes of a run, using only tensor shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from fedsweep.common.randomness import stream
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods import Server
from fedsweep.methods.capabilities import Messages, Stages
from fedsweep.models import LayeredModel, add_lora, train_head_alone
from fedsweep.models.names import is_statistic, layer_of, names_within
from fedsweep.training.costs import held_parameters, sizes_of, transmission_seconds
from fedsweep.types import Client, LayerAllocation

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
    held: int
    """Number of values that the client holds, including its BRICKs (FedBRICK's modules in place of absent blocks)."""
    bricks: int
    trained: int
    percent: float
    """The trained parameters as a percentage of the backbone's parameters."""
    sent: int
    """Number of values that the client sends in one round, including running statistics of batch norms."""

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


def count_parameters(config: RunConfig, classes: int) -> Counted:
    """Count the parameters of a run's model and of one client per depth (number of blocks).

    Args:
        config: The run.
        classes: Number of classes of the model's head.
    """
    model = _outlined(config, classes)
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
    clients = tuple(_clients(config, model, sizes, backbone))
    shares: dict[str, float] = {}
    for one in reversed(clients):  # so that the deepest client of each stage comes last
        suffix = STAGES[one.stage == "stage 2"]
        shares[f"percent/trained{suffix}"] = one.percent
        shares |= {f"seconds/{speed:g}MBps{suffix}": one.seconds(speed) for speed in BANDWIDTHS}
    return Counted(parameters, shares, clients)


def _outlined(config: RunConfig, classes: int) -> LayeredModel:
    """Return a run's model with its adapters and the method's modules, but without weights.

    The tensors are on torch's meta device, so they have shapes but no values.
    """
    model = config.backbone.outlined(classes)
    if config.method.needs.lora:
        add_lora(model, config.lora, config.streams, config.aggregation.lora == "freeze_a")
    else:
        train_head_alone(model)
    config.method.prepare(model, config.depths(), set(config.client_domains().values()), config.streams)
    return model


def _clients(config: RunConfig, model: LayeredModel, sizes: Mapping[str, int], backbone: int) -> Iterator[ClientCount]:
    """Yield the counts of one client per depth, deepest first, for each stage of the method.

    The depth of a client is the number of blocks that it holds.
    """
    domains, capacities = config.client_domains(), config.capacities()
    if config.federation.depths == "dynamic":
        capacities = {f"{depth} blocks": depth for depth in config.depths()}
        domains = dict.fromkeys(capacities, next(iter(domains.values())))
    clients = [Client(one, domains[one], cast(Any, None), depth) for one, depth in capacities.items()]
    server = Server(model.num_layers, config.aggregation, tuple(sorted(config.depths())))
    movable = {name: tensor.numel() for name, tensor in model.movable().items()}
    messages = Messages.of_method(config.method)
    first = config.method.init(model, clients, server)
    for stage, state in Stages.of_method(config.method).stage_states(first, config.federation.rounds).items():
        rows = config.method.allocate(state, clients, server, stream(config.streams, "allocation", 1))
        of_depth: dict[int, LayerAllocation] = {}
        for client in sorted(clients, key=lambda one: -one.capacity):
            of_depth.setdefault(len(rows[client.id].held), rows[client.id])
        for depth, row in of_depth.items():
            held = names_within(sizes, row.held, row.excluded_prefixes)
            trained_names = messages.trained_names(state, movable, row)
            trained = sum(movable[name] for name in trained_names if not is_statistic(name))
            yield ClientCount(
                stage=stage,
                depth=depth,
                held=sum(sizes[name] for name in held),
                bricks=sum(sizes[name] for name in held if name.startswith("bricks.")),
                trained=trained,
                percent=100 * trained / backbone,
                sent=sum(movable[name] for name in messages.sent_names(state, movable, row)),
            )
