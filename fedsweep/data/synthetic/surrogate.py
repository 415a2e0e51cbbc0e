"""The source of surrogate images, which are drawn from Gaussian distributions fitted to the server's real images."""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import derived_seed
from fedsweep.data.synthetic.generated import Proportioned
from fedsweep.types import FederatedData, ImageSet


class Surrogate(Proportioned):
    """A source of surrogate images, which are samples from Gaussian distributions over pixels.

    For each class and domain, a Gaussian is fitted to the server's real images. Surrogate images replace the images
    of a text-to-image model, but the results are not comparable with results from such a model. Reports therefore state
    which runs were trained on surrogate images.
    """

    needs_proxy: ClassVar = True
    stands_in: ClassVar = True

    name: Literal["surrogate"] = "surrogate"

    def make(self, data: FederatedData, proxy: Mapping[str, ImageSet], seed: int) -> dict[str, ImageSet]:
        """Return surrogate images, keyed by domain.

        Each image has its own random stream.
        """
        classes = len(data.class_names)
        own = {name: _by_class(images) for name, images in sorted(proxy.items())}
        means = _means(own, data.class_names)
        made = {}
        for domain in data.domains:
            labels, centres = self.labels(domain, classes), means[domain.name]
            images = torch.empty((len(labels), *centres.shape[1:]), dtype=torch.uint8)
            mine, of_all = own[domain.name], list[Tensor]()
            for label in sorted(set(labels.tolist())):
                # A class with fewer than two images uses the deviations of all classes.
                if not (deviations := _deviations(mine, [label])):
                    deviations = of_all = of_all or _deviations(mine, mine)
                rows = (labels == label).nonzero().flatten()
                seeds = [derived_seed(seed, "surrogate", domain.name, label, number) for number in range(len(rows))]
                images[rows] = _draw(centres[label], deviations, seeds)
            made[domain.name] = ImageSet(images, labels)
        return made


def _by_class(images: ImageSet) -> dict[int, ImageSet]:
    labels = sorted(set(images.labels.tolist()))
    return {label: images.select((images.labels == label).nonzero().flatten()) for label in labels}


def _pixels(images: ImageSet) -> Tensor:
    """Return the pixels of one class's images as float32 (n, 3, h, w).

    Only one class is converted at a time, because all images at once might not fit into memory.
    """
    return images.take(torch.arange(len(images)))[0].float()


def _deviations(own: Mapping[int, ImageSet], labels: Iterable[int]) -> list[Tensor]:
    """Return one tensor (n, 3, h, w) per class with the deviations of the images from their class mean.

    `own` maps each class to its images. Classes with fewer than two images are skipped.
    """
    parts = [_pixels(own[label]) for label in labels if len(own.get(label, ())) > 1]
    return [part - part.mean(0) for part in parts]


def _means(own: Mapping[str, Mapping[int, ImageSet]], class_names: Sequence[str]) -> dict[str, Tensor]:
    """Return the mean image of every class, as one tensor (classes, 3, h, w) per domain.

    `own[domain][label]` contains the server's images of one class in one domain. The domain mean is the average of the
    class means in a domain. If a domain lacks images of a class, the class mean is estimated as follows. In each domain
    with images of the class, subtract the domain mean from the class mean. Average these differences over the domains,
    and add the result to the domain mean of the domain that lacks the class. Raise UserError if no domain has images of
    a class.
    """
    found, styles, moves = {}, {}, [list[Tensor]() for _ in class_names]
    for name, classes in own.items():
        found[name] = {label: _pixels(images).mean(0) for label, images in classes.items()}
        styles[name] = torch.stack([*found[name].values()]).mean(0)
        for label, mean in found[name].items():
            moves[label].append(mean - styles[name])
    for label, found_moves in enumerate(moves):
        if not found_moves:
            raise UserError(
                f"`synthetic` surrogate needs server images of every class, but there are none of "
                f"`{class_names[label]}` in any domain; increase `partition.proxy_share`."
            )
    usual = [torch.stack(parts).mean(0) for parts in moves]
    return {
        name: torch.stack([found[name].get(label, styles[name] + usual[label]) for label in range(len(usual))])
        for name in own
    }


def _draw(mean: Tensor, scatter: Sequence[Tensor], seeds: Sequence[int]) -> Tensor:
    """Draw one image per seed from a Gaussian distribution.

    The mean of the distribution is `mean`. Each tensor (n, 3, h, w) in `scatter` contains the images of one class minus
    the mean image of that class. The covariance of the distribution is estimated from all tensors in `scatter`
    together. If `scatter` is empty, all images equal `mean`.

    Returns:
        The images, uint8 (seeds, 3, h, w).
    """
    drawn = mean.expand(len(seeds), *mean.shape)
    if scatter:
        spread = torch.cat([*scatter])
        free = len(spread) - len(scatter)  # each class's mean was estimated from the same images
        weights = [torch.randn(1, len(spread), generator=torch.Generator().manual_seed(one)) for one in seeds]
        flat = spread.flatten(1) / free**0.5
        drawn = drawn + torch.cat([one @ flat for one in weights]).view_as(drawn)
    return drawn.clamp(0, 255).round().to(torch.uint8)
