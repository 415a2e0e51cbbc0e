"""Exports of every family of backbones, in several shapes and with several adapters."""

import contextlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.data.data_config import load as load_data
from fedsweep.export.card import ADAPTER, BACKBONE, FOLDER, WHOLE, ExportCard
from fedsweep.export.predict import load
from fedsweep.export.which_trial import Named
from fedsweep.export.write import write
from fedsweep.federation.run_config import RunConfig
from fedsweep.models import DigitsViT, LayeredModel, build_model
from fedsweep.models.weights_file import digest
from fedsweep.results import TrialPlan, TrialRecord, TrialStore
from fedsweep.results.history import RoundRecord
from tests.export.helpers import block, read
from tests.models.small import stirred, timm_network

SMALL = {"name": "timm", "pretrained": "none", "img_size": 16, "embed_dim": 48, "num_blocks": 3, "num_heads": 3}
VIT = {**SMALL, "model": "vit_tiny_patch16_224", "patch_size": 4}
MIXER = {**SMALL, "model": "mixer_s16_224", "patch_size": 4, "num_heads": None}
TAG = "test_vit.r160_in1k"  # a very small model of timm
CASES: dict[str, dict[str, Any]] = {
    "vit": {"backbone": VIT},
    "vit with one channel": {"backbone": {**VIT, "in_chans": 1, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}},
    "adapted patch embedding, one sublayer": {"backbone": VIT, "lora.patch_embed": True, "lora.position": "l0"},
    "scaling instead of alpha, dropout": {"backbone": VIT, "lora": {"rank": 3, "scaling": 0.7, "dropout": 0.5}},
    "frozen factors A": {"backbone": VIT, "aggregation.lora": "freeze_a"},
    "distilled": {"backbone": {**VIT, "model": "deit_tiny_distilled_patch16_224"}},
    "registers": {"backbone": {**VIT, "model": "vit_small_patch14_reg4_dinov2"}},
    "beit": {"backbone": {**SMALL, "model": "beit_base_patch16_224", "patch_size": 4}},
    "eva": {"backbone": {**SMALL, "model": "eva02_tiny_patch14_224", "patch_size": 4, "num_heads": 4}},
    "dinov3": {"backbone": {**SMALL, "model": "vit_small_patch16_dinov3", "patch_size": 4, "num_heads": 4}},
    "mixer": {"backbone": MIXER, "lora.patch_embed": True, "lora.rank": 2},
    "digits_vit": {},
}  # fmt: skip


def images(size: int, count: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def drawn(model: LayeredModel) -> LayeredModel:
    """Set all trainable tensors to random values, so that each of them affects the logits, and return the model."""
    generator = torch.Generator().manual_seed(1)
    model.load_adapter(
        {name: 0.3 * torch.randn(one.shape, generator=generator) for name, one in model.adapter().items()}
    )
    return model.eval()


def written(folder: Path, config: RunConfig, model: LayeredModel, layers: tuple[int, ...]) -> ExportCard:
    plan = TrialPlan(key="k1", number=0, arm={}, seed=0, config=config.model_dump(mode="json"))
    named = Named(TrialStore(folder.parent), TrialRecord(plan, None, ()), "test", None, "")
    scores = {"accuracy/mean": 0.5, "accuracy/worst_domain": 0.25}
    folder.mkdir()
    return write(folder, named, config, model, layers, RoundRecord(4, scores, 1.0), None)


@torch.no_grad()
def check(folder: Path, config: RunConfig, model: LayeredModel, layers: tuple[int, ...]) -> None:
    expected = model(images(config.backbone.image_size), layers)
    assert expected.std() > 0.1
    scale = 1 if model.joins_clients else 100  # CLIP multiplies cosines by 100, and their rounding errors too
    for logits in (load(folder).logits, as_its_readme_says(folder)):
        torch.testing.assert_close(logits(images(config.backbone.image_size)), expected, rtol=1e-5, atol=1e-4 * scale)


def as_its_readme_says(folder: Path) -> Callable[[Tensor], Tensor]:
    names: dict[str, Any] = {}
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from transformers, about a name that peft uses
        exec(block(folder / "README.md"), names)  # noqa: S102
    return names["logits"]


def built(config: RunConfig) -> LayeredModel:
    names = tuple("0123456789")
    freeze = config.aggregation.lora == "freeze_a"
    lora = config.lora if config.method.needs.lora else None
    model = build_model(config.backbone, lora, 10, config.seed, names, freeze)
    stirred(model)  # biases, norms and scales that a fresh network has at 0 and 1
    return drawn(model)


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty Hugging Face cache and no network, and return the cache's folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.fixture
def shaped(tiny: RunConfig) -> RunConfig:
    return tiny.override({"lora.rank": 3, "federation.depths": [3, 2, 1]}, "test")


CUT = ("adapted patch embedding, one sublayer", "registers", "mixer", "digits_vit")
"""Cases that are also exported without their last blocks."""


@pytest.mark.parametrize(("name", "short"), [*((name, False) for name in CASES), *((name, True) for name in CUT)])
def test_an_exported_network_gives_the_same_logits(shaped: RunConfig, tmp_path: Path, name: str, short: bool):
    config = shaped.override(CASES[name], "test")
    model = built(config)
    layers = tuple(range(2 if short else model.num_layers))
    card = written(tmp_path / "out", config, model, layers)
    assert card.cut == ({"blocks": 2} if short else {})
    adapted = {name.split(".")[1] for name in read(tmp_path / "out" / "adapter_config.json")["target_modules"]}
    assert adapted - {"proj"} == set(map(str, layers))  # no block that was removed
    check(tmp_path / "out", config, model, layers)


@pytest.mark.parametrize("method", ["fedra", "ft", "flora"])
def test_a_pinned_tag_replaces_the_weights_file(shaped: RunConfig, tmp_path: Path, offline: Path, method: str):
    backbone = {"name": "timm", "model": TAG, "pretrained": "timm", "img_size": 16, "patch_size": 4}
    config = shaped.override({"backbone": backbone, "method": method}, "test")
    snapshot = offline / f"models--timm--{TAG}" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    save_file(timm_network(config.backbone, 1000).state_dict(), snapshot / "model.safetensors")
    model = build_model(config.backbone, None if method == "ft" else config.lora, 10, 0, tuple("0123456789"))
    if method == "ft":
        model.backbone.requires_grad_(True)
    config.method.prepare(model, {3}, {"plain"}, 0)
    card = written(tmp_path / "out", config, drawn(model), tuple(range(model.num_layers)))
    assert (card.weights, card.backbone.fetched) == (f"timm:{TAG}", method == "fedra")
    assert list(card.sha256) == {"fedra": [ADAPTER], "ft": [WHOLE], "flora": [ADAPTER, BACKBONE]}[method]
    check(tmp_path / "out", config, model, tuple(range(model.num_layers)))
    for path in offline.rglob("*.safetensors"):
        path.unlink()
    if method == "flora":  # the changed backbone is in the folder, so timm's weights are not read
        check(tmp_path / "out", config, model, tuple(range(model.num_layers)))
        assert read(tmp_path / "out" / "adapter_config.json")["base_model_name_or_path"] is None
        assert card.folded
        words = (tmp_path / "out" / "README.md").read_text()
        assert "contains a PEFT adapter, and the backbone with the changes that `flora` folded into it." in words
        assert f"| backbone | timm {TAG}, weights timm:{TAG} with these changes |" in words
    if method == "fedra":
        assert not card.folded
        assert "contains a PEFT adapter for an unmodified backbone." in (tmp_path / "out" / "README.md").read_text()
        assert read(tmp_path / "out" / "adapter_config.json")["base_model_name_or_path"] == TAG
        with pytest.raises(UserError, match=f"timm's weights {TAG} are not in the cache"):
            load(tmp_path / "out")


@pytest.mark.parametrize("method", ["fedra", "ft", "all_small"])
def test_transformers_loads_an_exported_clip(shaped: RunConfig, tmp_path: Path, random_clip: Path, method: str):
    """The image encoder has 12 blocks and the text encoder 4; without the last pair of blocks, 11 and 3 are left."""
    backbone = {"name": "clip", "model": str(random_clip), "prompt": "a {} in ink"}
    config = shaped.override({"backbone": backbone, "method": method, "lora.position": "all"}, "test")
    names = tuple("0123456789")
    model = build_model(config.backbone, None if method == "ft" else config.lora, 10, 0, names)
    if method == "ft":
        model.backbone.requires_grad_(True)
    generator = torch.Generator().manual_seed(1)
    noise = {name: 0.05 * torch.randn(one.shape, generator=generator) for name, one in model.adapter().items()}
    model.load_adapter({name: one + noise[name] for name, one in model.adapter().items()})
    layers = tuple(range(11 if method == "all_small" else 12))
    card = written(tmp_path / "out", config, model.eval(), layers)
    assert card.prompts == tuple(f"a {name} in ink" for name in names)
    cut = {"vision_model.encoder.layers": 11, "text_model.encoder.layers": 3}
    assert card.cut == (cut if method == "all_small" else {})
    assert list(card.sha256) == ([WHOLE] if method == "ft" else [ADAPTER, f"{FOLDER}/{WHOLE}"])
    check(tmp_path / "out", config, model, layers)


def on_the_hub(offline: Path, random_clip: Path) -> Path:
    """Copy a checkpoint to the cache of Hugging Face's hub as `some/clip`, and return the folder."""
    snapshot = offline / "models--some--clip" / "snapshots" / ("0" * 40)
    shutil.copytree(random_clip, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_a_clip_of_the_hub_with_folded_changes_is_copied(
    shaped: RunConfig, tmp_path: Path, random_clip: Path, offline: Path
):
    snapshot = on_the_hub(offline, random_clip)
    changes = {"backbone": {"name": "clip", "model": "some/clip"}, "lora.position": "all", "method": "fedex_lora"}
    config = shaped.override(changes, "test")
    model = build_model(config.backbone, config.lora, 10, 0, tuple("0123456789"))
    config.method.prepare(model, {3}, {"plain"}, 0)
    generator = torch.Generator().manual_seed(1)
    noise = {name: 0.05 * torch.randn(one.shape, generator=generator) for name, one in model.adapter().items()}
    model.load_adapter({name: one + noise[name] for name, one in model.adapter().items()})
    card = written(tmp_path / "out", config, model.eval(), tuple(range(12)))
    assert (card.backbone.model, card.backbone.fetched) == (FOLDER, False)
    assert list(card.sha256) == [ADAPTER, f"{FOLDER}/{WHOLE}"]
    shutil.rmtree(snapshot)
    check(tmp_path / "out", config, model, tuple(range(12)))


def test_a_clip_of_the_hub_is_loaded_by_name_and_must_be_unchanged(
    shaped: RunConfig, tmp_path: Path, random_clip: Path, offline: Path
):
    snapshot = on_the_hub(offline, random_clip)
    config = shaped.override({"backbone": {"name": "clip", "model": "some/clip"}, "lora.position": "mlp"}, "test")
    model = build_model(config.backbone, config.lora, 10, 0, tuple("0123456789"))
    card = written(tmp_path / "out", config, model, tuple(range(12)))
    assert (card.backbone.model, card.backbone.fetched, list(card.sha256)) == ("some/clip", True, [ADAPTER])
    check(tmp_path / "out", config, model, tuple(range(12)))
    normalisation = read(snapshot / "preprocessor_config.json")
    (snapshot / "preprocessor_config.json").write_text(json.dumps({**normalisation, "image_std": [9.0] * 3}))
    with pytest.raises(
        UserError, match=r"^the checkpoint some/clip differs from the one that was fine-tuned: its digest"
    ):
        load(tmp_path / "out")


def test_the_included_backbone_is_timms_smallest_vit_in_another_shape():
    ours, recipe = DigitsViT(), DigitsViT().recipe(10)
    with torch.device("meta"):
        theirs = timm.create_model(recipe.model, **recipe.arguments).state_dict()
        own = ours.architecture().state_dict()
    assert {name: one.shape for name, one in own.items()} == {name: one.shape for name, one in theirs.items()}


@pytest.fixture
def cut_otherwise(pacs: Path) -> Iterator[Path]:
    """Change the crop on the card of PACS during a test, and yield the data folder."""
    path = pacs / "pacs-64" / "card.json"
    before = path.read_bytes()
    path.write_text(json.dumps({**read(path), "crop_pct": 0.9, "crop_mode": "squash", "interpolation": "bilinear"}))
    yield pacs
    path.write_bytes(before)


def test_an_export_contains_the_crop_of_its_data_set(cut_otherwise: Path, tmp_path: Path):
    config = RunConfig.of(read_yaml(find("experiments", "fedra_pacs")), "test")
    model = drawn(build_model(config.backbone, config.lora, 7, 0, load_data(config.data).class_names))
    layers = tuple(range(model.num_layers))
    card = written(tmp_path / "out", config, model, layers)
    assert (card.images.crop_pct, card.images.crop_mode, card.images.interpolation) == (0.9, "squash", "bilinear")
    assert (card.images.size, card.images.mean, card.images.std) == (64, (0.5,) * 3, (0.25,) * 3)
    assert card.weights.startswith(f"sha256:{digest(cut_otherwise / config.backbone.pretrained)}")
    assert list(card.sha256) == [ADAPTER, BACKBONE]
    assert card.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    check(tmp_path / "out", config, model, layers)
