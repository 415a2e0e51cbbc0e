"""Fixtures for small runs with random weights, so that tests do not depend on the embedded weights."""

import hashlib
import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPModel

import fedsweep.common.yaml_values
import fedsweep.federation.build_and_run
import fedsweep.sweep.plan.plan
from fedsweep.common import paths
from fedsweep.common.yaml_values import Json, _parsed, read_yaml
from fedsweep.federation.build_and_run import build
from fedsweep.federation.rounds import Federation
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.fedag import domain_adapters
from fedsweep.methods.fedms import gate
from fedsweep.models import LayeredModel, build_model
from fedsweep.models.clip import backbone as clip_backbone
from fedsweep.models.timm import digits_vit as vit
from fedsweep.models.weight_cache import Mould, built
from fedsweep.preparation.plan import Options, make_plan
from fedsweep.preparation.prepare import prepare
from fedsweep.results import Store
from fedsweep.sweep.plan.plan import engine_digest
from fedsweep.types import Domain, ImageSet

NewStore = Callable[[Path], Store]
EXPERIMENT = Path(__file__).parents[1] / "experiments" / "fedra_digits.yaml"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Limit torch to one thread, so that sums have a fixed order and test processes do not compete for cores."""
    torch.set_num_threads(1)


@pytest.fixture
def untouchable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has a GPU, and fail if its random state is read, which would allocate GPU memory."""

    def touched(device: object) -> None:
        raise AssertionError(f"the random state of GPU {device} is read")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", touched)


@pytest.fixture(scope="session")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a weights file and its card like `fedsweep pretrain digits_vit`, but with untrained weights.

    The random values are large enough for every block to change the logits visibly.
    """
    path = tmp_path_factory.mktemp("weights") / "digits_vit.safetensors"
    generator = torch.Generator().manual_seed(7)
    with torch.random.fork_rng(devices=[]):
        shapes = {name: tensor.shape for name, tensor in vit.DigitsViT().architecture().state_dict().items()}
    weights = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights = {name: tensor + 1 if "norm" in name and "weight" in name else tensor for name, tensor in weights.items()}
    save_file({name: tensor.half() for name, tensor in weights.items()}, path)
    card = {"mean": [0.5] * 3, "std": [0.5] * 3, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    path.with_suffix(".json").write_text(json.dumps(card))
    return path


@pytest.fixture(scope="session")
def random_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an untrained CLIP checkpoint with 12 narrow image blocks and 4 text blocks; return its folder."""
    folder = tmp_path_factory.mktemp("clip")
    write_clip(folder, image_size=16, patch_size=4)
    return folder


def write_clip(folder: Path, image_size: int, patch_size: int, width: int = 16) -> None:
    """Write a CLIP checkpoint with random weights; the sizes are in pixels, and `width` is the number of features."""
    tokens = clip_backbone.SHIPPED / "digits_clip"
    folder.mkdir(exist_ok=True)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "preprocessor_config.json"):
        (folder / name).write_bytes((tokens / name).read_bytes())
    config = json.loads((tokens / "config.json").read_text())
    for encoder, blocks in (("vision_config", 12), ("text_config", 4)):
        narrow = {"hidden_size": width, "intermediate_size": 2 * width, "projection_dim": width}
        config[encoder] |= narrow | {"num_hidden_layers": blocks}
    config["vision_config"] |= {"image_size": image_size, "patch_size": patch_size}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        clip = CLIPModel(CLIPConfig(**config | {"projection_dim": width}))
    for parameter in clip.parameters():
        parameter.data.mul_(3)  # every block changes the logits visibly
    clip.save_pretrained(folder)


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


@pytest.fixture(scope="session")
def experiment() -> RunConfig:
    """Return the configuration of the shipped experiment `fedra_digits`."""
    return RunConfig.of(read_yaml(EXPERIMENT), EXPERIMENT.name)


@pytest.fixture
def tiny(experiment: RunConfig, random_weights: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Return a small experiment with random weights, three clients and two rounds of two steps on eight images each."""
    monkeypatch.setattr(vit, "WEIGHTS", random_weights)
    small = {"federation.rounds": 2, "federation.depths": [12, 6, 3], "data.domains": ["plain", "inverted", "noisy"]}
    few = {"local.steps": 2, "local.batch_size": 8, "data.test_fraction": 0.1, "federation.evaluate_every": 1}
    return experiment.override({**small, **few}, "tiny")


@pytest.fixture(scope="session")
def built_models() -> dict[tuple[Any, ...], Mould[Any]]:
    """Return an empty cache of models with adapters by configuration, because inserting adapters is slow."""
    return {}


@pytest.fixture
def federation(
    tiny: RunConfig, built_models: dict[tuple[Any, ...], Mould[Any]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Federation]:
    """Return a function that builds a federation, as in `federation({"method": "all_small"})`.

    Clients have different numbers of images, so that weights by images differ from uniform weights.
    """

    def copy_of_built(*key: Any) -> LayeredModel:
        if key not in built_models:
            built_models[key] = Mould(build_model(*key))
        model: LayeredModel = built_models[key].cast()
        return model

    def copy_of_network(*key: Any) -> Any:
        if key not in built_models:
            built_models[key] = Mould(built(*key))
        return built_models[key].cast()

    monkeypatch.setattr(fedsweep.federation.build_and_run, "build_model", copy_of_built)
    for user in (domain_adapters, gate):
        monkeypatch.setattr(user, "built", copy_of_network)

    def make(changes: dict[str, Json] | None = None, train: int = 40, test: int = 10) -> Federation:
        whole = build(tiny.override(changes or {}, "test"))

        def few(part: ImageSet, count: int) -> ImageSet:
            return part.select(torch.arange(min(count, len(part))))

        clients = [
            replace(client, train=few(client.train, train - 5 * place)) for place, client in enumerate(whole.clients)
        ]
        domains = [
            Domain(one.name, few(one.train, train), few(one.test, test), one.validation and few(one.validation, test))
            for one in whole.domains
        ]
        proxy = {name: few(images, 10) for name, images in whole.server.proxy.items()}
        return replace(whole, clients=clients, domains=domains, server=replace(whole.server, proxy=proxy))

    return make
