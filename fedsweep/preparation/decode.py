"""Decoding of image files to RGB pixels of a given size, image by image or in chunks by several processes."""

import io
import math
import os
import signal
import threading
import warnings
import zlib
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import PIL
from PIL import Image, UnidentifiedImageError

from fedsweep.common.errors import UserError, near, one_line
from fedsweep.preparation.layouts.base import Item, Layout

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Accepted formats. For some other formats, PIL starts external programs, which would be unsafe."""
LARGEST = 178_956_970  # pixels before or after resizing: PIL's limit against decompression bombs
MADE_WITH = f"Pillow {PIL.__version__}"
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


class CorruptImageError(Exception):
    """The error for an image that cannot be decoded; its message is the reason in a few words."""


@dataclass(frozen=True)
class Geometry:
    """The transform of an image to `size` x `size` pixels: resize its short side to size / crop_pct, then crop.

    The centre is cropped. With `crop_mode` squash, both sides are resized to size / crop_pct, which distorts the image.
    """

    size: int
    crop_pct: float = 1.0
    crop_mode: Literal["center", "squash"] = "center"
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"

    @property
    def image_bytes(self) -> int:
        """Size of one decoded image, in bytes."""
        return 3 * self.size**2

    def enlarged(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height after resizing and before the crop, for an image of `width` x `height` pixels."""
        fitted = math.floor(self.size / self.crop_pct)
        if self.crop_mode == "squash":
            return fitted, fitted
        if width <= height:
            return fitted, int(fitted * height / width)
        return int(fitted * width / height), fitted


def decode(data: bytes, geometry: Geometry) -> np.ndarray:
    """Decode an image file to uint8 RGB (3, size, size), or raise CorruptImageError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL warns about odd metadata and about large images that it can decode
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                return _pixels(image, geometry)
    except (CorruptImageError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise CorruptImageError("not an image, or in an unsupported format" if data else "empty") from None
    except Exception as error:  # PIL's decoders raise nearly anything on broken data
        raise CorruptImageError(one_line(error)) from None


def _pixels(image: Image.Image, geometry: Geometry) -> np.ndarray:
    wide, high = geometry.enlarged(*image.size)
    if wide * high > LARGEST:
        raise CorruptImageError(f"too narrow: {image.width} x {image.height} pixels would become {wide} x {high}")
    rgb = _rgb(image).resize((wide, high), FILTERS[geometry.interpolation])
    left, top = round((wide - geometry.size) / 2.0), round((high - geometry.size) / 2.0)
    square = rgb.crop((left, top, left + geometry.size, top + geometry.size))
    return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise CorruptImageError("its pixels are floats with an unknown range")
    if image.mode.startswith("I"):  # 16 bits per pixel; PIL opens some of these images with 32 bits
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    return image.convert("RGB")


def geometry_of(backbone: str, size: int) -> Geometry:
    """Return timm's crop and interpolation for evaluating `backbone` at `size` pixels, or raise UserError.

    `backbone` is the name of a timm model, with or without the tag of its weights. Transforms that pad images are not
    supported.
    """
    import timm
    from timm.models import get_pretrained_cfg

    name, _, tag = backbone.partition(".")
    if not timm.is_model(name):
        hint = near(name, timm.list_models()) or "; `timm.list_models()` returns all names."
        raise UserError(f"`--backbone`: timm has no model `{name}`{hint}")
    try:
        config: Any = get_pretrained_cfg(backbone)
    except RuntimeError:
        tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{name}.*")]
        hint = near(tag, tags) or f"; the tags of its weights are {', '.join(tags)}."
        raise UserError(f"`--backbone`: timm has no weights `{tag}` of {name}{hint}") from None
    if config is None:
        raise UserError(f"`--backbone`: timm does not define how images are transformed to evaluate {name}.")
    mode, interpolation = config.crop_mode, config.interpolation
    if mode not in ("center", "squash") or interpolation not in FILTERS:
        raise UserError(
            f"`--backbone` {backbone} is evaluated with the crop `{mode}` and `{interpolation}` interpolation, but "
            f"`data prepare` supports only the crops center and squash and the interpolations {' and '.join(FILTERS)}."
        )
    return Geometry(size, float(config.crop_pct), mode, interpolation)


@dataclass(frozen=True)
class Chunk:
    """A group of images of one domain, and the slots (positions) of their pixels in the file `pixels`."""

    key: str
    layout: Layout
    root: Path
    items: tuple[Item, ...]
    slots: tuple[int, ...]
    geometry: Geometry
    pixels: Path


class Corrupt(NamedTuple):
    """An image that cannot be decoded: its slot in the domain, its path within the root, and the reason."""

    slot: int
    path: str
    reason: str


@dataclass(frozen=True)
class Done:
    """The result of decoding a chunk: its corrupt images, and the CRC-32 of the pixels of all others, in order."""

    key: str
    crc: int
    corrupt: tuple[Corrupt, ...]


def decode_chunk(chunk: Chunk) -> Done:
    """Read the images of a chunk and write their pixels, or raise UserError if a file cannot be read."""
    crc, corrupt = 0, []
    stream = chunk.layout.read(chunk.root, chunk.items)
    length = chunk.geometry.image_bytes
    with chunk.pixels.open("r+b", buffering=0) as file:
        for item, slot in zip(chunk.items, chunk.slots, strict=True):
            try:
                data = next(stream)
            except OSError as error:
                reason = error.strerror or one_line(error)
                raise UserError(f"{chunk.root / item.path} cannot be read: {reason}.") from None
            try:
                pixels = decode(data, chunk.geometry).tobytes()
            except CorruptImageError as error:
                corrupt.append(Corrupt(slot, item.path, str(error)))
                continue
            _write_at(file.fileno(), pixels, slot * length, chunk.pixels)
            crc = zlib.crc32(pixels, crc)
    return Done(chunk.key, crc, tuple(corrupt))


def _write_at(file: int, data: bytes, offset: int, path: Path) -> None:
    try:
        while data:  # not through a memory map, because a full disk would then kill the process
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def decode_chunks(chunks: Sequence[Chunk], workers: int) -> Generator[Done]:
    """Yield the result of each chunk when it is finished.

    If `workers` is above 1, worker processes decode the chunks; close the iterator to end them. Raise UserError if a
    file cannot be read or a worker was killed.
    """
    if min(workers, len(chunks)) <= 1:
        yield from map(decode_chunk, chunks)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)  # not fork, which is unsafe with threads
    try:
        for future in as_completed([pool.submit(decode_chunk, chunk) for chunk in chunks]):
            yield future.result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed while decoding, perhaps because the memory was full; run the same command "
            "again to continue, if necessary with a smaller `--workers`."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Ignore Ctrl-C, which the parent process handles, and end this worker when the parent ends or is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
