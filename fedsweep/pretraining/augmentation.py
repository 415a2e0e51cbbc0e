"""Random augmentations of pre-training images, one for photographs and one for glyphs such as digits."""

import math
from typing import Annotated, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.data.digits import SIZE, rotate, stripes, thicken


class Draws:
    """A source of random numbers for a batch of `count` images.

    The numbers are drawn on the CPU, so they do not depend on the device.
    """

    def __init__(self, count: int, generator: torch.Generator, device: torch.device) -> None:
        self.count, self.generator, self.device = count, generator, device

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Return uniformly distributed numbers between `low` and `high`, with shape (count, *shape)."""
        share = torch.rand(self.count, *shape, generator=self.generator).to(self.device, non_blocking=True)
        return low + (high - low) * share

    def sometimes(self, probability: float) -> Tensor:
        """Return booleans (count, 1, 1, 1), each of which is true with the given probability."""
        return self.uniform(0, 1, 1, 1, 1) < probability


GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the grey value of a pixel (ITU-R BT.601), as in torchvision and Pillow."""
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = (0.3, 1 / 0.3)
"""Ranges of the relative area and the aspect ratio of erased rectangles (Zhong et al., arXiv:1708.04896)."""


class ImageAugmentation(Config):
    """An augmentation with random resized crops, flips, colour jitter and random erasing.

    The random values are drawn separately for every image.
    """

    name: Literal["images"] = "images"
    crop_area: tuple[float, float] = Field((0.35, 1.0), description="range of the share of the image that a crop keeps")
    crop_ratio: tuple[float, float] = Field((0.75, 1.333), description="range of a crop's ratio of width to height")
    flip: float = Field(0.5, ge=0, le=1, description="share of images that are mirrored left to right")
    brightness: float = Field(0.4, ge=0, le=1, description="largest relative change of brightness; 0 for no change")
    contrast: float = Field(0.4, ge=0, le=1, description="largest relative change of contrast; 0 for no change")
    saturation: float = Field(0.4, ge=0, le=1, description="largest relative change of saturation; 0 for no change")
    erase: float = Field(0.0, ge=0, le=1, description="share of images in which a rectangle is filled with one colour")

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        if not 0 < self.crop_area[0] <= self.crop_area[1] <= 1:
            raise ValueError(
                f"`augmentation.crop_area` must be a range between 0 and 1, but it is {list(self.crop_area)}"
            )
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError(f"`augmentation.crop_ratio` must be a range above 0, but it is {list(self.crop_ratio)}")
        return self

    def check(self, size: int) -> None:
        """Accept any image size."""

    def __call__(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """Return augmented copies of n images, on the same device.

        Both `pixels` and the result have the shape (n, 3, h, w) and values in [0, 1].
        """
        draw = Draws(len(pixels), generator, pixels.device)
        return self._erase(self._jitter(self._crop(pixels, draw), draw), draw)

    def _crop(self, pixels: Tensor, draw: Draws) -> Tensor:
        """Crop, flip and resize the images in a single bilinear resampling."""
        area = draw.uniform(*self.crop_area)
        ratio = draw.uniform(math.log(self.crop_ratio[0]), math.log(self.crop_ratio[1])).exp()
        width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
        x, y = (1 - width) * draw.uniform(-1, 1), (1 - height) * draw.uniform(-1, 1)
        mirror = torch.where(draw.sometimes(self.flip).flatten(), -1.0, 1.0)
        zero = torch.zeros_like(x)
        theta = torch.stack([torch.stack([width * mirror, zero, x], 1), torch.stack([zero, height, y], 1)], 1)
        grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
        return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)

    def _jitter(self, pixels: Tensor, draw: Draws) -> Tensor:
        """Change the brightness, then the contrast around the image's mean grey value, and then the saturation."""
        changes = (self.brightness, self.contrast, self.saturation)
        brightness, contrast, saturation = (draw.uniform(1 - change, 1 + change, 1, 1, 1) for change in changes)
        weights = torch.tensor(GREY, device=pixels.device).view(1, 3, 1, 1)
        pixels = pixels * brightness
        mean = (pixels * weights).sum(1, keepdim=True).mean((2, 3), keepdim=True)
        pixels = mean + (pixels - mean) * contrast
        grey = (pixels * weights).sum(1, keepdim=True)
        return (grey + (pixels - grey) * saturation).clamp(0, 1)

    def _erase(self, pixels: Tensor, draw: Draws) -> Tensor:
        """Choose some of the images at random, and fill a rectangle in each of them with a random colour."""
        area = draw.uniform(*ERASED_AREA, 1, 1, 1)
        ratio = draw.uniform(math.log(ERASED_RATIO[0]), math.log(ERASED_RATIO[1]), 1, 1, 1).exp()
        width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
        left, top = (1 - width) * draw.uniform(0, 1, 1, 1, 1), (1 - height) * draw.uniform(0, 1, 1, 1, 1)
        y, x = ((torch.arange(side, device=pixels.device) + 0.5) / side for side in pixels.shape[2:])  # pixel centres
        y = y.view(-1, 1)
        inside = (left <= x) & (x < left + width) & (top <= y) & (y < top + height)
        return torch.where(inside & draw.sometimes(self.erase), draw.uniform(0, 1, 3, 1, 1), pixels)


class GlyphAugmentation(Config):
    """An augmentation that randomly rotates, scales, shifts and colours glyphs.

    Some images also get thicker strokes, a striped background, noise or inverted colours. The augmented images are
    meant to be varied, like the images on which general-purpose backbones are trained, but not to reproduce any domain
    of the digits data set.
    """

    name: Literal["glyphs"] = "glyphs"
    turn: float = Field(15.0, ge=0, le=180, description="largest rotation to either side, in degrees")
    scale: tuple[float, float] = Field(
        (1.0, 1.35),
        description="range of the factor by which glyphs are enlarged; at 1, MNIST's digits fill 11.5 of 16 pixels",
    )
    shift: float = Field(0.1, ge=0, le=1, description="largest shift, as a share of half the image's width")
    bold: float = Field(
        1.0, ge=1, description="factor by which glyphs are brightened, because thin strokes fade when enlarged"
    )
    thicken: float = Field(
        0.15, ge=0, le=1, description="share of images with strokes thickened by one pixel on each side"
    )
    stripes: float = Field(0.15, ge=0, le=1, description="share of images with a background of coloured stripes")
    contrast: float = Field(
        0.6,
        ge=0,
        le=1,
        description="smallest brightness of a glyph; each colour channel is drawn between this value and 1",
    )
    noise: float = Field(0.15, ge=0, le=1, description="share of images with noise")
    noise_std: float = Field(0.15, ge=0, description="standard deviation of the noise, relative to full brightness")
    invert: float = Field(0.1, ge=0, le=1, description="share of images that are inverted")

    @model_validator(mode="after")
    def _range(self) -> Self:
        low, high = self.scale
        if not 0 < low <= high:
            raise ValueError(f"`augmentation.scale` must be a range above 0, but it is {list(self.scale)}")
        return self

    def check(self, size: int) -> None:
        """Raise ValueError unless `size` is 16 pixels, the fixed size of the striped backgrounds."""
        if size != SIZE:
            raise ValueError(f"`augmentation.name` glyphs needs images of {SIZE} pixels, but `data.size` is {size}")

    def __call__(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """Return augmented copies of n images, on the same device.

        Both `pixels` and the result have the shape (n, 3, h, w) and values in [0, 1].
        """
        draw = Draws(len(pixels), generator, pixels.device)
        angle, scale = draw.uniform(-self.turn, self.turn), draw.uniform(*self.scale)
        glyphs = rotate(pixels.mean(1, keepdim=True), angle, scale, draw.uniform(-self.shift, self.shift, 2))
        glyphs = (self.bold * glyphs).clamp(max=1)
        glyphs = torch.where(draw.sometimes(self.thicken), thicken(glyphs), glyphs)
        background = stripes(len(pixels), generator).to(pixels.device) * draw.uniform(0, 0.5, 3, 1, 1)
        background = background * draw.sometimes(self.stripes)
        images = background * (1 - glyphs) + glyphs * draw.uniform(self.contrast, 1, 3, 1, 1)
        noise = torch.randn(pixels.shape, generator=generator).to(pixels.device)
        images = images + self.noise_std * noise * draw.sometimes(self.noise)
        return torch.where(draw.sometimes(self.invert), 1 - images, images).clamp(0, 1)


AugmentationConfig = Annotated[GlyphAugmentation | ImageAugmentation, Field(discriminator="name")]
