"""The digits data set: scikit-learn's handwritten digits, rendered in six styles.

Each style is a domain. The 1,797 scans (8 x 8 pixels, 17 grey levels) are enlarged to 16 x 16 RGB pixels and rendered
in each style. All domains contain the same scans with the same train/test split, so they differ only in style. The
scans are part of scikit-learn, so nothing is downloaded.
"""

import math
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsweep.common.randomness import derived_seed
from fedsweep.common.rules import known_domains_fit
from fedsweep.data.prepared.dataset import Data, content_digest
from fedsweep.types import Domain, FederatedData, ImageSet

STYLES = ("plain", "rotated", "inverted", "noisy", "thick", "textured")
SIZE = 16
DATA_SEED = 0  # fixed, so that runs of all seeds use the same images


class DigitsData(Data):
    """The configuration of the digits data set, in which each style is a domain."""

    name: Literal["digits"] = "digits"
    domains: tuple[str, ...] = Field(STYLES, min_length=1, description="styles to use; the clients follow this order")
    test_fraction: float = Field(
        0.2, ge=0.01, le=0.99, description="share of the scans held out for testing, the same scans in every domain"
    )

    def _violations(self) -> Iterator[str]:
        return known_domains_fit(self)

    @property
    def size(self) -> int:
        """The height and width of the images, in pixels."""
        return SIZE

    def load(self) -> FederatedData:
        """Return the rendered domains, with uint8 images (n, 3, 16, 16).

        The group of an image is the number of its scan, which is the same in every style.

        A held-out domain is tested on its test split only, because the scans in its training split are also training
        images of the other domains.
        """
        found, labels = read_scans()
        glyphs = enlarge(found / 16)
        order = torch.randperm(len(labels), generator=_generator("split"))
        test, train = order.tensor_split([round(len(labels) * self.test_fraction)])
        train, test = train.sort().values, test.sort().values
        domains = []
        for name in self.domains:
            images = to_uint8(RENDERERS[name](glyphs, _generator("style", name)))
            parts = (ImageSet(images[scans], labels[scans], groups=scans) for scans in (train, test))
            domains.append(Domain(name, *parts))
        classes = tuple("0123456789")
        ours, others = ([one for one in domains if (one.name in self.held_out_domains) == out] for out in (False, True))
        return FederatedData("digits", classes, tuple(ours), content_digest(classes, domains), tuple(others))


def read_scans() -> tuple[Tensor, Tensor]:
    """Return the images and labels of scikit-learn's handwritten digits (`load_digits`).

    The data file is read directly, because importing scikit-learn would slow down the start of every worker.

    Returns:
        The images, float32 (1797, 1, 8, 8) with values from 0 to 16, and the labels, int64 (1797,).
    """
    package = cast(ModuleSpec, find_spec("sklearn")).origin or ""
    rows = np.loadtxt(
        Path(package).with_name("datasets").joinpath("data", "digits.csv.gz"), delimiter=",", dtype=np.float32
    )
    return torch.from_numpy(rows[:, :64]).reshape(-1, 1, 8, 8), torch.from_numpy(rows[:, 64].astype(np.int64))


def enlarge(glyphs: Tensor) -> Tensor:
    """Enlarge greyscale glyphs (n, 1, h, w) in [0, 1] to (n, 1, 16, 16), with an empty margin of one pixel."""
    inner = SIZE - 2
    return F.pad(F.interpolate(glyphs, size=(inner, inner), mode="bicubic", antialias=True).clamp(0, 1), (1, 1, 1, 1))


def to_uint8(images: Tensor) -> Tensor:
    """Convert greyscale or RGB images with values in [0, 1] to uint8 RGB images (n, 3, h, w)."""
    return (images.clamp(0, 1) * 255).round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()


def rotate(images: Tensor, degrees: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """Rotate, scale and shift each image of a batch.

    Args:
        images: The images (n, c, h, w).
        degrees: The angle of each image in degrees (n,).
        scale: The factor by which each image is enlarged (n,); None for no scaling.
        shift: The horizontal and vertical shift of each image (n, 2), in units of half the image size; None for no
            shift.
    """
    angle = degrees * (math.pi / 180)
    size = torch.ones_like(angle) if scale is None else scale
    offset = torch.zeros(len(images), 2) if shift is None else shift
    cos, sin = torch.cos(angle) / size, torch.sin(angle) / size
    theta = torch.stack([torch.stack([cos, -sin, offset[:, 0]], 1), torch.stack([sin, cos, offset[:, 1]], 1)], 1)
    return F.grid_sample(images, F.affine_grid(theta, list(images.shape), align_corners=False), align_corners=False)


def thicken(glyphs: Tensor) -> Tensor:
    """Thicken strokes by one pixel in every direction (greyscale dilation)."""
    return F.max_pool2d(glyphs, kernel_size=3, stride=1, padding=1)


def stripes(count: int, generator: torch.Generator) -> Tensor:
    """Return images of sinusoidal stripes with random direction, width and phase.

    Returns:
        The images (count, 1, 16, 16), with values in [0, 1].
    """
    axis = torch.arange(SIZE, dtype=torch.float32)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    angle, phase, width = (torch.rand(count, 1, 1, 1, generator=generator) for _ in range(3))
    across = x * torch.cos(angle * math.pi) + y * torch.sin(angle * math.pi)
    return 0.5 + 0.5 * torch.sin(across * (2 * math.pi) / (3 + 5 * width) + phase * (2 * math.pi))


def _rotated(glyphs: Tensor, generator: torch.Generator) -> Tensor:
    return rotate(glyphs, 45 + 30 * torch.rand(len(glyphs), generator=generator))


def _noisy(glyphs: Tensor, generator: torch.Generator) -> Tensor:
    return 0.2 + 0.6 * glyphs + 0.25 * torch.randn(len(glyphs), 3, SIZE, SIZE, generator=generator)


def _textured(glyphs: Tensor, generator: torch.Generator) -> Tensor:
    dark = 0.5 * torch.rand(len(glyphs), 3, 1, 1, generator=generator)
    light = 0.4 + 0.4 * torch.rand(len(glyphs), 3, 1, 1, generator=generator)
    ink = torch.rand(len(glyphs), 3, 1, 1, generator=generator).round()  # a corner of the colour cube
    band = stripes(len(glyphs), generator)
    return (dark * band + light * (1 - band)) * (1 - glyphs) + ink * glyphs


RENDERERS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "plain": lambda glyphs, _: glyphs,
    "rotated": _rotated,
    "inverted": lambda glyphs, _: 1 - glyphs,
    "noisy": _noisy,
    "thick": lambda glyphs, _: thicken(glyphs),
    "textured": _textured,
}


def _generator(purpose: str, *key: str) -> torch.Generator:
    return torch.Generator().manual_seed(derived_seed(DATA_SEED, f"digits/{purpose}", *key))
