"""The handwritten digits of scikit-learn, tilted by an angle that depends on the domain."""

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field

from fedsweep.common.rules import known_domains_fit
from fedsweep.data.digits import SIZE, enlarge, read_scans, rotate, to_uint8
from fedsweep.data.prepared.dataset import Data, content_digest
from fedsweep.types import Domain, FederatedData, ImageSet

ANGLES = {"upright": 0.0, "tilted": 30.0, "lying": 90.0}


class TiltedDigits(Data):
    """Digits in three domains: upright, tilted by 30 degrees, and lying on their sides."""

    name: Literal["tilted_digits"] = "tilted_digits"
    domains: tuple[str, ...] = Field(tuple(ANGLES), min_length=1, description="angles; the clients follow this order")

    def _violations(self) -> Iterator[str]:
        return known_domains_fit(self)

    @property
    def size(self) -> int:
        """The height and width of the images, in pixels."""
        return SIZE

    def load(self) -> FederatedData:
        """Return the domains. Each contains the same scans, of which every fifth is a test image."""
        scans, labels = read_scans()
        glyphs, tested = enlarge(scans / 16), torch.arange(len(labels)) % 5 == 0
        domains = []
        for name in self.domains:
            images = to_uint8(rotate(glyphs, torch.full((len(glyphs),), ANGLES[name])))
            places = (part.nonzero().flatten() for part in (~tested, tested))
            domains.append(Domain(name, *(ImageSet(images[own], labels[own], groups=own) for own in places)))
        classes = tuple("0123456789")
        clients = tuple(one for one in domains if one.name in self.training_domains)
        held_out = tuple(one for one in domains if one.name in self.held_out_domains)
        return FederatedData(self.name, classes, clients, content_digest(classes, domains), held_out)
