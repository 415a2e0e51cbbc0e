"""What an experiment's models and clients weigh, from shapes alone: no weights, no data, nothing trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from fedsweep.costs import held_parameters, sizes_of
from fedsweep.experiment import RunConfig
from fedsweep.methods import Server
from fedsweep.models import LayeredModel, add_lora, train_head_alone
from fedsweep.models.layered import layer_of, names_within
from fedsweep.seeding import stream
from fedsweep.types import Client

ALL, BLOCK, LORA, HEAD, BRICK = (f"parameters/{part}" for part in ("all", "block", "lora_per_block", "head", "brick"))
COUNTS = [ALL, BLOCK, LORA, HEAD, BRICK]
BF16 = 2
"""Bytes of a value on the wire in bfloat16, as FedBRICK counts; `bytes/up` counts the tensors' own precision."""


@dataclass(frozen=True)
class ClientCount:
    """A client of `depth` blocks: values that it holds, those of its BRICKs among them, and bytes that it sends."""

    depth: int
    held: int
    bricks: int
    bytes_up: int


@dataclass(frozen=True)
class Counted:
    """`parameters` are values by metric: of the whole model without BRICKs, a frozen block, and so on."""

    parameters: Mapping[str, int]
    clients: tuple[ClientCount, ...]


def count_parameters(config: RunConfig, classes: int) -> Counted:
    """Count the model of a run with a head of so many classes, and a client of each depth, the deepest first."""
    model = outlined(config, classes)
    sizes = sizes_of(model)
    bricks = {name: size for name, size in sizes.items() if name.startswith("bricks.")}
    lora = sum(size for name, size in sizes.items() if layer_of(name) == 0 and ".lora_" in name)
    parameters = {
        ALL: held_parameters(sizes, range(model.num_layers), ("bricks.",)),
        BLOCK: held_parameters(sizes, [0]) - held_parameters(sizes, []) - lora,
        LORA: lora,
        HEAD: sum(size for name, size in sizes.items() if name.startswith(model.head_prefix)),
    }
    if bricks:
        first = next(iter(bricks)).rpartition(".")[0]
        parameters[BRICK] = sum(size for name, size in bricks.items() if name.startswith(f"{first}."))
    return Counted(parameters, _clients(config, model, sizes))


def outlined(config: RunConfig, classes: int) -> LayeredModel:
    """The model of a run with its adapters and what its method adds, on the meta device."""
    model = config.backbone.outlined(classes)
    if config.method.uses_lora:
        add_lora(model, config.lora, config.seed, config.aggregation.lora == "freeze_a")
    else:
        train_head_alone(model)
    config.method.prepare(model, config.depths(), set(config.client_domains().values()), config.seed)
    return model


def _clients(config: RunConfig, model: LayeredModel, sizes: Mapping[str, int]) -> tuple[ClientCount, ...]:
    """A client of each depth, the deepest first; the method says what it holds and sends."""
    domains, capacities = config.client_domains(), config.capacities()
    if config.federation.depths == "dynamic":
        capacities = {f"{depth} blocks": depth for depth in config.depths()}
        domains = dict.fromkeys(capacities, next(iter(domains.values())))
    clients = [Client(one, domains[one], cast(Any, None), depth) for one, depth in capacities.items()]
    server = Server(model.num_layers, config.aggregation, tuple(sorted(config.depths())))
    state = config.method.init(model, clients, server)
    rows = config.method.allocate(state, clients, server, stream(config.seed, "allocation", 1))
    counted: dict[int, ClientCount] = {}
    for client in clients:
        row = rows[client.id]
        sent = config.method.sent_names(state.adapter, row)
        held = names_within(sizes, row.held, row.without)
        counted[client.capacity] = ClientCount(
            depth=len(row.held),
            held=sum(sizes[name] for name in held),
            bricks=sum(sizes[name] for name in held if name.startswith("bricks.")),
            bytes_up=BF16 * sum(sizes[name] for name in sent),
        )
    return tuple({one.depth: one for _, one in sorted(counted.items(), reverse=True)}.values())
