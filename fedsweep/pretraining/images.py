"""The images of a pre-training: one training and one validation set, mapped from the store, moved batch by batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.data.partition.base import pool
from fedsweep.pretraining.config import PretrainConfig
from fedsweep.types import ImageSet


@dataclass(frozen=True)
class TrainingData:
    """Training images, validation images (the test split), the class names, and the digest of it all."""

    train: ImageSet
    validation: ImageSet
    class_names: tuple[str, ...]
    digest: str


def load_images(config: PretrainConfig) -> TrainingData:
    """Map the data set into memory; several domains become one set.

    Raises:
        UserError: it is not prepared, or smaller than a batch or an epoch.
    """
    data = config.data.load()
    train = pool([domain.train for domain in data.domains])
    validation = pool([domain.test for domain in data.domains])
    for name, asked in (("batch_size", config.batch_size), ("images_per_epoch", config.images_per_epoch)):
        if asked is not None and asked > len(train):
            raise UserError(
                f"`{name}` must be at most {len(train)}, the training images of {config.data.set}, but it is {asked}."
            )
    if not len(validation):
        raise UserError(f"`data.set`: {config.data.set} has no test images to validate on.")
    return TrainingData(train, validation, data.class_names, data.digest)


def moved(images: Tensor, labels: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """uint8 images and labels on the device, pixels as float32 in [0, 1]. A GPU copies while the CPU goes on."""
    if device.type == "cuda":
        images, labels = images.pin_memory(), labels.pin_memory()
    images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    return images.float().div_(255), labels
