"""How training images are varied: one file per kind, chosen by its `name`."""

from typing import Annotated

from pydantic import Field

from fedsweep.pretraining.augmentation.glyphs import GlyphAugmentation
from fedsweep.pretraining.augmentation.images import ImageAugmentation

AugmentationConfig = Annotated[GlyphAugmentation | ImageAugmentation, Field(discriminator="name")]

__all__ = ["AugmentationConfig", "GlyphAugmentation", "ImageAugmentation"]
