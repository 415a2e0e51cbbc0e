"""A cache of networks with their weights, for a process that runs trial after trial."""

import copy
from collections.abc import Hashable
from typing import Any, Literal, Protocol, TypeVar, cast

T_co = TypeVar("T_co", covariant=True)
Role = Literal["backbone", "beside"]
"""What a network is to a run: its backbone, or what a method puts beside that, a gate's trunk or the server's CLIP."""


class Source(Protocol[T_co]):
    """The hashable record of a network, which is a function of the record, its files' content and the arguments."""

    def build(self, *args: Any, **kwargs: Any) -> T_co:
        """Return the network with its weights."""


_kept: dict[Role, tuple[Hashable, Any]] | None = None


def keep() -> None:
    """Keep, from now on, the last network of each role in host memory."""
    global _kept
    _kept = _kept or {}


def built(role: Role, source: Source[T_co], content: str, *arguments: Hashable) -> T_co:
    """Return `source.build(*arguments)`, or a copy of the cached network, which the caller may change in place.

    `content` pins the files that the record names: when it changes, their weights are read again. A network without
    weights (`none`) is not cached.
    """
    if _kept is None or content.partition(":")[0] == "none":
        return source.build(*arguments)
    key = (source, content, arguments)
    if role not in _kept or _kept[role][0] != key:
        _kept.pop(role, None)  # before there are two
        _kept[role] = key, source.build(*arguments)
    return cast(T_co, copy.deepcopy(_kept[role][1]))
