"""The configuration of a pre-training, with optimizer, schedule and mixing, and the images that it names."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.data.partition import pool
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.models import BackboneConfig
from fedsweep.pretraining.augmentation import AugmentationConfig
from fedsweep.types import ImageSet


class AdamWConfig(Config):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101), without decay of biases, norms, positions and class tokens."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0, description="learning rate at the end of the warm-up")
    weight_decay: float = Field(0.05, ge=0, description="decay of weight matrices, per step and unit of lr")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="how much of the running means of gradient and squared gradient a step keeps"
    )
    clip_norm: float | None = Field(1.0, gt=0, description="largest norm of the whole gradient; null for none")


class ScheduleConfig(Config):
    """Linear warm-up, then a cosine down to a floor, updated at every step."""

    name: Literal["cosine"] = "cosine"
    warmup: float = Field(0.05, ge=0, lt=1, description="share of all steps, so that a shorter run keeps its shape")
    floor: float = Field(0.0, ge=0, description="learning rate that the cosine ends at")


class MixConfig(Config):
    """MixUp and CutMix of pairs of images of a batch and their labels, with one pairing and one share per batch."""

    mixup: float = Field(0.0, ge=0, description="alpha of Beta(alpha, alpha) for blended images; 0 for never")
    cutmix: float = Field(0.0, ge=0, description="alpha of Beta(alpha, alpha) for pasted rectangles; 0 for never")


class PretrainConfig(Config):
    """One pre-training of a backbone from scratch."""

    what_a_name_is = "a hyperparameter of this pre-training"

    seed: int = Field(0, ge=0, description="root of all randomness")
    backbone: BackboneConfig
    data: PreparedData
    pool_domains: bool = Field(False, description="train on several domains as on one set")
    epochs: int = Field(gt=0, description="passes over the training images")
    images_per_epoch: int | None = Field(None, gt=0, description="shorter epochs, of other images each; null for all")
    batch_size: int = Field(gt=0, description="images per step; an incomplete last batch is left out")
    optimizer: AdamWConfig
    schedule: ScheduleConfig
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target spread over all classes")
    drop_path: float = Field(0.0, ge=0, lt=1, description="stochastic depth of the last block; rises from 0 linearly")
    augmentation: AugmentationConfig
    mix: MixConfig
    ema_decay: float | None = Field(
        None, gt=0, lt=1, description="average the weights over steps, and validate and write the average; null for no"
    )
    precision: Literal["float32", "bf16"] = Field("float32", description="arithmetic of the network; bf16 on a GPU")
    weights: Literal["float32", "float16"] = Field("float16", description="numbers in the file that is written")

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if getattr(self.backbone, "pretrained", "none") != "none":
            raise ValueError(
                f"`backbone.pretrained` must be none, for pre-training starts from scratch, "
                f"but it is {self.backbone.pretrained}"  # type: ignore[union-attr]
            )
        if self.backbone.image_size != self.data.size:
            raise ValueError(
                f"`data.size` must be {self.backbone.image_size}, what `backbone` takes, but it is {self.data.size}"
            )
        if len(self.data.domains) > 1 and not self.pool_domains:
            raise ValueError(
                f"`data.domains` must name one domain unless `pool_domains` is true, but it has "
                f"{len(self.data.domains)}: {', '.join(self.data.domains)}"
            )
        if self.images_per_epoch is not None and self.images_per_epoch < self.batch_size:
            raise ValueError(
                f"`images_per_epoch` must be at least `batch_size`, {self.batch_size}, "
                f"but it is {self.images_per_epoch}"
            )
        if self.schedule.floor > self.optimizer.lr:
            raise ValueError(
                f"`schedule.floor` must be at most `optimizer.lr`, {self.optimizer.lr}, but it is {self.schedule.floor}"
            )
        self.augmentation.check(self.data.size)
        return self


@dataclass(frozen=True)
class TrainingData:
    """Training images, validation images (the test split), the class names, and the digest of all of these."""

    train: ImageSet
    validation: ImageSet
    class_names: tuple[str, ...]
    digest: str


def load_images(config: PretrainConfig) -> TrainingData:
    """Map the data set into memory, with its domains joined; raise UserError if it is missing or too small."""
    data = config.data.load()
    train = pool([domain.train for domain in data.domains])
    validation = pool([domain.test for domain in data.domains])
    for name in ("batch_size", "images_per_epoch"):
        if (asked := getattr(config, name)) is not None and asked > len(train):
            raise UserError(
                f"`{name}` must be at most {len(train)}, the training images of {config.data.set}, but it is {asked}."
            )
    if not len(validation):
        raise UserError(f"`data.set`: {config.data.set} has no test images to validate on.")
    return TrainingData(train, validation, data.class_names, data.digest)
