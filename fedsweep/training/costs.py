"""The costs of a round: parameters held and trained, and bytes sent. All costs are computed from tensor shapes."""

from collections.abc import Collection, Iterable, Mapping

from fedsweep.models.layered import LayeredModel
from fedsweep.models.names import is_statistic, names_within, rank_dim
from fedsweep.types import AdapterState, ClientId, ClientUpdate, LayerAllocation

COST_METRICS = ["bytes/down", "bytes/up", "parameters/held", "parameters/trained"]


def count(state: AdapterState) -> int:
    """Return the number of parameters in `state`, excluding the running statistics of batch norms."""
    return sum(tensor.numel() for name, tensor in state.items() if not is_statistic(name))


def transmission_seconds(size: int, megabytes_per_second: float) -> float:
    """Return the transmission time of `size` bytes in seconds; a megabyte is 10^6 bytes (FedMS, Fig. 7).

    >>> transmission_seconds(4 * 149_620_737, 0.1)
    5984.82948
    """
    return size / (megabytes_per_second * 1e6)


def size_in_bytes(state: AdapterState) -> int:
    """Return the total size of the tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def sizes_of(model: LayeredModel) -> dict[str, int]:
    """Return the number of values of each parameter, frozen or not, keyed by the parameter's name."""
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def held_parameters(
    sizes: Mapping[str, int], layers: Iterable[int], excluded_prefixes: tuple[str, ...] = (), share: float = 1.0
) -> int:
    """Return the number of parameters, frozen and trained, of a sub-model with the blocks `layers`.

    Args:
        sizes: The number of values of each parameter of the full model, keyed by name.
        layers: The numbers of the blocks.
        excluded_prefixes: Prefixes of names. A tensor outside the blocks is not counted if its name has such a prefix.
        share: The rank of the client's LoRA adapters, divided by the full rank.
    """
    names = names_within(sizes, layers, excluded_prefixes)
    if share == 1:
        return sum(sizes[name] for name in names)
    return sum(sizes[name] if rank_dim(name) is None else round(share * sizes[name]) for name in names)


def round_costs(
    model: LayeredModel,
    allocations: Mapping[ClientId, LayerAllocation],
    received: Iterable[AdapterState],
    updates: Collection[ClientUpdate],
) -> dict[str, float]:
    """Return the bytes that the cohort receives and sends in a round, and the size of the clients' models.

    `parameters/held` and `parameters/trained` are the numbers of parameters that a client holds and trains, averaged
    over the cohort.

    `bytes/down` counts the tensors that clients receive, such as adapters, heads and BRICKs (FedBRICK's small
    replacements for missing blocks). `bytes/up` counts the tensors that clients send. Frozen blocks are not counted,
    because every client already has the public backbone. Synthetic images are not counted either, because they are sent
    only once in a run.

    Args:
        model: The full model.
        allocations: The blocks that each client of the cohort holds and trains.
        received: For each client that receives tensors, these tensors.
        updates: The updates of the cohort.
    """
    sizes, full = sizes_of(model), next((len(one) for name, one in model.named_parameters() if ".lora_A." in name), 1)
    held = [
        held_parameters(sizes, row.held, row.excluded_prefixes, 1.0 if row.rank is None else row.rank / full)
        for row in allocations.values()
    ]
    return {
        "bytes/down": float(sum(map(size_in_bytes, received))),
        "bytes/up": float(sum(size_in_bytes(one.adapter) + size_in_bytes(one.extra) for one in updates)),
        "parameters/held": sum(held) / len(held),
        "parameters/trained": sum(count(one.adapter) + count(one.private) for one in updates) / len(held),
    }
