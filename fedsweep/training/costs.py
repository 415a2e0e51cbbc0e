"""Costs of a round: parameters held and trained, and bytes sent. They are computed from shapes, not measured."""

from collections.abc import Collection, Iterable, Mapping

from fedsweep.models.layered import LayeredModel
from fedsweep.models.names import is_statistic, names_within
from fedsweep.types import AdapterState, ClientId, ClientUpdate, LayerAllocation

COST_METRICS = ["bytes/down", "bytes/up", "parameters/held", "parameters/trained"]


def count(state: AdapterState) -> int:
    """Return the number of parameters in `state`, without running statistics."""
    return sum(tensor.numel() for name, tensor in state.items() if not is_statistic(name))


def transmission_seconds(size: int, megabytes_per_second: float) -> float:
    """Return the transmission time of `size` bytes in seconds; a megabyte is 10^6 bytes (FedMS, Fig. 7).

    >>> transmission_seconds(4 * 149_620_737, 0.1)
    5984.82948
    """
    return size / (megabytes_per_second * 1e6)


def size_in_bytes(state: AdapterState) -> int:
    """Return the size of the tensors in bytes, at the precision of each tensor."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def sizes_of(model: LayeredModel) -> dict[str, int]:
    """Return the number of values of each parameter, including frozen parameters, by name."""
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def held_parameters(sizes: Mapping[str, int], layers: Iterable[int], excluded_prefixes: tuple[str, ...] = ()) -> int:
    """Return the number of parameters of a sub-model with the blocks `layers`: frozen weights, adapters and heads.

    `sizes` is the result of `sizes_of`.
    """
    return sum(sizes[name] for name in names_within(sizes, layers, excluded_prefixes))


def round_costs(
    model: LayeredModel,
    sent: AdapterState,
    allocations: Mapping[ClientId, LayerAllocation],
    received: Mapping[ClientId, Iterable[str]],
    updates: Collection[ClientUpdate],
) -> dict[str, float]:
    """Return the bytes sent and received by the whole cohort in this round, and the mean parameters per client.

    `bytes/down` counts the tensors that clients receive: in most methods the adapters of their blocks, their heads and
    their BRICKs. `bytes/up` counts the tensors that they send. Frozen blocks are not counted, because every client has
    the public backbone already, and neither are synthetic images, which are sent only once.

    Args:
        model: The full model.
        sent: The adapter that the server sends.
        allocations: The blocks of each client of the cohort.
        received: The names of the tensors of `sent` that each client receives.
        updates: The updates of the cohort.
    """
    sizes = sizes_of(model)
    held = [held_parameters(sizes, row.held, row.excluded_prefixes) for row in allocations.values()]
    return {
        "bytes/down": float(sum(size_in_bytes({name: sent[name] for name in names}) for names in received.values())),
        "bytes/up": float(sum(size_in_bytes(one.adapter) + size_in_bytes(one.extra) for one in updates)),
        "parameters/held": sum(held) / len(held),
        "parameters/trained": sum(count(one.adapter) + count(one.private) for one in updates) / len(held),
    }
