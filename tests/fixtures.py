"""Fixtures for small runs with random weights, so that tests do not depend on the embedded weights."""

import hashlib
import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import fedsweep.common.yaml_values
import fedsweep.federation.build_and_run
import fedsweep.sweep.plan.plan
from fedsweep.common import paths
from fedsweep.common.yaml_values import _parsed, read_yaml
from fedsweep.federation.run_config import RunConfig
from fedsweep.preparation.plan import Options, make_plan
from fedsweep.preparation.prepare import prepare
from fedsweep.results import Store
from fedsweep.sweep.plan.plan import engine_digest
from fedsweep.testing.fixtures import EXPERIMENT, write_clip

NewStore = Callable[[Path], Store]


@pytest.fixture
def untouchable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has a GPU, and fail if its random state is read, which would allocate GPU memory."""

    def touched(device: object) -> None:
        raise AssertionError(f"the random state of GPU {device} is read")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", touched)


@pytest.fixture(scope="session")
def pacs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a data folder with noise images in the layout of PACS, and a random ViT and CLIP for its experiments."""
    folder = tmp_path_factory.mktemp("data")
    root = tmp_path_factory.mktemp("pacs")
    rng = np.random.default_rng(0)
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        for label in ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"):
            (root / domain / label).mkdir(parents=True)
            for number in range(20):
                pixels = rng.integers(256, size=(64, 64, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / domain / label / f"{number}.bmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSWEEP_DATA", str(folder))
        prepare(make_plan(Options("pacs", 64, "domains"), root), workers=1)
        backbone = RunConfig.of(read_yaml(EXPERIMENT.with_stem("fedra_pacs")), "fedra_pacs").backbone
        untrained = backbone.model_copy(update={"pretrained": "none"}).build(num_classes=200, seed=0)
    weights = folder / backbone.pretrained
    weights.parent.mkdir()
    save_file(untrained.backbone.state_dict(), weights)
    card = {"mean": [0.5] * 3, "std": [0.25] * 3, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
    weights.with_suffix(".json").write_text(json.dumps(card))
    write_clip(folder / "backbones" / "tinyimagenet_clip", image_size=64, patch_size=16, width=32)
    return folder


@pytest.fixture(scope="session")
def new_store(tmp_path_factory: pytest.TempPathFactory) -> NewStore:
    """Return a function that copies an empty MLflow database into a results folder, because creating one is slow."""
    from fedsweep.tracking import Destination

    root = tmp_path_factory.mktemp("empty")
    Destination.of(root).client().search_experiments()

    def make(folder: Path) -> Store:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / "mlflow.db", folder)
        return Store(folder)

    return make


@pytest.fixture(scope="session")
def parsed() -> dict[str, Any]:
    """Return an empty cache for parsed YAML texts and for the digest of fedsweep's engine."""
    return {}


@pytest.fixture
def read_once(parsed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse YAML files and hash the engine's files only once, because hundreds of tests need them."""

    def parse(text: str) -> Any:
        if text not in parsed:
            parsed[text] = _parsed(text)
        return deepcopy(parsed[text])

    def digest() -> str:
        if "engine" not in parsed:
            parsed["engine"] = engine_digest()
        return str(parsed["engine"])

    monkeypatch.setattr(fedsweep.common.yaml_values, "_parsed", parse)
    monkeypatch.setattr(fedsweep.sweep.plan.plan, "engine_digest", digest)


@pytest.fixture(scope="module")
def listed() -> dict[tuple[Path, str], dict[str, Path]]:
    """Return an empty cache for the results of `available`, by working directory and kind of file."""
    return {}


@pytest.fixture
def listed_once(listed: dict[tuple[Path, str], dict[str, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Search the folders for YAML files only once per module. The module's tests must not write YAML files."""
    looked = paths.available

    def available(kind: paths.Kind) -> dict[str, Path]:
        if (key := (Path.cwd(), kind)) not in listed:
            listed[key] = looked(kind)
        return dict(listed[key])

    monkeypatch.setattr(paths, "available", available)


@pytest.fixture
def pacs(pacs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use `pacs_folder` as the data folder of a test, and return it."""
    monkeypatch.setenv("FEDSWEEP_DATA", str(pacs_folder))
    return pacs_folder
