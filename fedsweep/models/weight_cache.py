"""A cache of networks with their weights, for processes that run many trials in succession."""

import copy
import io
import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import torch
from torch import nn

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Role = Literal["backbone", "beside"]
"""The role of a network: the run's backbone, or an additional network that the method uses, such as FedMS's gate."""

MOST_CHANGED = 4
"""Largest number of changed forms of a network in the cache, such as forms with adapters of different ranks."""


class Source(Protocol[T_co]):
    """A hashable configuration of a network.

    The configuration, the content of its weights files and the arguments of `build` fully determine the network.
    """

    def build(self, *args: Any, **kwargs: Any) -> T_co:
        """Return the network with its weights."""


class Change(Hashable, Protocol):
    """A hashable change to a network, such as the insertion of adapters.

    A change must not modify the values of existing tensors, because the cache shares them.
    """

    def __call__(self, network: Any, /) -> object:
        """Change the network in place."""


class _Pickler(pickle.Pickler):
    """A pickler that stores references to tensors instead of their content."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, torch.Tensor] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self.tensors.setdefault(id(obj), obj)
        return id(obj)


class _Unpickler(pickle.Unpickler):
    """An unpickler that calls `of` once for each tensor, so that tensors that occur twice stay shared."""

    def __init__(
        self, pickled: bytes, tensors: dict[int, torch.Tensor], of: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = {key: of(one) for key, one in tensors.items()}

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


class Mould(Generic[T]):
    """A model for any number of copies of a network.

    A copy takes about a tenth of the time of `copy.deepcopy`, because small objects are pickled only once. The mould
    keeps the network's own tensors, so the network must not be changed afterwards.
    """

    def __init__(self, network: T) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(network)
        self._pickled, self._tensors = file.getvalue(), pickler.tensors

    def cast(self) -> T:
        """Return a copy that shares no memory with the network or with other copies."""
        memo: dict[int, Any] = {}  # tensors that share memory with each other also share it in the copy
        return self._cast(lambda tensor: copy.deepcopy(tensor, memo))

    def changed(self, change: Change) -> "Mould[T]":
        """Return a mould of the changed network, which shares the memory of the tensors with this mould."""
        network = self._cast(_shared)
        change(network)
        return Mould(network)

    def _cast(self, of: Callable[[torch.Tensor], torch.Tensor]) -> T:
        return cast(T, _Unpickler(self._pickled, self._tensors, of).load())


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor with the same memory, which can require gradients independently."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach()


@dataclass
class _Kept:
    key: Hashable
    plain: Mould[Any]
    changed: dict[Hashable, Mould[Any]] = field(default_factory=dict)

    def mould(self, change: Change | None) -> Mould[Any]:
        if change is None:
            return self.plain
        found = self.changed.pop(change, None) or self.plain.changed(change)
        self.changed[change] = found  # as the most recent one
        if len(self.changed) > MOST_CHANGED:
            self.changed.pop(next(iter(self.changed)))
        return found


_kept: dict[Role, _Kept] | None = None


def keep() -> None:
    """Switch the cache on.

    The cache keeps at most two networks in host memory: the most recently built backbone, and the most recently built
    additional network of a method, such as the network of FedMS's gate. It also keeps the adapters of the last
    `MOST_CHANGED` configurations of LoRA for this backbone.
    """
    global _kept
    _kept = _kept or {}


def built(role: Role, source: Source[T_co], content: str, *arguments: Hashable, change: Change | None = None) -> T_co:
    """Return the network that `source` describes: a copy from the cache if possible, otherwise a new network.

    The caller may change the returned network in place.

    Args:
        role: The role of the network in the run: `backbone`, or `beside` for an additional network that the method
            uses, such as the network of FedMS's gate.
        source: The configuration of the network.
        content: The fingerprint of the weights. The network is built again if the fingerprint changes. A network with
            the fingerprint `none`, which has random weights, is not cached.
        arguments: The arguments of `source.build`.
        change: A change to apply to the network, or None. The changed network is cached, too.
    """
    if _kept is None or content.partition(":")[0] == "none":
        network = source.build(*arguments)
        if change is not None:
            change(network)
        return network
    key = (source, content, arguments)
    if role not in _kept or _kept[role].key != key:
        _kept.pop(role, None)  # so that two networks are never in memory at once
        _kept[role] = _Kept(key, Mould(source.build(*arguments)))
    return cast(T_co, _kept[role].mould(change).cast())
