"""The nouns of federated fine-tuning. Nothing here computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

AdapterState: TypeAlias = "dict[str, Tensor]"
"""Trainable tensors by their name in the FULL model: a client that holds blocks 0, 3, 7 keeps `blocks.0/3/7`."""

ClientId = str


@dataclass(frozen=True)
class PixelStack:
    """Several tensors of images as one, one after the other, without copying them."""

    parts: tuple[Tensor, ...]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """Return the images of these rows (k,), like `Tensor.index_select`."""
        import torch  # loaded already where there are tensors

        places = self.places(rows)
        grouped = torch.cat([part.index_select(dim, own) for part, _, own in places])
        return grouped.index_select(dim, torch.cat([here for _, here, _ in places]).argsort())

    def places(self, rows: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return (part, positions in `rows` (k,) that fall into it, row numbers in the part) for each part."""
        starts = [0, *accumulate(map(len, self.parts))]
        within = [((start <= rows) & (rows < end)).nonzero().flatten() for start, end in pairwise(starts)]
        return [(part, here, rows[here] - start) for part, here, start in zip(self.parts, within, starts, strict=False)]


@dataclass(frozen=True)
class ImageSet:
    """Decoded images and their labels, in host memory or mapped from a file, shared by all that select from them.

    `images` is uint8 (m, 3, height, width); example i is `images[rows[i]]` with label `labels[i]`, int64 (n,), so that
    a subset copies no pixels. `rows` is None where the examples are all images in their order.
    """

    images: Tensor | PixelStack
    labels: Tensor
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that hold its images."""
        return self.images.parts if isinstance(self.images, PixelStack) else (self.images,)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return a copy of the images (k, 3, height, width) at `index` (k,), and their labels (k,)."""
        rows = index if self.rows is None else self.rows[index]
        # Copies whole images; indexing by `[rows]` would copy them byte by byte, eight times slower.
        return self.images.index_select(0, rows), self.labels[index]

    def places(self, index: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return (tensor of images, positions in `index` (k,) that fall into it, row numbers in it) for each tensor."""
        import torch  # loaded already where there are tensors

        rows = index if self.rows is None else self.rows[index]
        if isinstance(self.images, PixelStack):
            return [(part, here, own) for part, here, own in self.images.places(rows) if len(own)]
        return [(self.images, torch.arange(len(rows)), rows)]

    def select(self, index: Tensor) -> ImageSet:
        """Return the examples at `index`, without copying pixels."""
        return ImageSet(self.images, self.labels[index], index if self.rows is None else self.rows[index])

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all examples in order, `size` at a time; views if the images lie in order."""
        for start in range(0, len(self), size):
            here = slice(start, start + size)
            if self.rows is not None:
                yield self.images.index_select(0, self.rows[here]), self.labels[here]
            else:
                images: Any = self.images  # a stack of tensors always comes with rows
                yield images[here], self.labels[here]


@dataclass(frozen=True)
class Batch:
    """Examples of an image set, with their known outputs of a frozen model.

    `tokens` (k, ...) are the output of the first `done` steps of the walk; without them the walk begins with the
    pixels. `side_inputs` are the other values that a method knows of each image, one row (...) per image.
    """

    source: ImageSet
    index: Tensor
    tokens: Tensor | None = None
    done: int = 0
    side_inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def images(self) -> Tensor:
        """A copy of their pixels, uint8 (k, 3, height, width)."""
        return self.source.take(self.index)[0]


@dataclass(frozen=True)
class Domain:
    """One style of images with its own train and test split."""

    name: str
    train: ImageSet
    test: ImageSet


@dataclass(frozen=True)
class FederatedData:
    """All domains of a data set and the digest of their content; no client has images of those `held_out`."""

    name: str
    class_names: tuple[str, ...]
    domains: tuple[Domain, ...]
    digest: str
    held_out: tuple[Domain, ...] = ()


@dataclass(frozen=True)
class Client:
    """One participant: its images and `capacity`, the number of blocks that fit on it (L_i).

    `validation` is the share that it holds back from its training, to steer it by, and `test` the share that only its
    evaluation uses; None if the partition asks for none. `synthetic` are the images of its domain that the server has
    made and sent it once.
    """

    id: ClientId
    domain: str
    train: ImageSet
    capacity: int
    validation: ImageSet | None = None
    test: ImageSet | None = None
    synthetic: ImageSet | None = None


@dataclass(frozen=True)
class LayerAllocation:
    """One row of FedRA's allocation matrix M: the blocks that a client runs, and those of them it trains, ascending.

    Of the tensors outside the blocks, a client holds and trains all but those whose names begin with one of
    `excluded_prefixes`: heads deeper than it reaches, BRICKs of other domains.
    """

    held: tuple[int, ...]
    trained: tuple[int, ...]
    excluded_prefixes: tuple[str, ...] = ()

    @classmethod
    def of(cls, layers: tuple[int, ...] | list[int]) -> LayerAllocation:
        """Return an allocation that holds and trains the same blocks."""
        ordered = tuple(sorted(layers))
        return cls(held=ordered, trained=ordered)


@dataclass(frozen=True)
class ClientUpdate:
    """A client's message to the server: the tensors it trained, under their names in the full model.

    `private` are tensors that it trained and does not send; no cost of the wire counts them. `extra` are tensors that
    it sends besides, which are no part of a model. `local_copy`, if a method asks for it, is its whole trained model.
    """

    client: ClientId
    allocation: LayerAllocation
    adapter: AdapterState
    num_examples: int
    metrics: Mapping[str, float]
    private: AdapterState = field(default_factory=dict)
    extra: AdapterState = field(default_factory=dict)
    local_copy: AdapterState = field(default_factory=dict)


@dataclass(frozen=True)
class ServerState:
    """Everything that a run must remember between rounds; a method with memory extends it.

    `layers` are the blocks of the server's own model, which evaluation runs (all of them, except in `all_small`).
    `client_memory` and `server_memory` are the base optimizer's. `gamma_star` is FedRA's Gamma* so far: the smallest
    number of clients that held an active block in any round; None before the first.
    """

    adapter: AdapterState
    layers: tuple[int, ...]
    client_memory: dict[ClientId, AdapterState] = field(default_factory=dict, kw_only=True)
    server_memory: AdapterState = field(default_factory=dict, kw_only=True)
    gamma_star: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class RoundResult:
    """State and metrics after `round` rounds (0: the untuned model); only `seconds` are not reproducible."""

    round: int
    state: ServerState
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
