"""The card beside a weights file: what is believed of it, and what of it must agree with the experiment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedsweep.errors import UserError
from fedsweep.models.architecture import Architecture
from fedsweep.models.weights_file import digest

LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


def read_card(path: Path) -> dict[str, Any]:
    """What the JSON file beside the weights (`NAME.json` for `NAME.safetensors`) says of them; empty without one.

    Raises:
        UserError: it cannot be read, its `mean` or `std` is not one or three numbers, its `class_names` are no names,
            or its `sha256` is of other weights.
    """
    beside = path.with_suffix(".json")
    if not beside.is_file():
        return {}
    try:
        said = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{beside} is not a card that can be read: {error}.") from None
    if not isinstance(said, dict):
        raise UserError(f"{beside} must hold names and values, but it holds {type(said).__name__}.")
    if "sha256" in said and said["sha256"] != digest(path):
        raise UserError(f"{path} is not the file that its card {beside.name} describes: its sha256 is {digest(path)}.")
    for name, least, kind in (("mean", -LARGEST, "finite numbers"), ("std", SMALLEST, "finite positive numbers")):
        values = said.get(name, [0.5])
        if not isinstance(values, list) or len(values) not in (1, 3) or not all(_between(one, least) for one in values):
            raise UserError(f"`{name}` of the card {beside} must be one or three {kind}, but it is {values}.")
    names = said.get("class_names", [])
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise UserError(f"`class_names` of the card {beside} must be a list of names, but it is {names}.")
    return said


def _between(value: object, least: float) -> bool:
    """Whether a value is a number from `least` to what float32 holds; JSON's NaN is not, and true is no number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= LARGEST


def check_recipe(said: Mapping[str, Any], path: Path, asked: Architecture) -> None:
    """Refuse weights that were trained as another function: their tensors may have the same names and shapes.

    What null stands for is compared, not null. Cards of other origin, without a recipe of a timm model, pass.

    Raises:
        UserError: model, heads, sizes or channels differ, or the recipe's model cannot be built.
    """
    recipe = said.get("recipe")
    backbone = recipe.get("backbone") if isinstance(recipe, dict) else None
    if not isinstance(backbone, dict) or backbone.get("name") != "timm":
        return
    try:
        trained = _architecture(backbone)
        pairs: list[tuple[str, object, object]] = [("model", trained.name, asked.name)]
        if trained.name == asked.name:  # else the recipe's model need not even be known to this timm
            now = asked.facts()
            pairs = [(field, value, now[field]) for field, value in trained.facts().items()]
    except ValueError as error:
        raise UserError(f"`recipe.backbone` of the card {path.with_suffix('.json')} cannot be: {error}.") from None
    for field, was, now_is in pairs:
        if was != now_is:
            raise UserError(
                f"`backbone.{field}` is {now_is}, but the weights {path} were trained with {was}, as their card says."
            )


def _architecture(backbone: Mapping[str, Any]) -> Architecture:
    """The model of a recipe.

    Raises:
        ValueError: a value is of another kind.
    """
    sizes = {
        field: backbone.get(field, 3 if field == "in_chans" else None)
        for field in ("in_chans", "img_size", "patch_size", "embed_dim", "num_blocks", "num_heads")
    }
    for field, value in sizes.items():
        if type(value) is not int and not (value is None and field != "in_chans"):
            raise ValueError(f"its `{field}` is {value}")
    if not isinstance(model := backbone.get("model"), str):
        raise ValueError(f"its `model` is {model}")
    return Architecture(model, **sizes)
