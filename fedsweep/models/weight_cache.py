"""A cache of networks with their weights, for processes that run many trials in succession."""

import copy
from collections.abc import Hashable
from typing import Any, Literal, Protocol, TypeVar, cast

T_co = TypeVar("T_co", covariant=True)
Role = Literal["backbone", "beside"]
"""The role of a network: the run's backbone, or an additional network that the method uses, such as FedMS's gate."""


class Source(Protocol[T_co]):
    """A hashable configuration of a network.

    The configuration, the content of its weights files and the arguments of `build` fully determine the network.
    """

    def build(self, *args: Any, **kwargs: Any) -> T_co:
        """Return the network with its weights."""


_kept: dict[Role, tuple[Hashable, Any]] | None = None


def keep() -> None:
    """Switch the cache on.

    The cache keeps at most two networks in host memory: the most recently built backbone, and the most recently built
    additional network of a method, such as the network of FedMS's gate.
    """
    global _kept
    _kept = _kept or {}


def built(role: Role, source: Source[T_co], content: str, *arguments: Hashable) -> T_co:
    """Return the network that `source` describes: a copy from the cache if possible, otherwise a new network.

    The caller may change the returned network in place.

    Args:
        role: The role of the network in the run: `backbone`, or `beside` for an additional network that the method
            uses, such as the network of FedMS's gate.
        source: The configuration of the network.
        content: The fingerprint of the weights. The network is built again if the fingerprint changes. A network with
            the fingerprint `none`, which has random weights, is not cached.
        arguments: The arguments of `source.build`.
    """
    if _kept is None or content.partition(":")[0] == "none":
        return source.build(*arguments)
    key = (source, content, arguments)
    if role not in _kept or _kept[role][0] != key:
        _kept.pop(role, None)  # so that two networks are never in memory at once
        _kept[role] = key, source.build(*arguments)
    return cast(T_co, copy.deepcopy(_kept[role][1]))
