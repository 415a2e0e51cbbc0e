"""Prediction with an exported model, which is loaded with timm, transformers and PEFT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.paths import inside
from fedsweep.export.card import ADAPTER, BACKBONE, FOLDER, WHOLE, ExportCard, ImageCard, read_card
from fedsweep.models import checkpoint_folder, weights_file
from fedsweep.models.clip import weights as clip
from fedsweep.models.layered import standardize_
from fedsweep.models.lora import with_adapter
from fedsweep.models.timm.architecture import check_name
from fedsweep.models.timm.weights import pretrained_network
from fedsweep.preparation.decode import CorruptImageError, Geometry, decode
from fedsweep.preparation.layouts.disk_listing import BROKEN, IMAGE_SUFFIXES, join, scan

BATCH = 64
Progress = Callable[[int, int], None]  # called with the number of finished images and of all images


@dataclass(frozen=True)
class Loaded:
    """An exported model that has been loaded for prediction, with the contents of its `export.json`."""

    card: ExportCard
    network: Any
    """A timm model, or a CLIPModel of transformers."""
    text: Tensor | None
    """Normalised text features of the prompts of a CLIP model, (classes, projection); None for other models."""

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Return the logits (n, classes) of uint8 images (n, 3, size, size)."""
        mean, std = (torch.tensor(one).view(-1, 1, 1) for one in (self.card.images.mean, self.card.images.std))
        pixels = images.float() / 255
        pixels = standardize_(pixels.mean(1, keepdim=True) if len(mean) == 1 else pixels, mean, std)
        if self.text is None:
            return cast(Tensor, self.network(pixels))
        features = self.network.visual_projection(self.network.vision_model(pixel_values=pixels).pooler_output)
        return F.normalize(features, dim=-1) @ self.text.T * cast(Tensor, self.network.logit_scale.exp())


def load(folder: Path) -> Loaded:
    """Load an export on the CPU; raise UserError if a file is missing, has changed or cannot be loaded."""
    card = read_card(folder)
    for name, digest in card.sha256.items():
        path = inside(folder, name)
        if not path.is_file():
            raise UserError(f"the export {folder} is incomplete: {name} is missing.")
        if weights_file.digest(path) != digest:
            raise UserError(f"{path} has changed since the export: its SHA-256 is {weights_file.digest(path)}.")
    try:
        with torch.random.fork_rng(devices=[]):  # constructors draw initial values that are overwritten
            checkpoint = None if card.backbone.of_timm else _checkpoint(card, folder)
            network = clip.load(checkpoint, card.backbone.model) if checkpoint else _timm(card, folder)
            for name, count in card.cut.items():
                owner, _, attribute = name.rpartition(".")
                setattr(network.get_submodule(owner), attribute, cast(Any, network.get_submodule(name))[:count])
            if card.form == "peft":
                _listed(card, ADAPTER)
                with_adapter(network, folder)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # three libraries raise exceptions of their own
        raise UserError(f"the export {folder} cannot be loaded: {one_line(error)}.") from error
    network.eval()
    return Loaded(card, network, _text(card.prompts, network, checkpoint) if card.prompts and checkpoint else None)


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
            return pretrained_network(recipe.model, **shape)
        network = timm.create_model(recipe.model, **shape)
    timm.models.load_checkpoint(network, str(folder / _listed(card, BACKBONE if card.form == "peft" else WHOLE)))
    return network


def _checkpoint(card: ExportCard, folder: Path) -> Path:
    """Return the folder of the CLIP checkpoint; raise UserError if it is not the checkpoint that was fine-tuned."""
    if card.backbone.fetched:
        where = checkpoint_folder.find(card.backbone.model)
        if card.weights != (found := f"sha256:{checkpoint_folder.digest(where)}"):
            raise UserError(
                f"the checkpoint {card.backbone.model} differs from the one that was fine-tuned: its digest must be "
                f"{card.weights}, but it is {found}."
            )
        return where
    _listed(card, WHOLE if card.form == "whole" else f"{FOLDER}/{WHOLE}")
    return folder if card.form == "whole" else folder / FOLDER


def _listed(card: ExportCard, name: str) -> str:
    """Return `name`, or raise UserError if `export.json` does not list the SHA-256 of the file with this name."""
    if name not in card.sha256:
        raise UserError(f"`sha256` in the export's card must list {name}, but it does not.")
    return name


@torch.no_grad()
def _text(prompts: Sequence[str], network: Any, checkpoint: Path) -> Tensor:
    tokens, ends = clip.Tokenizer(checkpoint)([*prompts])
    mask = (torch.arange(tokens.shape[1]) <= ends[:, None]).long()
    features = network.text_model(input_ids=tokens, attention_mask=mask).pooler_output
    return F.normalize(network.text_projection(features), dim=-1)


@dataclass(frozen=True)
class Guess:
    """A predicted class and its probability."""

    name: str
    probability: float


@dataclass(frozen=True)
class Predictions:
    """The predictions for a folder of images.

    `images` maps the path of each image to its most probable classes. `broken` maps the path of each unreadable image
    to an error message.
    """

    images: dict[str, tuple[Guess, ...]]
    broken: dict[str, str]
    accuracy: float | None
    """The share of correct predictions if each image is in a folder named after its class, else None."""

    def by_class(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of correct predictions and of images of each class, in alphabetical order.

        The dict is empty if the images are not in folders named after their classes.
        """
        found: dict[str, tuple[int, int]] = {}
        for name, guesses in self.images.items() if self.accuracy is not None else ():
            label = name.split("/")[-2]
            correct, images = found.get(label, (0, 0))
            found[label] = correct + (guesses[0].name == label), images + 1
        return dict(sorted(found.items()))


def pictures(folder: Path) -> list[str]:
    """Return the sorted paths of all images in `folder` and its subfolders; raise UserError if there are none."""
    if not folder.is_dir():
        wrong = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"IMAGES must be a folder, but {folder} {wrong}.")
    found = sorted(_below(folder, "", frozenset()))
    if not found:
        raise UserError(f"{folder} contains no image: no file name ends in {', '.join(sorted(IMAGE_SUFFIXES))}.")
    return found


def _below(root: Path, name: str, above: frozenset[Path]) -> Iterator[str]:
    """Yield the paths, relative to `root`, of all images in `root / name` and its subfolders.

    Links are followed unless they lead to a folder in `above`, the folders that are already being searched. Following
    such links would never end.
    """
    folder = (root / name).resolve()
    if folder in above:
        return
    listing = scan(root / name)
    yield from (join(name, one) for one in (*listing.images, *listing.broken))
    for one in listing.folders:
        yield from _below(root, join(name, one), above | {folder})


def predict(
    model: Loaded, folder: Path, names: Sequence[str], top: int = 1, progress: Progress = lambda done, total: None
) -> Predictions:
    """Classify the images `names` in `folder`, and return the `top` most probable classes of each image.

    The function `progress` is called with the number of finished images and the number of all images, before each batch
    of images and at the end.
    """
    images: dict[str, tuple[Guess, ...]] = {}
    broken, classes = dict[str, str](), model.card.classes
    for start in range(0, len(names), BATCH):
        progress(start, len(names))
        pixels = {}
        for name in names[start : start + BATCH]:
            try:
                pixels[name] = _read(folder / name, model.card.images)
            except CorruptImageError as error:
                broken[name] = str(error)
        if pixels:
            logits = model.logits(torch.from_numpy(np.stack(list(pixels.values()))))
            best = logits.double().softmax(1).topk(min(top, len(classes)), dim=1)
            for name, places, values in zip(pixels, best.indices.tolist(), best.values.tolist(), strict=True):
                images[name] = tuple(Guess(classes[one], value) for one, value in zip(places, values, strict=True))
    progress(len(names), len(names))
    return Predictions(images, broken, _accuracy(images, classes))


def _read(path: Path, card: ImageCard) -> np.ndarray:
    """Return an image as uint8 (3, size, size), resized and cropped in the same way as the images of the run."""
    if not path.is_file():
        raise CorruptImageError(BROKEN)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptImageError(error.strerror or "cannot be read") from None
    return decode(data, Geometry(card.size, card.crop_pct, card.crop_mode, card.interpolation))


def _accuracy(images: dict[str, tuple[Guess, ...]], classes: Sequence[str]) -> float | None:
    folders = {name: name.split("/")[-2] if "/" in name else None for name in images}
    if not images or not all(folder in classes for folder in folders.values()):
        return None
    return sum(guesses[0].name == folders[name] for name, guesses in images.items()) / len(images)
