"""Functions that write trees of images, and layouts that record or delay the reading of images."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from fedsweep.preparation.layouts.base import Item, Layout, Listing, tree
from fedsweep.preparation.plan import Options, Plan, make_plan

DOMAINS, CLASSES = ("photo", "sketch"), ("bus", "cat", "dog")


class Tree(Layout):
    """The layout `<domain>/<class>/*`, without splits."""

    name = "tree"
    looks_like = "<domain>/<class>/*"

    def _find(self, root: Path, num_classes: int | None) -> Listing:
        return tree(root, [(folder.name, folder.name, None) for folder in sorted(root.iterdir())])


class Watched(Tree):
    """The layout `Tree`, which also records every image that is read."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def read(self, root: Path, items: Sequence[Item]) -> Iterator[bytes]:
        for item, data in zip(items, super().read(root, items), strict=True):
            self.seen.append(item.path)
            yield data


class Slow(Watched):
    """The layout `Watched`, slowed down to 50 images per second in each process."""

    def read(self, root: Path, items: Sequence[Item]) -> Iterator[bytes]:
        for data in super().read(root, items):
            time.sleep(0.02)
            yield data


def write_tree(root: Path, images: int = 10, size: tuple[int, int] = (20, 16), seed: int = 0) -> Path:
    """Write PNG files of noise with width and height `size`: `images` files per class and domain."""
    rng = np.random.default_rng(seed)
    for domain in DOMAINS:
        for name in CLASSES:
            (root / domain / name).mkdir(parents=True, exist_ok=True)
            for number in range(images):
                pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / domain / name / f"{number}.png")
    return root


def plan_of(root: Path, layout: Layout | None = None, name: str = "set", size: int = 16, **options: object) -> Plan:
    """Return the plan for the preparation of a tree of images at `size` x `size` pixels."""
    return make_plan(Options(name, size, **options), root, layout or Tree())  # type: ignore[arg-type]
