"""The nouns of federated fine-tuning. Nothing here computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

AdapterState: TypeAlias = "dict[str, Tensor]"
"""Trainable tensors by their name in the FULL model: a client that holds blocks 0, 3, 7 keeps `blocks.0/3/7`."""

ClientId = str


@dataclass(frozen=True)
class ImageSet:
    """Decoded images, resident once per process: `images` uint8 (n, 3, height, width), `labels` int64 (n,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Domain:
    """One style of images with its own train and test split."""

    name: str
    train: ImageSet
    test: ImageSet


@dataclass(frozen=True)
class FederatedData:
    """All domains of a data set and the digest of their content."""

    name: str
    class_names: tuple[str, ...]
    domains: tuple[Domain, ...]
    digest: str


@dataclass(frozen=True)
class Client:
    """One participant: its training images and `capacity`, the number of blocks that fit on it (L_i)."""

    id: ClientId
    domain: str
    train: ImageSet
    capacity: int


@dataclass(frozen=True)
class LayerAllocation:
    """One row of FedRA's allocation matrix M: the blocks a client runs, and those of them it trains, ascending."""

    held: tuple[int, ...]
    trained: tuple[int, ...]

    @classmethod
    def of(cls, layers: tuple[int, ...] | list[int]) -> LayerAllocation:
        """Hold and train the same blocks."""
        ordered = tuple(sorted(layers))
        return cls(held=ordered, trained=ordered)


@dataclass(frozen=True)
class ClientUpdate:
    """What one client sends back: the tensors it trained, under their names in the full model."""

    client: ClientId
    allocation: LayerAllocation
    adapter: AdapterState
    num_examples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class ServerState:
    """Everything that a run must remember between rounds; a method with memory extends it.

    `layers` are the blocks of the server's own model, which evaluation runs (all of them, but for `all_small`).
    """

    adapter: AdapterState
    layers: tuple[int, ...]


@dataclass(frozen=True)
class RoundResult:
    """State and metrics after `round` communication rounds; round 0 is the untuned model.

    `metrics` are the same on every repetition of a run; `seconds` is not and therefore stands apart.
    """

    round: int
    state: ServerState
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
