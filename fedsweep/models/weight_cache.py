"""Weights are read once by a process that plays trial after trial: it keeps what it built of them, and takes copies."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any, Literal, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
Role = Literal["backbone", "beside"]
"""What a network is to a run: its backbone, or what a method puts beside that, a gate's trunk or the server's CLIP."""


class Source(Protocol[T_co]):
    """The record of a network."""

    def __hash__(self) -> int: ...

    def build(self, *args: Any, **kwargs: Any) -> T_co:
        """The network with its weights; a function of the record, its files' content and the arguments."""


_kept: dict[Role, tuple[Hashable, Any]] | None = None


def keep() -> None:
    """From now on, this process keeps the last network of each role, in host memory."""
    global _kept
    _kept = _kept or {}


def built(role: Role, source: Source[T_co], content: str, *arguments: Hashable) -> T_co:
    """What `source.build` gives for these arguments. It is the caller's own: training changes it in place.

    `content` pins the files that the record names, and the weights in them are read again when it changes. What has
    no weights (`none`) is not kept.

    Raises:
        UserError: what `build` raises.
    """
    if _kept is None or content.partition(":")[0] == "none":
        return source.build(*arguments)
    key = (source, content, arguments)
    if role not in _kept or _kept[role][0] != key:
        _kept.pop(role, None)  # before there are two
        _kept[role] = key, source.build(*arguments)
    network: T_co = copy.deepcopy(_kept[role][1])
    return network
