"""Decoding of image files to pixels of a given size: colours, resizing, crop."""

import io
import math
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
import PIL
from PIL import Image, UnidentifiedImageError

from fedsweep.common.errors import UserError, near, one_line

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Formats that are opened; other formats of PIL may start other programs."""
LARGEST = 178_956_970  # pixels before or after resizing: PIL's limit against decompression bombs
MADE_WITH = f"Pillow {PIL.__version__}"
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


class CorruptImageError(Exception):
    """An image cannot be decoded, with the reason in a few words."""


@dataclass(frozen=True)
class Geometry:
    """The transform of an image to a square of `size` pixels: resize to size / crop_pct, then crop the centre."""

    size: int
    crop_pct: float = 1.0
    crop_mode: Literal["center", "squash"] = "center"
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"

    @property
    def image_bytes(self) -> int:
        """Size of one decoded image, in bytes."""
        return 3 * self.size**2

    def enlarged(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height before the crop, of which the aspect ratio is kept unless `crop_mode` is squash."""
        fitted = math.floor(self.size / self.crop_pct)
        if self.crop_mode == "squash":
            return fitted, fitted
        if width <= height:
            return fitted, int(fitted * height / width)
        return int(fitted * width / height), fitted


def decode(data: bytes, geometry: Geometry) -> np.ndarray:
    """Decode one image to uint8 RGB (3, size, size), or raise CorruptImageError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's, on odd metadata and on large images that are still decoded
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                return _pixels(image, geometry)
    except (CorruptImageError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise CorruptImageError("no image, or of no format that is read" if data else "empty") from None
    except Exception as error:  # PIL's decoders raise nearly anything on broken data
        raise CorruptImageError(one_line(error)) from None


def _pixels(image: Image.Image, geometry: Geometry) -> np.ndarray:
    wide, high = geometry.enlarged(*image.size)
    if wide * high > LARGEST:
        raise CorruptImageError(f"too narrow: {image.width} x {image.height} would be enlarged to {wide} x {high}")
    rgb = _rgb(image).resize((wide, high), FILTERS[geometry.interpolation])
    left, top = round((wide - geometry.size) / 2.0), round((high - geometry.size) / 2.0)
    square = rgb.crop((left, top, left + geometry.size, top + geometry.size))
    return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise CorruptImageError("pixels are floats, whose black and white are unknown")
    if image.mode.startswith("I"):  # 16 bits; PIL opens some of them as 32
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    return image.convert("RGB")


def geometry_of(backbone: str, size: int) -> Geometry:
    """Return timm's crop and interpolation for evaluating `backbone` at `size` pixels, or raise UserError.

    The name may have a weights tag. Transforms that pad are not supported.
    """
    import timm
    from timm.models import get_pretrained_cfg

    name, _, tag = backbone.partition(".")
    if not timm.is_model(name):
        hint = near(name, timm.list_models()) or "; `timm.list_models()` names those that it has."
        raise UserError(f"`--backbone`: timm has no model `{name}`{hint}")
    try:
        config = get_pretrained_cfg(backbone)
    except RuntimeError:
        tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{name}.*")]
        hint = near(tag, tags) or f"; it has {', '.join(tags)}."
        raise UserError(f"`--backbone`: timm has no weights `{tag}` of {name}{hint}") from None
    if config is None:
        raise UserError(f"`--backbone`: timm says nothing about how {name} is evaluated.")
    mode, interpolation = config.crop_mode, config.interpolation
    if mode not in ("center", "squash") or interpolation not in FILTERS:
        raise UserError(
            f"`--backbone` {backbone} is evaluated with the crop `{mode}` and `{interpolation}` interpolation, but "
            f"`data prepare` knows center and squash, {' and '.join(FILTERS)}."
        )
    return Geometry(size, float(config.crop_pct), mode, interpolation)
