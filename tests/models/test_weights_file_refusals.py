"""The error messages for weights files that are missing, broken, of another shape or different from their card."""

import hashlib
import json
import os
import pickle
import re
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedsweep.common.errors import UserError
from fedsweep.models.timm.architecture import Architecture
from fedsweep.models.weights_file import read
from tests.models.small import timm_network, tiny_vit

CARD = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refused(config, sentence: str, classes: int = 5) -> None:
    with pytest.raises(UserError) as refusal:
        config.check_weights(classes)
    assert str(refusal.value) == sentence
    assert "\n" not in sentence


def test_the_digests_in_the_config_and_on_the_card_are_checked(weights):
    path = weights(card=CARD)
    tiny_vit(path, sha256=sha256(path)).check_weights(5)
    refused(
        tiny_vit(path, sha256="0" * 64),
        f"`backbone.sha256` is {'0' * 64}, but the SHA-256 of {path} is {sha256(path)}.",
    )
    path.with_suffix(".json").write_text(json.dumps({**CARD, "sha256": "1" * 64}))
    refused(
        tiny_vit(path),
        f"{path} is not the file that its card w.json describes: the SHA-256 of the file is {sha256(path)}.",
    )
    path.with_suffix(".json").write_text(json.dumps({**CARD, "sha256": sha256(path)}))
    tiny_vit(path).check_weights(5)


def test_names_are_looked_up_in_the_working_directory_and_the_data_folder(weights, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSWEEP_HOME", str(tmp_path))
    weights("backbones/w.safetensors")
    (tmp_path / "data").mkdir()
    (tmp_path / "backbones").rename(tmp_path / "data" / "backbones")
    tiny_vit("backbones/w.safetensors").check_weights(5)
    refused(
        tiny_vit("backbones/v.safetensors"),
        f"`backbone.pretrained` backbones/v.safetensors does not exist (looked for {tmp_path}/backbones/v.safetensors "
        f"and {tmp_path}/data/backbones/v.safetensors); run `fedsweep pretrain v` to create it.",
    )
    refused(
        tiny_vit("w.pth"),
        f"`backbone.pretrained` w.pth does not exist (looked for {tmp_path}/w.pth and {tmp_path}/data/w.pth).",
    )
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    refused(tiny_vit("~/w.pth"), f"`backbone.pretrained` ~/w.pth does not exist (looked for {tmp_path}/me/w.pth).")
    refused(
        tiny_vit(tmp_path / "data"),
        f"`backbone.pretrained` {tmp_path}/data is a folder without a model.safetensors "
        f"({tmp_path}/data/model.safetensors).",
    )
    (tmp_path / "notes.txt").write_text("x")
    refused(
        tiny_vit("./notes.txt"), "`backbone.pretrained` ./notes.txt must end in one of .safetensors, .pth, .pt, .bin."
    )


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ({"embed_dim": 96}, "`cls_token` has shape (1, 1, 96) in the file, but (1, 1, 48) in the model"),
        ({"num_blocks": 4}, "the file has `blocks.3.attn.proj.bias` and 11 more, but the model does not"),
        ({"num_blocks": 2}, "the file lacks `blocks.2.attn.proj.bias` and 11 more"),
        (
            {"model": "deit3_small_patch16_224"},
            "`pos_embed` has shape (1, 16, 48) in the file, but (1, 17, 48) in the model",
        ),
        ({"model": "beit_base_patch16_224"}, "the file lacks `blocks.0.attn.qkv.bias` and 5 more"),
    ],
)
def test_weights_of_another_shape_are_an_error(weights, shape, problem):
    path = weights(**shape)
    refused(tiny_vit(path), f"{path} does not fit the model: {problem}.")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda s: s | {"blocks.0.mlp.fc2.weight": s["blocks.0.mlp.fc2.weight"][:, :7].contiguous()},
            "`blocks.0.mlp.fc2.weight` has shape (48, 7) in the file, but (48, 192) in the model",
        ),
        (lambda s: {n: t for n, t in s.items() if n != "norm.bias"}, "the file lacks `norm.bias`"),
        (lambda s: s | {"extra": torch.zeros(1)}, "the file has `extra`, but the model does not"),
        (lambda s: {f"backbone.{n}": t for n, t in s.items()}, "the file lacks `blocks.0.attn.proj.bias` and 41 more"),
        (lambda s: {n: t for n, t in s.items() if n != "head.bias"}, "the file lacks `head.bias`"),
        (lambda s: s | {"head.weight": torch.tensor(1.0)}, "`head.weight` has shape () in the file, but (5, 48) {}"),
        (
            lambda s: s | {"norm.weight": torch.ones(48, dtype=torch.int8)},
            "`norm.weight` has dtype int8 in the file, but float32 {}",
        ),
        (
            lambda s: s | {"head.weight": s["head.weight"][:, :7].contiguous()},
            "`head.weight` has shape (5, 7) in the file, but (5, 48) in the model",
        ),
    ],
)
def test_weights_with_a_wrong_tensor_are_an_error(weights, change, problem):
    path = weights(change=change)
    refused(tiny_vit(path), f"{path} does not fit the model: {problem.format('in the model')}.")


def test_complex_weights_are_an_error(weights):
    path = weights("w.pth", change=lambda s: s | {"norm.weight": torch.ones(48, dtype=torch.complex64)})
    problem = "`norm.weight` has dtype complex64 in the file, but float32 in the model"
    refused(tiny_vit(path), f"{path} does not fit the model: {problem}.")


def test_a_mixers_weights_fit_only_one_image_size(tmp_path):
    shape = {"model": "mixer_b16_224", "num_heads": None}
    save_file(timm_network(tiny_vit(**shape), 5).state_dict(), path := tmp_path / "mixer.safetensors")
    tiny_vit(path, **shape).check_weights(5)
    refused(
        tiny_vit(path, **shape, img_size=64),
        f"{path} does not fit the model: `blocks.0.mlp_tokens.fc1.weight` has shape (24, 16) in the file, "
        "but (24, 64) in the model.",
    )


class Trap:
    """An object whose pickle runs code on loading."""

    def __reduce__(self):
        return os.mkdir, ("sprung",)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("w.safetensors", b"not weights"),
        ("w.safetensors", b""),
        ("w.pth", b"not weights"),
        ("w.pth", b""),
        ("w.pth", pickle.dumps({"a": Trap()})),
    ],
)
def test_a_broken_file_is_an_error_and_its_code_does_not_run(tmp_path, monkeypatch, name, content):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))} cannot be read as weights: [^\n]+\.$"):
        tiny_vit(path).check_weights(5)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("content", [{"a": Trap()}, torch.nn.Linear(2, 2)])
def test_the_error_for_a_pickle_of_other_objects_does_not_advise_to_run_it(tmp_path, content):
    torch.save(content, path := tmp_path / "w.pth")
    why = "it contains objects other than tensors, which fedsweep does not unpickle"
    refused(tiny_vit(path), f"{path} cannot be read as weights: {why}.")


@pytest.mark.parametrize("content", [[torch.zeros(2)], torch.zeros(2)])
def test_a_file_without_named_tensors_is_an_error(tmp_path, content):
    torch.save(content, path := tmp_path / "w.pth")
    refused(tiny_vit(path), f"{path} cannot be read as weights: it does not map names to tensors.")


def test_an_impossible_file_name_is_an_error():
    name = f"./{'x' * 300}.pth"
    refused(tiny_vit(name), f"`backbone.pretrained` {name} cannot be opened: File name too long.")


def test_a_model_that_exceeds_the_memory_is_an_error(monkeypatch):
    config = tiny_vit()

    def too_large(architecture: Architecture) -> None:
        raise ValueError("timm cannot build it in this shape: no memory")

    monkeypatch.setattr(Architecture, "build", too_large)
    with pytest.raises(UserError, match=r"^timm cannot build it in this shape: no memory\.$"):
        config.build(5, seed=0)


def test_a_value_that_is_not_a_tensor_is_an_error(weights):
    path = weights("w.pth", change=lambda state: {**state, "lr": 0.1})
    refused(tiny_vit(path), f"{path} cannot be read as weights: its `lr` is not a tensor.")


@pytest.mark.parametrize(
    ("card", "sentence"),
    [
        (
            "{",
            "{card} cannot be read as a card: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1).",
        ),
        ("[]", "{card} must contain a JSON object, but it contains a value of type list."),
        (
            "[" * 100_000,
            "{card} cannot be read as a card: maximum recursion depth exceeded while decoding a JSON array "
            "from a unicode string.",
        ),
        ('{"mean": 0.5}', "`mean` of the card {card} must be one or three finite numbers, but it is 0.5."),
        ('{"mean": [1, 2]}', "`mean` of the card {card} must be one or three finite numbers, but it is [1, 2]."),
        *(
            (
                f'{{"mean": {values}}}',
                f"`mean` of the card {{card}} must be one or three finite numbers, but it is {said}.",
            )
            for values, said in (
                ("[NaN]", "[nan]"),
                ("[true]", "[True]"),
                ("[-Infinity]", "[-inf]"),
                ("[1e39]", "[1e+39]"),
            )
        ),
        *(
            (
                f'{{"std": {said}}}',
                f"`std` of the card {{card}} must be one or three finite positive numbers, but it is {said}.",
            )
            for said in ("[1, 2, 0]", "[]", "[-1]", "[1e-60]")
        ),
        ('{"std": [NaN]}', "`std` of the card {card} must be one or three finite positive numbers, but it is [nan]."),
        ('{"std": [true]}', "`std` of the card {card} must be one or three finite positive numbers, but it is [True]."),
        ('{"class_names": "ab"}', "`class_names` of the card {card} must be a list of names, but it is ab."),
        ('{"class_names": [1]}', "`class_names` of the card {card} must be a list of names, but it is [1]."),
    ],
)
def test_an_invalid_card_is_an_error(weights, card, sentence):
    path = weights()
    beside = path.with_suffix(".json")
    beside.write_text(card)
    refused(tiny_vit(path), sentence.replace("{card}", str(beside)))


def refused_as_too_large(path: Path, declared: int, times: int) -> None:
    assert path.stat().st_size < 10_000
    with pytest.raises(UserError) as refusal:
        read(path)
    assert str(refusal.value) == (
        f"{path} cannot be read as weights: its tensors must take at most {'twice ' if times == 2 else ''}the size of "
        f"the file, {path.stat().st_size:,} bytes, but they would take {declared:,} bytes."
    )


def test_a_small_file_that_would_expand_to_a_large_tensor_is_rejected(tmp_path):
    """The float16 tensor stores one value, which its stride of 0 repeats; its conversion to float32 takes 0.8 GB."""
    path = tmp_path / "w.pth"
    torch.save({"x": torch.zeros(1, dtype=torch.float16).expand(200_000_000)}, path)
    refused_as_too_large(path, 400_000_000, 2)


def test_a_compressed_torch_file_is_rejected(tmp_path):
    plain, path = tmp_path / "plain.pth", tmp_path / "w.pth"
    torch.save({"x": torch.zeros(1_000_000)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
        declared = sum(entry.file_size for entry in source.infolist())
    refused_as_too_large(path, declared, 1)
    assert read(plain)["x"].shape == (1_000_000,)


def test_tensors_may_share_their_values(tmp_path):
    path, shared = tmp_path / "w.pth", torch.rand(1000)
    torch.save({"x": shared, "tied": shared}, path)
    assert {name: tensor.tolist() for name, tensor in read(path).items()} == dict.fromkeys(
        ("x", "tied"), shared.tolist()
    )
