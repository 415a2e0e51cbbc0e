"""Equality to the last bit, and what memory is shared."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedsweep.federation.rounds import Federation
from fedsweep.models.activation_cache import FrozenRows
from fedsweep.types import AdapterState, RoundResult


def identical(first: Any, second: Any) -> bool:
    """The same types, names and bits, through dataclasses, dicts and tuples."""
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
    """The same rounds, states and metrics; only `seconds` may differ."""
    one, other = ([(result.round, result.state, dict(result.metrics)) for result in run] for run in (first, second))
    return bool(one) and identical(one, other)


def unkept(federation: Federation) -> Federation:
    """The same federation, but what its frozen parts make of images is computed whenever it is asked for."""
    reader = replace(federation.trainer.reader, kept=FrozenRows())
    return replace(federation, trainer=replace(federation.trainer, reader=reader))


def tensors_in(node: Any) -> Iterator[Tensor]:
    """All tensors within dataclasses, dicts, lists and tuples."""
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
    """Addresses of the memory behind all tensors of a node."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(node)}


def copied(state: AdapterState) -> AdapterState:
    """A deep copy."""
    return {name: tensor.clone() for name, tensor in state.items()}


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every tensor that training must not touch, buffers included."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if not tensor.requires_grad}


def moved(before: AdapterState, after: AdapterState) -> set[str]:
    """Names of the tensors that differ."""
    assert set(before) == set(after)
    return {name for name in before if not torch.equal(before[name], after[name])}
