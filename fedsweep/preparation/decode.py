"""Functions that decode image files to RGB pixels of a given size, one by one or in chunks in several processes."""

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
NEARLY_BLACK = 32  # an image is nearly black if all its decoded pixels are below this value, of 255
MADE_WITH = f"Pillow {PIL.__version__}"
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


class CorruptImageError(Exception):
    """The error raised for an image that cannot be decoded, with a short reason as its message."""


@dataclass(frozen=True)
class Geometry:
    """The resizing and cropping of an image to `size` x `size` pixels.

    The short side is resized to `size / crop_pct` pixels, and then the centre is cropped. If `crop_mode` is "squash",
    both sides are resized to `size / crop_pct` pixels, which distorts the image.
    """

    size: int
    crop_pct: float = 1.0
    crop_mode: Literal["center", "squash"] = "center"
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"

    @property
    def image_bytes(self) -> int:
        """The size of one decoded image, in bytes."""
        return 3 * self.size**2

    def enlarged(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image of `width` x `height` pixels is resized before the crop."""
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
    """Return the resizing and cropping that timm uses to evaluate `backbone` on images of `size` x `size` pixels.

    `backbone` is the name of a timm model, with or without the tag of its weights.

    Raises:
        UserError: timm has no such model or weights, or fedsweep does not support the model's crop or interpolation.
            For example, crops that pad images are not supported.
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
    """A group of images of one domain that a process decodes as one task.

    The pixels of `items[i]` are written to the file `pixels` as image number `slots[i]`. `key` is the SHA-256 of
    everything that determines the pixels of the images and the positions of the images in the file.
    """

    key: str
    layout: Layout
    root: Path
    items: tuple[Item, ...]
    slots: tuple[int, ...]
    geometry: Geometry
    pixels: Path


class Corrupt(NamedTuple):
    """An image that cannot be decoded, and the reason.

    `slot` is the planned position of the image in its domain, and `path` is relative to the root folder of the data
    set.
    """

    slot: int
    path: str
    reason: str


@dataclass(frozen=True)
class Done:
    """The result of decoding the chunk with the key `key`.

    `corrupt` lists the images that cannot be decoded. `crc` is the CRC-32 of the pixels of all other images, in the
    order of the chunk. `blank` lists the paths of images that are nearly black or of one colour.
    """

    key: str
    crc: int
    corrupt: tuple[Corrupt, ...]
    blank: tuple[str, ...] = ()


def decode_chunk(chunk: Chunk) -> Done:
    """Decode the images of a chunk into the file `chunk.pixels`, or raise UserError if an image file cannot be read."""
    crc, corrupt, blank = 0, [], []
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
                decoded = decode(data, chunk.geometry)
            except CorruptImageError as error:
                corrupt.append(Corrupt(slot, item.path, str(error)))
                continue
            if decoded.max() < NEARLY_BLACK or decoded.min() == decoded.max():
                blank.append(item.path)
            pixels = decoded.tobytes()
            _write_at(file.fileno(), pixels, slot * length, chunk.pixels)
            crc = zlib.crc32(pixels, crc)
    return Done(chunk.key, crc, tuple(corrupt), tuple(blank))


def _write_at(file: int, data: bytes, offset: int, path: Path) -> None:
    try:
        while data:  # not through a memory map, because a full disk would then kill the process
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def decode_chunks(chunks: Sequence[Chunk], workers: int) -> Generator[Done]:
    """Yield the result of each chunk as soon as the chunk is decoded.

    If `workers` is above 1, worker processes decode the chunks. Closing the generator ends the workers. Raise UserError
    if a file cannot be read or a worker is killed.
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
    """Make this worker ignore Ctrl-C, which the parent process handles, and exit when the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
