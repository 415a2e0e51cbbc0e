"""Fixtures for small runs with random weights, which take a second and need neither files nor a network."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPModel

import fedsweep.federation.build_and_run
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.federation.build_and_run import build
from fedsweep.federation.rounds import Federation
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.fedag import domain_adapters
from fedsweep.methods.fedms import gate
from fedsweep.models import LayeredModel, build_model
from fedsweep.models.clip import backbone as clip_backbone
from fedsweep.models.timm import digits_vit as vit
from fedsweep.models.weight_cache import Mould, built
from fedsweep.types import Domain, ImageSet

NewFederation = Callable[..., Federation]
PACKAGE = Path(fedsweep.__file__).parent
HOME = next(home for home in (PACKAGE.parent, PACKAGE / "shipped") if (home / "experiments").is_dir())
EXPERIMENT = HOME / "experiments" / "fedra_digits.yaml"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Limit torch to one thread, so that sums have a fixed order and test processes do not compete for cores."""
    torch.set_num_threads(1)


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
def experiment() -> RunConfig:
    """Return the configuration of the shipped experiment `fedra_digits`."""
    return RunConfig.of(read_yaml(EXPERIMENT), EXPERIMENT.name)


@pytest.fixture
def tiny(experiment: RunConfig, random_weights: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Return a small experiment with random weights, three clients and two rounds of two steps on eight images each."""
    monkeypatch.setattr(vit, "WEIGHTS", random_weights)
    small: dict[str, Json] = {
        "federation.rounds": 2,
        "federation.depths": [12, 6, 3],
        "data.domains": ["plain", "inverted", "noisy"],
    }
    few: dict[str, Json] = {
        "local.steps": 2,
        "local.batch_size": 8,
        "data.test_fraction": 0.1,
        "federation.evaluate_every": 1,
    }
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
