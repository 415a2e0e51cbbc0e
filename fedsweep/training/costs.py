"""Costs of a round: parameters held and trained, bytes sent. They are counted from shapes, not measured."""

from collections.abc import Collection, Iterable, Mapping

from fedsweep.models.layered import LayeredModel
from fedsweep.models.names import is_statistic, names_within
from fedsweep.types import AdapterState, ClientId, ClientUpdate, LayerAllocation

COST_METRICS = ["bytes/down", "bytes/up", "parameters/held", "parameters/trained"]


def count(state: AdapterState) -> int:
    """Return the number of parameters, without running statistics."""
    return sum(tensor.numel() for name, tensor in state.items() if not is_statistic(name))


def transmission_seconds(size: int, megabytes_per_second: float) -> float:
    """Return the seconds that `size` bytes take, at 10^6 bytes to the megabyte (FedMS, Fig. 7).

    >>> transmission_seconds(4 * 149_620_737, 0.1)
    5984.82948
    """
    return size / (megabytes_per_second * 1e6)


def size_in_bytes(state: AdapterState) -> int:
    """Return the bytes of the tensors at their own precision."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def sizes_of(model: LayeredModel) -> dict[str, int]:
    """Return the number of values of each parameter by name, including frozen ones."""
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def held_parameters(sizes: Mapping[str, int], layers: Iterable[int], excluded_prefixes: tuple[str, ...] = ()) -> int:
    """Count the parameters of the sub-model with these blocks: frozen ones, adapters and heads. See `sizes_of`."""
    return sum(sizes[name] for name in names_within(sizes, layers, excluded_prefixes))


def round_costs(
    model: LayeredModel,
    sent: AdapterState,
    allocations: Mapping[ClientId, LayerAllocation],
    received: Mapping[ClientId, Iterable[str]],
    updates: Collection[ClientUpdate],
) -> dict[str, float]:
    """Return the bytes of the whole cohort in this round, and parameters per client (means).

    Down: the tensors of `sent` that each client `received`, in most methods the adapters of its blocks, its heads and
    its BRICKs. Up: all that it trained and does not keep, and its extra tensors. Frozen blocks are not counted, because
    a client has the public backbone on its disk, nor are synthetic images, which are sent once.
    """
    sizes = sizes_of(model)
    held = [held_parameters(sizes, row.held, row.excluded_prefixes) for row in allocations.values()]
    return {
        "bytes/down": float(sum(size_in_bytes({name: sent[name] for name in names}) for names in received.values())),
        "bytes/up": float(sum(size_in_bytes(one.adapter) + size_in_bytes(one.extra) for one in updates)),
        "parameters/held": sum(held) / len(held),
        "parameters/trained": sum(count(one.adapter) + count(one.private) for one in updates) / len(held),
    }
