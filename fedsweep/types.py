"""The data types of federated fine-tuning, such as clients, updates and the server's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

AdapterState: TypeAlias = "dict[str, Tensor]"
"""Trainable tensors by their name in the full model: a client with blocks 0 and 3 has `blocks.0.*` and `blocks.3.*`."""

ClientId = str


@dataclass(frozen=True)
class PixelStack:
    """Several tensors of images that are used like one concatenated tensor, without copying the images."""

    parts: tuple[Tensor, ...]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """Return the images at `rows` (k,) in a new tensor, like `Tensor.index_select` along dimension 0."""
        import torch  # already imported if there are tensors

        places = self.places(rows)
        grouped = torch.cat([part.index_select(dim, own) for part, _, own in places])
        return grouped.index_select(dim, torch.cat([here for _, here, _ in places]).argsort())

    def places(self, rows: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Find the parts of the stack that contain the images at `rows` (k,).

        Returns:
            A tuple for each part: the part, the positions in `rows` that refer to images in this part, and the row
            numbers of these images in the part.
        """
        starts = [0, *accumulate(map(len, self.parts))]
        within = [((start <= rows) & (rows < end)).nonzero().flatten() for start, end in pairwise(starts)]
        return [(part, here, rows[here] - start) for part, here, start in zip(self.parts, within, starts, strict=False)]


@dataclass(frozen=True)
class ImageSet:
    """Decoded images and their labels, in host memory or in a memory-mapped file.

    For m images and n examples, `images` is uint8 (m, 3, height, width), and `labels` is int64 (n,). Example i is
    `images[rows[i]]` with the label `labels[i]`, so subsets can share the pixels. If `rows` is None, example i is
    `images[i]`.

    `groups` (n,), int64, is the group of each example, such as the scan or the video that it shows. A number means the
    same group in all sets of a data set. If `groups` is None, every example is a group of its own.
    """

    images: Tensor | PixelStack
    labels: Tensor
    rows: Tensor | None = None
    groups: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that contain the images of this set."""
        return self.images.parts if isinstance(self.images, PixelStack) else (self.images,)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the images (k, 3, height, width) and the labels (k,) of the examples at `index` (k,)."""
        rows = index if self.rows is None else self.rows[index]
        # index_select copies whole images; indexing with `[rows]` copies byte by byte and is eight times slower.
        return self.images.index_select(0, rows), self.labels[index]

    def places(self, index: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Find the tensors of this set that contain the images of the examples at `index` (k,).

        Returns:
            A tuple for each tensor: the tensor, the positions in `index` that refer to images in this tensor, and the
            row numbers of these images in the tensor.
        """
        import torch  # already imported if there are tensors

        rows = index if self.rows is None else self.rows[index]
        if isinstance(self.images, PixelStack):
            return [(part, here, own) for part, here, own in self.images.places(rows) if len(own)]
        return [(self.images, torch.arange(len(rows)), rows)]

    def select(self, index: Tensor) -> ImageSet:
        """Return the examples at `index` (k,) as a new set that shares the pixels with this one."""
        groups = None if self.groups is None else self.groups[index]
        return ImageSet(self.images, self.labels[index], index if self.rows is None else self.rows[index], groups)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of images (size, 3, height, width) and labels (size,) in order.

        The last batch may be smaller. If `rows` is None, batches are views and copy no pixels.
        """
        for start in range(0, len(self), size):
            here = slice(start, start + size)
            if self.rows is not None:
                yield self.images.index_select(0, self.rows[here]), self.labels[here]
            else:
                images: Any = self.images  # a PixelStack always has rows
                yield images[here], self.labels[here]


class RoundListener:
    """The base class of objects that follow the progress within a round. By default, they ignore it."""

    def training(self, done: float, clients: int) -> None:
        """Learn how far local training is.

        Args:
            done: The number of clients that have finished, plus the finished share of the client that is training.
            clients: The number of clients that train one after the other.
        """

    def testing(self, images: int) -> None:
        """Learn that an evaluation on `images` images begins."""

    def tested(self, images: int) -> None:
        """Learn that the model has predicted the classes of `images` more images."""


@dataclass(frozen=True)
class Batch:
    """A batch of k examples of an image set, optionally with cached outputs of the frozen lowest blocks.

    `tokens` (k, ...) are the outputs of the first `done` blocks, from which the forward pass continues. If `tokens` is
    None, the forward pass begins with the pixels. `side_inputs` (k, ...) are further inputs that a method needs.
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
        """A copy of the pixels of these examples, uint8 (k, 3, height, width)."""
        return self.source.take(self.index)[0]


@dataclass(frozen=True)
class Domain:
    """One style of images in a data set, with its training and test images.

    `validation` are images for choosing between runs, which no client has; None if none are held out.
    """

    name: str
    train: ImageSet
    test: ImageSet
    validation: ImageSet | None = None


@dataclass(frozen=True)
class FederatedData:
    """The domains of a data set, and a digest of their contents.

    `held_out` are further domains, of which no client has images. `groups_known` is false if the groups of the images
    were never determined, so that images of one group may not be marked as such.
    """

    name: str
    class_names: tuple[str, ...]
    domains: tuple[Domain, ...]
    digest: str
    held_out: tuple[Domain, ...] = ()
    groups_known: bool = True


@dataclass(frozen=True)
class Client:
    """A client with its images and its `capacity`, the number of blocks that the client can hold (L_i in FedRA).

    `rank` is the rank of the client's LoRA adapters (r_i); None for the full rank, `lora.rank`.

    Some methods use `validation` images to control training. `test` images and `tuning` images are used only for
    evaluation: trials are compared by metrics on `tuning` images. Each of the three is None if the partition reserves
    no such images. `synthetic` images are images of the client's domain that the
    server generated and sent to the client.
    """

    id: ClientId
    domain: str
    train: ImageSet
    capacity: int
    validation: ImageSet | None = None
    test: ImageSet | None = None
    tuning: ImageSet | None = None
    synthetic: ImageSet | None = None
    rank: int | None = None


@dataclass(frozen=True)
class LayerAllocation:
    """The blocks that a client holds and the blocks that it trains, in ascending order (a row of FedRA's matrix M).

    The client also holds and trains the tensors outside of blocks, except for tensors whose names begin with one of
    `excluded_prefixes`. In DepthFL, for example, the heads after blocks that the client does not hold are excluded. In
    FedBRICK, the BRICKs (modules that replace blocks) of other domains are excluded.

    A client with a `rank` holds and trains only the first `rank` rows of each LoRA factor A and the first `rank`
    columns of each factor B. None stands for the full rank.
    """

    held: tuple[int, ...]
    trained: tuple[int, ...]
    excluded_prefixes: tuple[str, ...] = ()
    rank: int | None = None

    @classmethod
    def of(cls, layers: tuple[int, ...] | list[int]) -> LayerAllocation:
        """Return an allocation in which the client holds and trains the blocks `layers`."""
        ordered = tuple(sorted(layers))
        return cls(held=ordered, trained=ordered)


@dataclass(frozen=True)
class ClientUpdate:
    """A client's update for the server: the tensors that the client trained, keyed by their names in the full model.

    If the client has a smaller rank r, its factors A are (r, ...) and its factors B are (out, r, ...). The factors B
    are expressed in the server's scaling, so that s B A is the client's change of a layer for every scaling.

    `private` are trained tensors that the client does not send, so communication costs do not count them. `extra` are
    tensors that the client sends although they are not part of a model. `local_copy` is the client's whole trained
    model if the method needs it, and empty otherwise.
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
    """The state of a run between rounds. Methods with more state extend this class.

    `layers` are the blocks with which the server's model is evaluated. Most methods use all blocks; `all_small` uses
    fewer. `client_memory` and `server_memory` contain the values that a federated optimizer keeps between rounds,
    for example the gradients that FedDyn keeps.

    `gamma_star` is FedRA's Gamma*, the smallest number of clients that held the same active block in any round so far.
    A block is active in a round if at least one client holds it. `gamma_star` is None before the first round.
    """

    adapter: AdapterState
    layers: tuple[int, ...]
    client_memory: dict[ClientId, AdapterState] = field(default_factory=dict, kw_only=True)
    server_memory: AdapterState = field(default_factory=dict, kw_only=True)
    gamma_star: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class RoundResult:
    """The state and metrics after `round` rounds (0: the untuned model). Only `seconds` is not reproducible."""

    round: int
    state: ServerState
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    right: Mapping[str, Tensor] = field(default_factory=dict)
    """For each domain, bool (n,): whether the global model predicts the class of each evaluated test image."""
