"""Surrogates for a generator's images, drawn from the statistics of held-out images."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import derived_seed
from fedsweep.data.synthetic.generated import Proportioned
from fedsweep.types import FederatedData, ImageSet


class Surrogate(Proportioned):
    """A Gaussian over pixels for each class and domain, with mean and covariance of the server's images.

    It replaces a text-to-image model, so results that used it are marked.
    """

    needs_proxy: ClassVar = True
    stands_in: ClassVar = True

    name: Literal["surrogate"] = "surrogate"

    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Draw images by domain and class, each from its own random stream."""
        classes = len(data.class_names)
        own = {name: ByClass(images) for name, images in sorted(proxy.items())}
        means = _means(own, data.class_names)
        made = {}
        for domain in data.domains:
            labels, centres = self.labels(domain, classes), means[domain.name]
            images = torch.empty((len(labels), *centres.shape[1:]), dtype=torch.uint8)
            for label in sorted(set(labels.tolist())):
                deviations = own[domain.name].deviations([label]) or own[domain.name].all_deviations
                rows = (labels == label).nonzero().flatten()
                seeds = [derived_seed(seed, "surrogate", domain.name, label, number) for number in range(len(rows))]
                images[rows] = _draw(centres[label], deviations, seeds)
            made[domain.name] = ImageSet(images, labels)
        return made


@dataclass(frozen=True)
class ByClass:
    """A domain's images, converted one class at a time: in single precision, all would not fit into memory."""

    images: ImageSet

    def of(self, label: int) -> Tensor:
        """Return the images of a class, in single precision."""
        return self.images.take((self.images.labels == label).nonzero().flatten())[0].float()

    def deviations(self, labels: Iterable[int]) -> list[Tensor]:
        """Return, for each class with two or more images, the deviations of its images from their mean."""
        parts = map(self.of, labels)
        return [part - part.mean(0) for part in parts if len(part) > 1]

    @cached_property
    def all_deviations(self) -> list[Tensor]:
        """The deviations of all classes, for a class that has one image or none."""
        return self.deviations(sorted(set(self.images.labels.tolist())))


def _means(own: Mapping[str, ByClass], class_names: Sequence[str]) -> dict[str, Tensor]:
    """Return the mean image of each class, by domain: (classes, 3, h, w).

    For a class that a domain lacks, it is the domain's mean plus the class's mean offset in the other domains.
    """
    found, styles, moves = {}, {}, [list[Tensor]() for _ in class_names]
    for name, parts in own.items():
        present = sorted(set(parts.images.labels.tolist()))
        found[name] = {label: parts.of(label).mean(0) for label in present}
        styles[name] = torch.stack([*found[name].values()]).mean(0)
        for label, mean in found[name].items():
            moves[label].append(mean - styles[name])
    for label, found_moves in enumerate(moves):
        if not found_moves:
            raise UserError(
                f"`synthetic` surrogate draws on the server's images, but of class `{class_names[label]}` it has none "
                "in any domain; a larger `partition.proxy_share` gives it more."
            )
    usual = [torch.stack(parts).mean(0) for parts in moves]
    return {
        name: torch.stack([found[name].get(label, styles[name] + usual[label]) for label in range(len(usual))])
        for name in own
    }


def _draw(mean: Tensor, scatter: Sequence[Tensor], seeds: Sequence[int]) -> Tensor:
    """Draw uint8 images (k, 3, h, w), one per seed, with the pooled covariance of deviations `scatter` (n, 3, h, w)."""
    drawn = mean.expand(len(seeds), *mean.shape)
    if scatter:
        spread = torch.cat([*scatter])
        free = len(spread) - len(scatter)  # a mean of each class was estimated
        weights = [torch.randn(1, len(spread), generator=torch.Generator().manual_seed(one)) for one in seeds]
        flat = spread.flatten(1) / free**0.5
        drawn = drawn + torch.cat([one @ flat for one in weights]).view_as(drawn)
    return drawn.clamp(0, 255).round().to(torch.uint8)
