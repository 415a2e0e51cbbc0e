"""An export as a network again: by timm, transformers and PEFT, as its README says it to those without fedsweep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.paths import inside
from fedsweep.export.card import ADAPTER, BACKBONE, FOLDER, WHOLE, ExportCard, read_card
from fedsweep.models import checkpoint_folder, weights_file
from fedsweep.models.clip import weights as clip_checkpoint
from fedsweep.models.layered import standardize_
from fedsweep.models.lora import with_adapter
from fedsweep.models.timm import weights as timm_weights
from fedsweep.models.timm.architecture import check_name


@dataclass(frozen=True)
class Loaded:
    """An export that classifies images."""

    card: ExportCard
    network: Any
    """timm's, or transformers' CLIPModel."""
    text: Tensor | None
    """Unit vectors (classes, projection) of a CLIP's prompts."""

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of uint8 images (n, 3, size, size)."""
        mean, std = (torch.tensor(one).view(-1, 1, 1) for one in (self.card.images.mean, self.card.images.std))
        pixels = images.float() / 255
        pixels = standardize_(pixels.mean(1, keepdim=True) if len(mean) == 1 else pixels, mean, std)
        if self.text is None:
            found: Tensor = self.network(pixels)
            return found
        seen = self.network.visual_projection(self.network.vision_model(pixel_values=pixels).pooler_output)
        found = F.normalize(seen, dim=-1) @ self.text.T * self.network.logit_scale.exp()
        return found


def load(folder: Path) -> Loaded:
    """Build the network on the CPU, in evaluation mode.

    Raises:
        UserError: the folder is no export, a file of it is missing or is another one, or the backbone cannot be had.
    """
    card = read_card(folder)
    for name, digest in card.sha256.items():
        path = inside(folder, name)
        if not path.is_file():
            raise UserError(f"{folder} is not whole: {name} is missing.")
        if weights_file.digest(path) != digest:
            raise UserError(f"{path} is not the file that was exported: its sha256 is {weights_file.digest(path)}.")
    try:
        with torch.random.fork_rng(devices=[]):  # constructors draw values that are overwritten at once
            network = _timm(card, folder) if card.backbone.of_timm else _clip(card, folder)
            for name, count in card.cut.items():
                owner, _, attribute = name.rpartition(".")
                setattr(network.get_submodule(owner), attribute, cast(Any, network.get_submodule(name))[:count])
            if card.form == "peft":
                _listed(card, ADAPTER)
                with_adapter(network, folder)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # each of three libraries has its own
        raise UserError(f"{folder} cannot be loaded: {one_line(error)}.") from error
    network.eval()
    return Loaded(card, network, None if card.prompts is None else _text(card, network, _checkpoint(card, folder)))


def _timm(card: ExportCard, folder: Path) -> nn.Module:
    import timm

    recipe, shape = card.backbone, cast(Any, card.backbone.arguments)
    if recipe.call == "timm.models.MlpMixer":
        network: nn.Module = timm.models.MlpMixer(**shape)
    else:
        try:
            check_name(recipe.model)
        except ValueError as error:
            raise UserError(f"{error}.") from None
        if recipe.fetched:
            return timm_weights.create(recipe.model, **shape)
        network = timm.create_model(recipe.model, **shape)
    name = BACKBONE if card.form == "peft" else WHOLE
    timm.models.load_checkpoint(network, str(folder / _listed(card, name)))
    return network


def _clip(card: ExportCard, folder: Path) -> nn.Module:
    where = _checkpoint(card, folder)
    if card.backbone.fetched and card.weights != (found := f"sha256:{checkpoint_folder.digest(where)}"):
        raise UserError(f"{card.backbone.model} is another checkpoint than the one tuned, {card.weights}: {found}.")
    network: nn.Module = clip_checkpoint.load(where, card.backbone.model)
    return network


def _checkpoint(card: ExportCard, folder: Path) -> Path:
    """Where a CLIP's config, tokens and, but for tuned ones, weights lie."""
    if card.backbone.fetched:
        return checkpoint_folder.find(card.backbone.model)
    _listed(card, WHOLE if card.form == "whole" else f"{FOLDER}/{WHOLE}")
    return folder if card.form == "whole" else folder / FOLDER


def _listed(card: ExportCard, name: str) -> str:
    """A file whose content the card pins: nothing else is read.

    Raises:
        UserError: it does not.
    """
    if name not in card.sha256:
        raise UserError(f"the export's card must pin {name} by its `sha256`, but it does not.")
    return name


@torch.no_grad()
def _text(card: ExportCard, network: Any, checkpoint: Path) -> Tensor:
    """The prompts' place among images, through the tuned text encoder."""
    tokens, ends = clip_checkpoint.Tokenizer(checkpoint)(list(card.prompts or ()))
    mask = (torch.arange(tokens.shape[1]) <= ends[:, None]).long()
    seen = network.text_model(input_ids=tokens, attention_mask=mask).pooler_output
    return F.normalize(network.text_projection(seen), dim=-1)
