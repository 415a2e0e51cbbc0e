"""Weights are read once per process: what was built of them is kept, and the trials of a worker take copies."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """The record of a network."""

    def __hash__(self) -> int: ...

    def build(self, *args: Any, **kwargs: Any) -> T_co:
        """The network with its weights; a function of the record, its files' content and the arguments."""


def built(source: Source[T_co], content: str, *arguments: Hashable) -> T_co:
    """What `source.build` gives for these arguments, as a copy that is the caller's own: training changes it in place.

    `content` pins the files that the record names, and the weights in them are read again when it changes.

    Raises:
        UserError: what `build` raises.
    """
    found: T_co = copy.deepcopy(_last(source, content, *arguments))
    return found


@lru_cache(maxsize=2)  # a backbone, and beside it the trunk of a gate or the server's CLIP
def _last(source: Source[Any], _content: str, *arguments: Hashable) -> Any:
    return source.build(*arguments)
