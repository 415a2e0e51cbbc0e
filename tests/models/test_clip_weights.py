"""CLIP checkpoints in folders, on the Hugging Face Hub and embedded in fedsweep, and errors for invalid files."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from fedsweep.common.errors import UserError
from fedsweep.data.digits import DigitsData
from fedsweep.models import ClipBackbone, DigitsClip
from fedsweep.models.clip.backbone import SHIPPED
from fedsweep.models.clip.model import LayeredClip
from fedsweep.models.clip.weights import Tokenizer
from tests.models.clips import NAMES, backbone, built, copied, network, noise, write


def refused(act: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        act()
    said = str(refusal.value)
    assert "\n" not in said
    assert said.endswith(".")
    assert said.startswith(sentence)
    if sentence.endswith("."):
        assert said == sentence


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ("config.json", "config.json"),
        ("preprocessor_config.json", "preprocessor_config.json"),
        ("vocab.json", "vocab.json"),
        ("merges.txt", "merges.txt"),
        ("model.safetensors", "model.safetensors or pytorch_model.bin"),
    ],
)
def test_a_folder_that_lacks_a_file_is_an_error(own, gone, named):
    before = backbone(own)
    (own / gone).unlink()
    sentence = f"`backbone.model` {own} is a folder without {named} ({own})."
    for act in (before.fingerprint, lambda: before.check_weights(4), lambda: before.build(4)):
        refused(act, sentence)
    elsewhere = own.rename(own.with_name("elsewhere"))
    refused(lambda: backbone(elsewhere), f"test: {sentence.replace(str(own), str(elsewhere))}")


def test_a_folder_is_found_in_the_data_folder(own, monkeypatch):
    monkeypatch.setenv("FEDSWEEP_DATA", str(own.parent))
    monkeypatch.setenv("FEDSWEEP_HOME", str(own.parent / "home"))
    assert backbone(own.name).fingerprint() == backbone(own).fingerprint()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"model_type": "siglip"}', "`model_type` is siglip."),
        ("{}", "`model_type` is None."),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)."),
        ("[]", "'list' object has no attribute 'get'."),
        (
            '{"model_type": "clip", "vision_config": {"hidden_size": "x"}}',
            "`vision_config.hidden_size` must be a whole number above 0, but it is x.",
        ),
        (
            '{"model_type": "clip", "text_config": {"num_hidden_layers": 0}}',
            "`text_config.num_hidden_layers` must be a whole number above 0, but it is 0.",
        ),
    ],
)
def test_a_config_of_another_model_type_is_an_error(own, content, why):
    (own / "config.json").write_text(content)
    refused(
        lambda: backbone(own), f"test: `backbone.model` {own} is not a CLIP model that transformers can read: {why}"
    )


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0, 0.5])
def test_truncated_weights_are_an_error(tmp_path, weights, kept):
    folder = write(tmp_path / "clip", network(), weights)
    content = (folder / weights).read_bytes()
    (folder / weights).write_bytes(content[: int(kept * len(content))])
    refused(lambda: built(folder), f"`backbone.model` {folder} cannot be loaded: ")


class Trap:
    """An object whose pickle runs code on loading."""

    def __reduce__(self):
        return os.mkdir, ("sprung",)


def test_code_in_a_pickle_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "clip", network(), "pytorch_model.bin")
    torch.save({"a": Trap()}, folder / "pytorch_model.bin")
    refused(lambda: built(folder), f"`backbone.model` {folder} cannot be loaded: ")
    assert not (tmp_path / "sprung").exists()


LACKING = "text_model.encoder.layers.1.mlp.fc1.bias"


def test_the_error_for_a_missing_tensor_names_it(own):
    state = load_file(own / "model.safetensors")
    del state[LACKING]
    save_file(state, own / "model.safetensors", metadata={"format": "pt"})
    refused(
        lambda: built(own),
        f"`backbone.model` {own} lacks tensors of a CLIP model or has them in another shape: {LACKING}.",
    )


def test_a_tensor_of_another_shape_is_an_error(own):
    state = load_file(own / "model.safetensors")
    state[LACKING] = torch.zeros(3)
    save_file(state, own / "model.safetensors", metadata={"format": "pt"})
    refused(lambda: built(own), f"`backbone.model` {own} ")


def test_weights_with_nan_are_an_error(own):
    state = load_file(own / "model.safetensors")
    state[LACKING] = torch.full_like(state[LACKING], float("nan"))
    save_file(state, own / "model.safetensors", metadata={"format": "pt"})
    refused(lambda: built(own), f"the weights of `backbone.model` {own} give logits that are not finite numbers.")


@pytest.mark.parametrize(("name", "content"), [("vocab.json", "{"), ("vocab.json", "[]"), ("merges.txt", "xx")])
def test_a_broken_tokenizer_is_an_error(own, name, content):
    (own / name).write_text(content)
    refused(lambda: built(own), f"the tokenizer in {own} cannot be read: ")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"image_mean": [0.5, 0.5], "image_std": [0.5, 0.5]}',
        '{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.0, 0.5]}',
        '{"image_mean": ["a", "b", "c"], "image_std": [0.5, 0.5, 0.5]}',
    ],
)
def test_an_invalid_normalisation_is_an_error(own, content):
    (own / "preprocessor_config.json").write_text(content)
    refused(lambda: built(own), f"`backbone.model` {own} ")


def test_a_build_compares_its_walk_with_transformers(checkpoint, monkeypatch):
    monkeypatch.setattr(LayeredClip, "block", lambda model, layer, tokens: 2 * model._run("vision", layer, tokens))
    refused(
        lambda: built(checkpoint()),
        f"`backbone.model` {checkpoint()} cannot be used: run block by block, it returns other logits than "
        "transformers.",
    )


@pytest.mark.parametrize(
    "prompt",
    [
        "a picture",
        "{} or {}",
        "{name}",
        "{} of {name}",
        "{{}}",
        "{0}",
        "",
        "a } of {}",
    ],
)
@pytest.mark.parametrize("name", ["clip", "digits_clip"])
def test_a_prompt_without_exactly_one_place_for_the_name_is_an_error(name, prompt):
    kind, model = (ClipBackbone, {"model": "openai/clip-vit-base-patch16"}) if name == "clip" else (DigitsClip, {})

    def ask() -> None:
        config = kind.of({"name": name, "prompt": prompt, **model}, "run")
        config.prompt.format("dog")

    refused(ask, f"run: `backbone.prompt` must contain {{}} once, for the class name, but it is `{prompt}`.")


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """Use an empty Hugging Face cache and no network, and return the cache's folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("model", ["nobody/nothing", "nothing"])
def test_an_unknown_name_without_network_is_an_error(model):
    refused(
        lambda: backbone(model),
        f"test: `backbone.model` {model} is neither a folder nor in Hugging Face's cache and cannot be "
        "downloaded (Offline",
    )


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("model", ["./nothing", "a/b/c", "a b"])
def test_an_invalid_name_for_the_hub_is_an_error(model):
    refused(
        lambda: backbone(model),
        f"test: `backbone.model` {model} is neither a folder nor a valid name on the Hugging Face Hub.",
    )


@pytest.mark.usefixtures("offline")
def test_a_known_name_can_be_planned_without_network_but_not_loaded():
    config = backbone("openai/clip-vit-base-patch16")
    assert config.depth == 12
    for act in (config.fingerprint, lambda: config.check_weights(4), lambda: config.build(4)):
        refused(
            act,
            "`backbone.model` openai/clip-vit-base-patch16 is neither a folder nor in Hugging Face's cache and cannot "
            "be downloaded (OfflineModeIsEnabled: ",
        )


def cached(hub: Path, model: str, folder: Path) -> Path:
    """Copy a checkpoint into the Hugging Face cache `hub` in the layout of the cache, and return its new folder."""
    commit = "0" * 40
    place = hub / f"models--{model.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(folder, place / "snapshots" / commit))


def test_a_checkpoint_in_the_cache_is_used_without_network(checkpoint, offline):
    cached(offline, "somebody/tiny-clip", checkpoint())
    config = backbone("somebody/tiny-clip")
    assert config.fingerprint() == backbone(checkpoint()).fingerprint()
    with torch.no_grad():
        assert torch.equal(config.build(4, class_names=NAMES)(noise()), copied(checkpoint())(noise()))


@pytest.fixture
def hub(checkpoint, tmp_path, monkeypatch) -> Callable[[Path], list[Any]]:
    """Return a function that puts one checkpoint in place of the Hugging Face Hub and returns a list of requests."""

    def serve(folder: Path) -> list[Any]:
        asked: list[Any] = []

        def snapshot(model: str, allow_patterns: Sequence[str], local_files_only: bool = False) -> str:
            if local_files_only:
                raise LocalEntryNotFoundError("not there")
            asked.append(list(allow_patterns))
            here = shutil.copytree(folder, tmp_path / model / str(len(asked)))
            for one in here.iterdir():
                if one.name not in allow_patterns:
                    one.unlink()
            return str(here)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, **_: asked.append(url))
        return asked

    return serve


def test_a_name_is_downloaded_with_safetensors_or_else_with_a_pickle(checkpoint, tmp_path, hub):
    asked = hub(checkpoint())
    config = backbone("somebody/one")
    assert asked[0].endswith("somebody/one/resolve/main/config.json")
    assert len(asked) == 2
    assert "model.safetensors" in asked[1]
    assert "pytorch_model.bin" not in asked[1]
    with torch.no_grad():
        expected = copied(checkpoint())(noise())
        assert torch.equal(config.build(4, class_names=NAMES)(noise()), expected)
    asked = hub(write(tmp_path / "pickled", network(), "pytorch_model.bin"))
    with torch.no_grad():
        assert torch.equal(backbone("somebody/two").build(4, class_names=NAMES)(noise()), expected)
    assert "pytorch_model.bin" in asked[2]


def test_an_unreachable_hub_gets_one_request(hub, checkpoint, monkeypatch):
    asked = hub(checkpoint())

    def unreachable(url: str, **_: Any) -> None:
        asked.append(url)
        raise ConnectionError("no route to host\nand a traceback")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    refused(
        lambda: backbone("somebody/three"),
        "test: `backbone.model` somebody/three is neither a folder nor in Hugging Face's cache and cannot be "
        "downloaded (ConnectionError: no route to host and a traceback); load it once with network access.",
    )
    assert len(asked) == 1


def test_an_incomplete_checkpoint_in_the_cache_is_completed(checkpoint, offline, monkeypatch):
    """transformers leaves such a folder after it has loaded the model but not the tokenizer."""
    part = cached(offline, "somebody/part", checkpoint())
    for name in ("vocab.json", "merges.txt", "preprocessor_config.json"):
        (part / name).unlink()
    refused(
        lambda: backbone("somebody/part"),
        "test: `backbone.model` somebody/part is neither a folder nor in Hugging Face's cache and cannot be "
        "downloaded ",
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", None),
        ("preprocessor_config.json", ('"image_std": [0.4', '"image_std": [0.41')),
        ("preprocessor_config.json", ('"image_mean": [0.1', '"image_mean": [0.11')),
        ("config.json", ("quick_gelu", "gelu")),
        ("vocab.json", ('"!": 0', '"!!": 0')),
        ("merges.txt", ("t h\n", "h t\n")),
        ("tokenizer.json", "new"),
        ("tokenizer_config.json", "new"),
    ],
)
def test_a_fingerprint_covers_weights_shape_tokens_and_normalisation(own, name, change):
    (own / "README.md").write_text("one")
    first = backbone(own).fingerprint()
    (own / "README.md").write_text("two")
    assert backbone(own).fingerprint() == first
    assert first.startswith("sha256:")
    if change is None:
        save_file(dict(network(seed=1).state_dict()), own / name, metadata={"format": "pt"})
    elif change == "new":
        tokens = Tokenizer(own)(["0", "1"])[0]
        other_tokens(own, name)
        assert not torch.equal(Tokenizer(own.rename(own.with_name("moved")))(["0", "1"])[0], tokens)
        own.with_name("moved").rename(own)
    else:
        content = (own / name).read_text()
        assert change[0] in content
        (own / name).write_text(content.replace(*change))
    assert backbone(own).fingerprint() != first


def other_tokens(folder: Path, name: str) -> None:
    """Write the tokenizer file `name`, which transformers reads besides or instead of vocab.json and merges.txt."""
    from transformers import CLIPTokenizer

    if name == "tokenizer_config.json":
        (folder / name).write_text(json.dumps({"bos_token": "!"}))
        return
    CLIPTokenizer.from_pretrained(folder).save_pretrained(folder / "saved")
    said = json.loads((folder / "saved" / name).read_text())
    vocabulary = said["model"]["vocab"]
    vocabulary["0</w>"], vocabulary["1</w>"] = vocabulary["1</w>"], vocabulary["0</w>"]
    (folder / name).write_text(json.dumps(said))
    shutil.rmtree(folder / "saved")


ENCODERS = {"base": "digits_clip", "patch8": "digits_clip_patch8", "large": "digits_clip_large"}


def test_all_included_encoders_match_their_cards_and_are_small():
    folders = [one for one in SHIPPED.iterdir() if one.is_dir()]
    assert sorted(one.name for one in folders) == sorted(ENCODERS.values())
    files = [one for folder in folders for one in folder.rglob("*") if one.is_file()]
    assert len(files) == 3 * 7
    assert sum(one.stat().st_size for one in files) < 5_300_000


@pytest.mark.parametrize(("encoder", "folder"), ENCODERS.items())
def test_an_included_encoder_has_a_card_and_classifies_digits_by_their_names(encoder, folder):
    config = DigitsClip.of({"name": "digits_clip", "encoder": encoder}, "test")
    card = json.loads((SHIPPED / folder / "card.json").read_text())
    content = (SHIPPED / folder / "model.safetensors").read_bytes()
    assert card["sha256"] == hashlib.sha256(content).hexdigest()
    data = DigitsData(domains=("plain",)).load()
    model, (domain,) = config.build(10, class_names=data.class_names), data.domains
    assert (model.num_layers, config.image_size) == (config.depth, 16)
    with torch.no_grad():
        right = model(domain.test.images).argmax(1) == domain.test.labels
    assert len(right) == 359
    assert right.double().mean() > 0.8
