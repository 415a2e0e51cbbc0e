"""What a source is: a reader of one layout on disk."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Item:
    """One image of a data set: `path` names it within the root, `split` is None where the layout has none."""

    path: str
    label: int
    domain: str
    split: Split | None


@dataclass(frozen=True)
class Listing:
    """All images of a data set. Labels count from 0 in the order of `class_names`; no domain or class is empty."""

    class_names: tuple[str, ...]
    domains: tuple[str, ...]
    items: tuple[Item, ...]
    absent: tuple[str, ...] = ()
    """Domains that the data set has, but the root has not."""
    nameless: bool = False
    """Whether the layout has no domains, so that the one there is only called after the root."""


class Source(ABC):
    """A layout: it lists the images under a root and reads their encoded bytes."""

    name: ClassVar[str]
    """What `fedsweep data prepare --layout` calls it."""
    looks_like: ClassVar[str]
    """The layout in one line, e.g. `<domain>/<class>/*.jpg, splits/<domain>_{train,test}.txt`."""
    num_classes: ClassVar[int | None] = None
    """First classes that `list` takes by default, or all if there are fewer; None for all."""

    @abstractmethod
    def list(self, root: Path, num_classes: int | None = None) -> Listing:
        """All images of the first `num_classes` classes, in an order that depends on names only.

        Raises:
            UserError: the root has another layout (what was looked for, what was found), or an empty class or domain.
        """

    def file_of(self, path: str) -> str:
        """The file within the root that an item's path names: itself, unless a file holds many images."""
        return path

    def read(self, root: Path, items: Sequence[Item]) -> Iterator[bytes]:
        """The encoded bytes of each item, in order."""
        for item in items:
            yield (root / item.path).read_bytes()
