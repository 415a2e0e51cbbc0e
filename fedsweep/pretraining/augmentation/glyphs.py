"""Augmentation of small white glyphs on black, such as digits."""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.data.digits import SIZE, rotate, stripes, thicken
from fedsweep.pretraining.augmentation.draws import Draws


class GlyphAugmentation(Config):
    """Glyphs turned, scaled, shifted and now and then thickened, striped, noisy or inverted.

    What a general backbone has seen a little of, never a domain of the experiment itself.
    """

    name: Literal["glyphs"] = "glyphs"
    turn: float = Field(15.0, ge=0, le=180, description="largest angle, degrees to either side")
    scale: tuple[float, float] = Field(
        (1.0, 1.35), description="range of the size relative to the store's; MNIST's digits fill 11.5 of 16 pixels"
    )
    shift: float = Field(0.1, ge=0, le=1, description="largest shift, in half-widths of the image")
    bold: float = Field(
        1.0, ge=1, description="brightness gain, cut off at white: makes up for what enlarging takes from thin strokes"
    )
    thicken: float = Field(0.15, ge=0, le=1, description="share of images whose strokes grow by a pixel on each side")
    stripes: float = Field(0.15, ge=0, le=1, description="share of images on coloured stripes")
    contrast: float = Field(0.6, ge=0, le=1, description="darkest ink; each channel of an image draws its own")
    noise: float = Field(0.15, ge=0, le=1, description="share of images with noise")
    noise_std: float = Field(0.15, ge=0, description="standard deviation of the noise, of the full brightness")
    invert: float = Field(0.1, ge=0, le=1, description="share of images inverted")

    @model_validator(mode="after")
    def _range(self) -> Self:
        low, high = self.scale
        if not 0 < low <= high:
            raise ValueError(f"`augmentation.scale` must be a range above 0, but it is {list(self.scale)}")
        return self

    def check(self, size: int) -> None:
        """Refuse what this augmentation cannot draw.

        Raises:
            ValueError: the images have another size than the stripes.
        """
        if size != SIZE:
            raise ValueError(f"`augmentation.name` glyphs is for images of {SIZE} pixels, but `data.size` is {size}")

    def __call__(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """Varied images of pixels (n, 3, h, w) in [0, 1]: the same shape, on the same device, in [0, 1]."""
        draw = Draws(len(pixels), generator, pixels.device)
        angle, scale = draw.uniform(-self.turn, self.turn), draw.uniform(*self.scale)
        glyphs = rotate(pixels.mean(1, keepdim=True), angle, scale, draw.uniform(-self.shift, self.shift, 2))
        glyphs = (self.bold * glyphs).clamp(max=1)
        glyphs = torch.where(draw.sometimes(self.thicken), thicken(glyphs), glyphs)
        background = stripes(len(pixels), generator).to(pixels.device) * draw.uniform(0, 0.5, 3, 1, 1)
        background = background * draw.sometimes(self.stripes)
        images = background * (1 - glyphs) + glyphs * draw.uniform(self.contrast, 1, 3, 1, 1)
        images = images + self.noise_std * draw.normal(*pixels.shape[1:]) * draw.sometimes(self.noise)
        return torch.where(draw.sometimes(self.invert), 1 - images, images).clamp(0, 1)
