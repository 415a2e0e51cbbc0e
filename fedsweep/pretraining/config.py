"""The configuration of a pre-training run, and a function that loads the images for the run."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.data.data_config import load
from fedsweep.data.image_sets import pool
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.models import BackboneConfig
from fedsweep.pretraining.augmentation import AugmentationConfig
from fedsweep.types import ImageSet


class AdamWConfig(Config):
    """The AdamW optimizer (Loshchilov and Hutter, arXiv:1711.05101).

    Weight decay is not applied to biases, normalisation layers, position embeddings or class tokens.
    """

    name: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0, description="learning rate at the end of the warm-up")
    weight_decay: float = Field(0.05, ge=0, description="decay of weight matrices, multiplied by the learning rate")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="decay rates of the running means of the gradient and the squared gradient"
    )
    clip_norm: float | None = Field(
        1.0, gt=0, description="largest norm of the gradient over all parameters; null for no limit"
    )


class ScheduleConfig(Config):
    """A learning-rate schedule with linear warm-up and cosine decay to a floor, updated at every step."""

    name: Literal["cosine"] = "cosine"
    warmup: float = Field(0.05, ge=0, lt=1, description="length of the warm-up, as a share of all steps")
    floor: float = Field(0.0, ge=0, description="learning rate at the end of the cosine decay")


class MixConfig(Config):
    """The options of MixUp and CutMix, which mix each image with another image of the batch.

    The labels of the two images are mixed in the same ratio. The ratio is drawn once per batch.
    """

    mixup: float = Field(0.0, ge=0, description="alpha of MixUp's Beta(alpha, alpha) distribution; 0 for no MixUp")
    cutmix: float = Field(0.0, ge=0, description="alpha of CutMix's Beta(alpha, alpha) distribution; 0 for no CutMix")


class PretrainConfig(Config):
    """The configuration of a run that pre-trains a backbone from scratch."""

    what_a_name_is = "a hyperparameter of this pre-training"

    seed: int = Field(0, ge=0, description="seed of all random numbers of the pre-training")
    backbone: BackboneConfig
    data: PreparedData
    pool_domains: bool = Field(False, description="whether to join several domains into one training set")
    epochs: int = Field(gt=0, description="passes over the training images")
    images_per_epoch: int | None = Field(None, gt=0, description="number of images drawn for each epoch; null for all")
    batch_size: int = Field(gt=0, description="images per step; an incomplete last batch is left out")
    optimizer: AdamWConfig
    schedule: ScheduleConfig
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target that is spread over all classes")
    drop_path: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="drop rate of stochastic depth in the last block; it rises linearly from 0 in the first block",
    )
    augmentation: AugmentationConfig
    mix: MixConfig
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of a moving average of the weights, which is validated and written; null for no average",
    )
    precision: Literal["float32", "bf16"] = Field(
        "float32", description="number format of the network's computations; bf16 is for GPUs"
    )
    weights: Literal["float32", "float16"] = Field("float16", description="number format of the weights file")

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if getattr(self.backbone, "pretrained", "none") != "none":
            raise ValueError(
                f"`backbone.pretrained` must be none, because pre-training starts from scratch, "
                f"but it is {self.backbone.pretrained}"  # type: ignore[union-attr]
            )
        if self.backbone.image_size != self.data.size:
            raise ValueError(
                f"`data.size` must be {self.backbone.image_size}, the image size of `backbone`, "
                f"but it is {self.data.size}"
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
    """The training and validation images of a pre-training run, their class names, and the digest of the data set.

    The validation images are the test split of the data set.
    """

    train: ImageSet
    validation: ImageSet
    class_names: tuple[str, ...]
    digest: str


def load_images(config: PretrainConfig) -> TrainingData:
    """Load the images for pre-training and join all domains.

    Raise UserError if there are too few training images or no test images.
    """
    data = load(config.data)
    train = pool([domain.train for domain in data.domains])
    validation = pool([domain.test for domain in data.domains])
    for name in ("batch_size", "images_per_epoch"):
        if (asked := getattr(config, name)) is not None and asked > len(train):
            raise UserError(
                f"`{name}` must be at most {len(train)}, the number of training images in {config.data.set}, "
                f"but it is {asked}."
            )
    if not len(validation):
        raise UserError(f"`data.set`: {config.data.set} has no test images, which are needed for validation.")
    return TrainingData(train, validation, data.class_names, data.digest)
