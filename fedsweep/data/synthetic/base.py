"""What a source of synthetic images is: for each domain of the clients, labelled images to train on."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.data.prepared.dataset import Data
from fedsweep.types import Domain, FederatedData, ImageSet


class Synthetic(Config, ABC):
    """The base of their records."""

    needs_proxy: ClassVar[bool] = False
    """Whether it draws on images that the server holds."""
    stands_in: ClassVar[bool] = False
    """Whether it takes a generator's place, which every result that used it says."""

    name: str

    @abstractmethod
    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Images by domain; `proxy` are those that the server holds.

        Raises:
            UserError: they are not there, or do not fit the data.
        """

    def check(self, data: Data) -> None:
        """Whether it fits the data's domains, before an image is read.

        Raises:
            ValueError: it does not.
        """

    def fingerprint(self, data: FederatedData) -> str:
        """What pins the content of files that it reads; empty for none.

        Raises:
            UserError: they are not there.
        """
        return ""


class NoSynthetic(Synthetic):
    """The server has none."""

    name: Literal["none"] = "none"

    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Nothing."""
        return {}


class Proportioned(Synthetic, ABC):
    """A source of as many images as asked for (FedAG, Section 4.1)."""

    share: float = Field(0.1, gt=0, le=10, description="images of each domain, as a share of its training images")

    def labels(self, domain: Domain, classes: int) -> Tensor:
        """Their classes, int64 (n,): all equally often, because the server does not know the clients' labels."""
        return torch.arange(max(1, round(self.share * len(domain.train)))) % classes
