"""Base classes of sources of synthetic images: labelled images for each domain of the clients."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.data.prepared.dataset import Data
from fedsweep.types import Domain, FederatedData, ImageSet


class Synthetic(Config, ABC):
    """A source of synthetic images."""

    needs_proxy: ClassVar[bool] = False
    """True if the source needs images that the server holds."""
    stands_in: ClassVar[bool] = False
    """True if the source replaces a generator, which every result that used it notes."""

    name: str

    @abstractmethod
    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Return images by domain, or raise UserError if there are too few; `proxy` has the server's images."""

    def check(self, data: Data) -> None:
        """Raise ValueError if the configuration does not fit the data's domains; no image is read."""

    def fingerprint(self, data: FederatedData) -> str:
        """Return the digest of the files that are read, or an empty string; raise UserError if they are missing."""
        return ""


class NoSynthetic(Synthetic):
    """No synthetic images."""

    name: Literal["none"] = "none"

    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Return no images."""
        return {}


class Proportioned(Synthetic, ABC):
    """A source of a number of images in proportion to a domain's training images (FedAG, Section 4.1)."""

    share: float = Field(0.1, gt=0, le=10, description="images of each domain, as a share of its training images")

    def labels(self, domain: Domain, classes: int) -> Tensor:
        """Return the images' classes, int64 (n,): balanced, because the server does not know the clients' labels."""
        return torch.arange(max(1, round(self.share * len(domain.train)))) % classes

    def wanted(self, domain: Domain, class_names: Sequence[str]) -> list[int]:
        """Return the number of images of each class."""
        return self.labels(domain, len(class_names)).bincount(minlength=len(class_names)).tolist()
