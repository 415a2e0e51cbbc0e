"""timm's Vision Transformers and MLP-Mixers as backbones, with weights from timm or a file, or with random weights."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import nn

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import derived_seed
from fedsweep.models import weights_file
from fedsweep.models.base import Backbone, Recipe, check_walk
from fedsweep.models.layered import LayeredModel
from fedsweep.models.timm.architecture import Architecture, TimmOutline, check_name, check_pinned, outline, timm_config
from fedsweep.models.timm.transformer_families import LayeredMixer
from fedsweep.models.timm.weights import pretrained_network

Mean = Annotated[float, Field(ge=-1000, le=1000)]
Std = Annotated[float, Field(ge=1e-6, le=1e6)]


class TimmBackbone(Backbone):
    """A timm model that can run block by block: ViT, DeiT, DINOv2, DINOv3, BEiT, EVA or MLP-Mixer."""

    name: Literal["timm"] = "timm"
    model: str = Field(
        min_length=1,
        description="timm's name of the model, including the tag of its weights if `pretrained` is timm",
    )
    pretrained: str = Field(
        min_length=1,
        description="source of the weights: `timm` (downloaded once), `none` (random weights), or a file or folder "
        "with weights in timm's naming",
    )
    sha256: str | None = Field(
        None, pattern="^[0-9a-f]{64}$", description="SHA-256 that the weights file must have; null: accept any file"
    )
    img_size: int | None = Field(
        None, gt=0, description="height and width of the images in pixels; null: the model's own value"
    )
    patch_size: int | None = Field(
        None, gt=0, description="height and width of a patch in pixels; null: the model's own value"
    )
    in_chans: Literal[1, 3] = Field(
        3, description="number of input channels: 3 for colour, 1 for the mean of the three colours"
    )
    embed_dim: int | None = Field(
        None,
        gt=0,
        description="number of features of a token; null: the model's own value (timm's weights require null)",
    )
    num_blocks: int | None = Field(
        None,
        gt=0,
        description="number of blocks of the full model; null: the model's own value (timm's weights require null)",
    )
    num_heads: int | None = Field(
        None, gt=0, description="number of attention heads; null: the model's own value (timm's weights require null)"
    )
    mean: tuple[Mean, Mean, Mean] | None = Field(
        None, description="mean of each colour, for pixels between 0 and 1; null: the weights' own values"
    )
    std: tuple[Std, Std, Std] | None = Field(
        None, description="standard deviation of each colour, for pixels between 0 and 1; null: the weights' own values"
    )

    @model_validator(mode="after")
    def _timm_has_it(self) -> Self:
        if self.pretrained not in ("timm", "none") and not weights_file.is_path(self.pretrained):
            raise ValueError(
                "`backbone.pretrained` must be timm, none, or a file or folder of weights "
                f"({', '.join(weights_file.SUFFIXES)}, or a path with a slash), but it is `{self.pretrained}`"
            )
        if self.sha256 is not None and self.pretrained in ("timm", "none"):
            raise ValueError(f"`backbone.sha256` pins a weights file, but `backbone.pretrained` is {self.pretrained}")
        check_name(self.model)
        if self.pretrained == "timm":
            check_pinned(self.model)
            sizes = ("img_size", "patch_size")  # fixed for a Mixer, whose tokens mix through matrices of one size
            fixed = ("embed_dim", "num_blocks", "num_heads")
            for field in (*fixed, *sizes) if self._outline.family is LayeredMixer else fixed:
                if getattr(self, field) is not None:
                    raise ValueError(f"`backbone.{field}` must be null, because timm's weights {self.model} fix it")
        _ = self._outline
        return self

    @property
    def _architecture(self) -> Architecture:
        return Architecture(
            self.model, self.in_chans, self.img_size, self.patch_size, self.embed_dim, self.num_blocks, self.num_heads
        )

    @property
    def _outline(self) -> TimmOutline:
        return outline(self._architecture)

    def fingerprint(self) -> str:
        """Return a string that identifies the content of the weights.

        The string is `none` for random weights, or `timm:` followed by the model's name for timm's weights. For a
        weights file, it is `sha256:` followed by a digest of the file and, if the model takes values from the file's
        JSON card, a digest of these values.

        Raises:
            UserError: The file is missing, does not match `sha256` or its JSON card, or contains the weights of another
                model.
        """
        if self.pretrained == "timm":
            return f"timm:{self.model}"
        if self.pretrained == "none":
            return "none"
        path, card = self._file()
        digest = weights_file.digest(path)
        if self.sha256 not in (None, digest):
            raise UserError(f"`backbone.sha256` is {self.sha256}, but the SHA-256 of {path} is {digest}.")
        free = [name for name in ("mean", "std") if getattr(self, name) is None]
        # Whether the head is kept depends on the class names.
        used = {name: card[name] for name in (*free, "class_names") if name in card}
        suffix = f"+{hashlib.sha256(json.dumps(used).encode()).hexdigest()[:16]}" if used else ""
        return f"sha256:{digest}{suffix}"

    def _file(self) -> tuple[Path, dict[str, Any]]:
        path = weights_file.find(self.pretrained)
        card = weights_file.read_card(path)
        self._architecture.check_recipe(card, path)
        return path, card

    def build(self, num_classes: int, seed: int, class_names: Sequence[str] | None = None) -> LayeredModel:
        """Return the model with its weights, in evaluation mode on the CPU.

        The pre-trained head is kept if it has `num_classes` outputs, unless the JSON card of a weights file lists class
        names other than `class_names`. Otherwise, the head has random initial values that depend only on `seed` and the
        names of its tensors.

        Raises:
            UserError: The weights are missing or do not fit the model, or the model cannot run block by block.
        """
        self.fingerprint()  # rejects a wrong file before the model is built
        family = self._outline.family
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derived_seed(seed, "backbone"))  # CUDA's generator is not used here
            backbone = self._create()
            kept = self.pretrained == "timm" and backbone.num_classes == num_classes
            if not kept:
                backbone.reset_classifier(num_classes)  # type: ignore[operator]
            if self.pretrained not in ("timm", "none"):
                path, card = self._file()
                same = class_names is None or card.get("class_names", [*class_names]) == [*class_names]
                kept = weights_file.load(backbone, path, family.head_prefix.removeprefix("backbone."), keep_head=same)
            model = family(backbone, *self._normalisation())
            if not kept:
                model.draw_head(seed)
            check_walk(model, model.backbone, self.image_size, self.model, "timm's forward pass")
        return model

    def outlined(self, num_classes: int, class_names: Sequence[str] | None = None) -> LayeredModel:
        """Return the model on torch's meta device, where tensors have shapes but no values.

        `class_names` has no effect, because no shape depends on the names.
        """
        with torch.device("meta"):
            backbone = self._architecture.build()
            backbone.reset_classifier(num_classes)  # type: ignore[operator]
            return self._outline.family(backbone, [0.5] * self.in_chans, [0.5] * self.in_chans)

    def recipe(self, num_classes: int) -> Recipe:
        """Return the call of a timm function that builds this backbone's network."""
        return self._architecture.recipe(num_classes, fetched=self.pretrained == "timm")

    def _create(self) -> nn.Module:
        if self.pretrained == "timm":
            return pretrained_network(self.model, **self._architecture.arguments())
        try:
            return self._architecture.build()
        except ValueError as error:  # the outline was built without memory for tensors
            raise UserError(f"{error}.") from None

    def _normalisation(self) -> tuple[list[float], list[float]]:
        """Return the mean and the standard deviation of each channel.

        Values in the configuration take precedence over values on the JSON card of the weights file. If neither exists,
        timm's values are used.
        """
        card = {} if self.pretrained in ("timm", "none") else self._file()[1]
        found = {}
        for name in ("mean", "std"):
            values = getattr(self, name) or card.get(name, getattr(timm_config(self.model), name))
            if len(values) not in (1, self.in_chans) and self.in_chans != 1:
                raise UserError(
                    f"`backbone.{name}` must be {self.in_chans} numbers, but the weights of {self.model} have "
                    f"{len(values)}: {', '.join(map(str, values))}."
                )
            # A single number applies to all channels. For a single channel, the values of the colours are averaged.
            same = len(values) == self.in_chans
            found[name] = list(values) if same else [sum(values) / len(values)] * self.in_chans
        return found["mean"], found["std"]
