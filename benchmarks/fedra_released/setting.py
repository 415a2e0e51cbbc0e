"""The setting of the comparison of FedRA's released code with fedsweep: six clients, a small ViT, random images."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fedsweep.types import ImageSet

DEPTHS = (12, 10, 8, 6, 4, 3)
LAYERS, WIDTH, HEADS = 12, 192, 3
PIXELS, CLASSES, BATCH, TESTED, EVALUATIONS = 224, 10, 8, 16, 4
UNEQUAL, EQUAL = (32, 20, 16, 24, 16, 28), (16,) * 6  # images of each client for agreement and for speed
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's, as released
RATE, TOLERANCE, DROPOUT = 0.01, 1e-5, 0.1
RAMP = 500  # rounds until DepthFL's distillation has its full weight, as released
PLAYED = (0, 400)  # rounds; in the second one, DepthFL's distillation has most of its weight
BETWEEN = (4, 7, 10)  # numbers of blocks after which DepthFL has a head, as released

SETTINGS = {
    "model": "vit_tiny_patch16_224, random weights",
    "depths": DEPTHS,
    "images_per_client": {"agreement": UNEQUAL, "speed": EQUAL},
    "batch_size": BATCH,
    "rounds": PLAYED,
    "lr": RATE,
    "dropout": {"agreement": 0.0, "speed": DROPOUT},
    "tolerance": TOLERANCE,
}

Batch = tuple[Tensor, Tensor]
"""Images, or their normalised pixels, and labels."""


def random_images(generator: torch.Generator, count: int) -> ImageSet:
    """Return `count` images with random labels; each image consists of random colour squares, 16 pixels wide."""
    coarse = torch.randint(256, (count, 3, PIXELS // 16, PIXELS // 16), dtype=torch.uint8, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return ImageSet(coarse.repeat_interleave(16, 2).repeat_interleave(16, 3), labels)


def normalised(batches: Iterable[Batch]) -> list[Batch]:
    """Normalise the images of batches as the released code does, with torchvision's ToTensor and Normalize."""
    mean, std = torch.tensor(MEAN).view(-1, 1, 1), torch.tensor(STD).view(-1, 1, 1)
    return [((images.float() / 255 - mean) / std, labels) for images, labels in batches]
