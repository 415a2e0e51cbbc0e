"""The files `export.json` and `README.md`, which describe an export: its origin, network and image preprocessing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import Json, read_json
from fedsweep.models.base import Recipe
from fedsweep.results.arms import Arm, arm_label

ACCURACIES = ("accuracy/mean", "accuracy/worst_domain")
CARD, README = "export.json", "README.md"
ADAPTER, WHOLE, BACKBONE, FOLDER = "adapter_model.safetensors", "model.safetensors", "backbone.safetensors", "backbone"


class _Entry(Config):
    what_a_name_is = "an entry of an export's card"
    written_by_hand = False


class ImageCard(_Entry):
    """The preprocessing of images for the exported network."""

    size: int = Field(gt=0, description="height and width, pixels")
    mean: tuple[float, ...] = Field(
        description="mean of each channel for pixels in 0..1; a single number if the network receives greyscale images"
    )
    std: tuple[float, ...]
    crop_pct: float = Field(1.0, gt=0, description="share of the short side that the centre crop keeps")
    crop_mode: Literal["center", "squash"] = "center"
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"


class Origin(_Entry):
    """The origin of an export: its search space or experiment, its sweep, its trial and its client."""

    name: str = Field(description="the search space, or the experiment of a single run")
    sweep: str | None = Field(description="the sweep's id; null for a single run")
    key: str = Field(description="the key of the trial or of the single run, which is the name of its folder")
    arm: Arm
    client: str | None = Field(description="the client whose own model was exported; null for the global model")
    chosen: str = Field(description="the reason for choosing this trial among several; empty if only one matched")
    chosen_by_test: bool | None = Field(
        None, description="whether the trial was chosen by results on test images; null in exports of older versions"
    )


class ExportCard(_Entry):
    """The contents of `export.json`."""

    format: Literal[1] = 1
    fedsweep: str = Field(description="the version of fedsweep that wrote the export")
    form: Literal["peft", "whole"] = Field(description="PEFT's files and a backbone, or all weights in one file")
    folded: bool = Field(False, description="whether the backbone contains changes that the server folded into it")
    backbone: Recipe
    cut: dict[str, int] = Field(
        description="for each shortened list of blocks, the number of first blocks that are kept; empty if all are kept"
    )
    weights: str = Field(description="the fingerprint of the backbone's weights before fine-tuning")
    classes: tuple[str, ...] = Field(min_length=1, description="the class names in the order of the logits")
    prompts: tuple[str, ...] | None = Field(description="the prompt of each class for a CLIP model, else null")
    images: ImageCard
    method: str
    seed: int
    origin: Origin
    outcome: str = Field(description="the outcome of the run, or `running` if it has not ended")
    round: int = Field(ge=0, description="the round after which the model was saved")
    metrics: dict[str, float] = Field(
        description="the metrics of this round; for a client's own model, only those of the client"
    )
    left_out: tuple[str, ...] = Field(description="prefixes of trained tensors that predictions do not use")
    hyperparameters: dict[str, Json] = Field(description="all resolved values by dotted name")
    digests: dict[str, str] = Field(description="the digests of the run's images and weights")
    sha256: dict[str, str] = Field(description="the SHA-256 of every file that contains tensors")

    @property
    def scores(self) -> dict[str, float]:
        """The accuracies that the run measured for the exported model, keyed by metric; empty if there are none."""
        names = [f"accuracy/client/{self.origin.client}"] if self.origin.client else ACCURACIES
        return {name: self.metrics[name] for name in names if name in self.metrics}

    @property
    def what(self) -> str:
        """A description of the exported trial, such as `ablations/lora_rank@ID, trial KEY, client NAME`."""
        sweep = f"@{self.origin.sweep}" if self.origin.sweep else ""
        whose = f", client {self.origin.client}" if self.origin.client else ""
        return f"{self.origin.name}{sweep}, trial {self.origin.key}{whose}"


def read_card(folder: Path) -> ExportCard:
    """Return the contents of an export's `export.json`; raise UserError if the file is missing or invalid."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; `fedsweep export TRIAL --to {folder}` creates it.")
    if not (folder / CARD).is_file():
        raise UserError(
            f"the folder {folder} is not an export, because it has no {CARD}; `fedsweep export TRIAL --to DIR` "
            "creates an export."
        )
    return ExportCard.of(read_json(folder / CARD), str(folder / CARD))


def readme(card: ExportCard) -> str:
    """Return the README of an export as Markdown. Its Python code runs unchanged in the export's folder."""
    recipe = card.backbone
    arguments = [json.dumps(recipe.model)] if recipe.model else []
    arguments += ["pretrained=True"] if recipe.fetched else []
    arguments += [f"{name}={value!r}" for name, value in recipe.arguments.items()]
    checkpoint = json.dumps(recipe.model) if recipe.fetched else f'f"{{folder}}/{recipe.model}"'
    # The output is Markdown, so HTML is not escaped.
    templates = Environment(  # noqa: S701
        loader=PackageLoader("fedsweep.export", ""), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    templates.filters["cell"] = lambda text: " ".join(text.split()).replace("|", "\\|")
    return templates.get_template("README.md.jinja").render(
        card=card,
        label=arm_label,
        names=[card.hyperparameters.get(f"backbone.{one}") for one in ("name", "model")],
        arguments=arguments,
        weights=BACKBONE if card.form == "peft" else WHOLE,
        checkpoint="folder" if recipe.model == "." else checkpoint,
    )
