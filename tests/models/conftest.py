"""Fixtures with weights files and checkpoints."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.clips import network, write
from tests.models.small import timm_network, tiny_vit


@cache
def _state(classes: int, seed: int, **shape: Any) -> dict[str, Tensor]:
    return dict(timm_network(tiny_vit(**shape), classes, seed).state_dict())


@pytest.fixture
def weights(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes random weights, as in `weights("w.safetensors", classes=5, card={...})`."""

    def write(
        name: str = "w.safetensors",
        classes: int = 5,
        card: dict[str, Any] | None = None,
        change: Callable[[dict[str, Tensor]], dict[str, Any]] = lambda state: state,
        seed: int = 1,
        **shape: Any,
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        state = change({name: one.clone() for name, one in _state(classes, seed, **shape).items()})
        save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
        if card is not None:
            path.with_suffix(".json").write_text(json.dumps(card))
        return path

    return write


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """Return a function that writes a CLIP checkpoint once and returns its folder, which tests must not change."""

    @cache
    def written(vision: int = 3, text: int = 3) -> Path:
        return write(tmp_path_factory.mktemp("clip"), network(vision, text))

    return written


@pytest.fixture
def own(checkpoint, tmp_path) -> Path:
    """Return the folder of a checkpoint that the test may change."""
    return Path(shutil.copytree(checkpoint(), tmp_path / "clip"))
