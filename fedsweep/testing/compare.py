"""Functions that compare values bit by bit and find the memory that values share."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedsweep.federation.rounds import Federation
from fedsweep.models.activation_cache import FrozenRows
from fedsweep.models.names import rank_dim
from fedsweep.training.aggregation import pairs
from fedsweep.types import AdapterState, RoundResult


def identical(first: Any, second: Any) -> bool:
    """Return whether two values are bit-identical, including those nested in dataclasses, dicts and tuples."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if is_dataclass(first):
        return all(identical(getattr(first, field.name), getattr(second, field.name)) for field in fields(first))
    if isinstance(first, dict):
        return set(first) == set(second) and all(identical(first[key], second[key]) for key in first)
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(identical, first, second))
    return bool(first == second)


def identical_rounds(first: Iterable[RoundResult], second: Iterable[RoundResult]) -> bool:
    """Return whether two runs have bit-identical rounds, apart from the measured seconds."""
    one, other = ([(result.round, result.state, dict(result.metrics)) for result in run] for run in (first, second))
    return bool(one) and identical(one, other)


def unkept(federation: Federation) -> Federation:
    """Return a copy of a federation that does not cache the activations of frozen blocks."""
    reader = replace(federation.trainer.reader, kept=FrozenRows())
    return replace(federation, trainer=replace(federation.trainer, reader=reader))


def tensors_in(node: Any) -> Iterator[Tensor]:
    """Yield all tensors nested in dataclasses, dicts, lists and tuples."""
    if isinstance(node, Tensor):
        yield node
    elif is_dataclass(node):
        for field in fields(node):
            yield from tensors_in(getattr(node, field.name))
    elif isinstance(node, dict):
        yield from tensors_in(tuple(node.values()))
    elif isinstance(node, tuple | list):
        for part in node:
            yield from tensors_in(part)


def memory(node: Any) -> set[int]:
    """Return the memory addresses of all tensors in a value."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(node)}


def assert_close(first: AdapterState, second: AdapterState) -> None:
    """Assert that two adapters differ only by rounding, as those of clients that trained together and alone."""
    assert set(first) == set(second)
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=1e-5)


def copied(state: AdapterState) -> AdapterState:
    """Return a copy of an adapter that shares no tensor with it."""
    return {name: tensor.clone() for name, tensor in state.items()}


def with_products(adapter: AdapterState) -> AdapterState:
    """Return the tensors of an adapter, with the products B A in double precision in place of LoRA's factors."""
    found = {name: tensor for name, tensor in adapter.items() if rank_dim(name) is None}
    for a, b in pairs(adapter):
        found[a.replace(".lora_A.", ".product.")] = adapter[b].flatten(1).double() @ adapter[a].flatten(1).double()
    return found


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all tensors that training must not change, including buffers."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if not tensor.requires_grad}


def moved(before: AdapterState, after: AdapterState) -> set[str]:
    """Return the names of the tensors that differ between two adapters."""
    assert set(before) == set(after)
    return {name for name in before if not torch.equal(before[name], after[name])}
