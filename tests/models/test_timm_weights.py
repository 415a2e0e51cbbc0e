"""The pretrained weights of timm from the Hugging Face cache or Hub, and the errors if they are missing."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from fedsweep.common.errors import UserError
from fedsweep.models import TimmBackbone
from fedsweep.models.timm.weights import locate
from fedsweep.testing.compare import identical
from tests.models.small import timm_network

MODEL = "test_vit.r160_in1k"  # a very small model of timm with 6 blocks of width 64 at 160 pixels
HEAD = ("head.weight", "head.bias")


def config(model: str = MODEL, **changes) -> TimmBackbone:
    return TimmBackbone.of({"name": "timm", "model": model, "pretrained": "timm", **changes}, "test")


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """Use an empty Hugging Face cache and no network, and return the cache's folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.fixture
def cached(offline) -> Callable[..., dict[str, torch.Tensor]]:
    """Return a function that writes random weights of a model into the Hugging Face cache and returns them."""

    def put(model: str = MODEL, classes: int = 1000, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
        state = timm_network(config(model), classes).state_dict()
        folder = offline / f"models--timm--{model}"
        commit = "0" * 40
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(commit)
        path = folder / "snapshots" / commit / file
        path.parent.mkdir(parents=True)
        save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
        return dict(state)

    return put


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_weights_in_the_cache_are_loaded_without_network(cached, file):
    expected = cached(file=file)
    model = config().build(1000, seed=0)
    assert identical(
        dict(model.backbone.state_dict()), expected
    )  # the head has the right number of classes, so it is kept
    assert model.mean.flatten().tolist() == model.std.flatten().tolist() == [0.5] * 3


def test_a_head_for_another_number_of_classes_is_replaced(cached):
    expected = cached()
    got, again, other = (dict(config().build(7, seed).backbone.state_dict()) for seed in (0, 0, 1))
    assert identical(got, again)
    assert got["head.weight"].shape == (7, 64)
    assert not torch.equal(got["head.weight"], other["head.weight"])
    for state in (expected, got, other):
        for name in HEAD:
            del state[name]
    assert identical(got, expected)
    assert identical(got, other)


def test_timm_fits_weights_to_another_image_size_patch_size_and_channel(cached):
    from timm.models.vision_transformer import checkpoint_filter_fn

    state = cached()
    small = config(img_size=64, patch_size=8)
    expected = checkpoint_filter_fn(state, timm_network(small, 1000))
    assert identical(dict(small.build(1000, seed=0).backbone.state_dict()), dict(expected))
    grey = config(in_chans=1).build(1000, seed=0).backbone.patch_embed.proj.weight
    torch.testing.assert_close(grey, state["patch_embed.proj.weight"].sum(1, keepdim=True))


def test_invalid_weights_in_the_cache_are_an_error(cached, offline):
    cached()
    file = next(offline.rglob("model.safetensors"))
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(UserError, match=rf"^timm's weights {MODEL} cannot be loaded: Error\(s\) in loading [^\n]+\.$"):
        config().check_weights(5)
    file.write_bytes(b"torn")
    with pytest.raises(UserError, match=rf"^timm's weights {MODEL} cannot be loaded: [^\n]+\.$"):
        config().check_weights(5)


@pytest.mark.usefixtures("offline")
def test_without_cache_and_network_there_is_one_error_message_at_once(caplog):
    caplog.set_level(logging.WARNING)
    backbone = config()
    start = time.monotonic()
    with pytest.raises(UserError) as refusal:
        backbone.build(5, seed=0)
    assert time.monotonic() - start < 5
    said = str(refusal.value)
    what = "are not in the cache and cannot be downloaded (OfflineModeIsEnabled: "
    assert said.startswith(f"timm's weights {MODEL} {what}")
    assert said.endswith(
        "); load them once with network access, or set `backbone.pretrained` to a file that contains them, to a "
        "file that `fedsweep pretrain` wrote, or to none for random weights (on the command line, add "
        "`backbone.pretrained=none`)."
    )
    assert "\n" not in said
    assert not caplog.records


def test_an_unreachable_hub_gets_one_request(offline, monkeypatch):
    asked = []

    def unreachable(url, **_):
        asked.append(url)
        raise ConnectionError("no route to host\nand a traceback")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda **_: pytest.fail("downloaded"))
    with pytest.raises(UserError, match=r"cannot be downloaded \(ConnectionError: no route to host\); load"):
        config().check_weights(5)
    assert len(asked) == 1
    assert asked[0].endswith(f"timm/{MODEL}/resolve/main/model.safetensors")


def test_weights_that_are_not_in_the_cache_are_downloaded_once(cached, offline, monkeypatch):
    expected = cached()
    elsewhere = offline.rename(offline.with_name("elsewhere"))
    downloaded = []

    def missing(url, **_):
        if url.endswith("model.safetensors"):
            raise huggingface_hub.errors.EntryNotFoundError("404")

    def download(*, repo_id, filename, revision):
        downloaded.append((repo_id, filename, revision))
        return str(next(elsewhere.rglob("model.safetensors")))

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, **_: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert identical(dict(config().build(1000, seed=0).backbone.state_dict()), expected)
    assert downloaded == [(f"timm/{MODEL}", "model.safetensors", None)]

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", missing)
    assert locate(MODEL).name == "model.safetensors"
    assert downloaded[1:] == [(f"timm/{MODEL}", "pytorch_model.bin", None)]


@pytest.mark.usefixtures("offline")
def test_a_tag_that_is_not_on_the_hub_is_an_error(monkeypatch):
    def missing(*_, **__):
        raise huggingface_hub.errors.EntryNotFoundError("404")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", missing)
    with pytest.raises(UserError) as refusal:
        locate(MODEL)
    assert str(refusal.value) == (
        f"timm's weights {MODEL} are not on the Hugging Face Hub: timm/{MODEL} has no model.safetensors "
        "or pytorch_model.bin."
    )
