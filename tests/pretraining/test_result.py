"""The weights file and its card, from which `fedsweep.models` builds an equal network."""

import hashlib
import json

import torch
from safetensors.torch import load_file

from fedsweep.models import TimmBackbone
from fedsweep.pretraining.config import PretrainConfig
from fedsweep.pretraining.loop import default_out, validate, write_result
from fedsweep.pretraining.network import build_network
from tests.pretraining.conftest import CLASSES, Run


def test_loaded_weights_give_the_same_logits(toy, play: Run):
    changes = {"weights": "float32", "ema_decay": None, "epochs": 1, "backbone.mean": [0.1, 0.2, 0.3]}
    session, records = play(changes)
    trained = build_network(session.config, CLASSES)
    tensors = load_file(session.checkpoint)
    trained.load_state_dict(
        {name.removeprefix("network/"): one for name, one in tensors.items() if name.startswith("network/")}
    )
    card = write_result(session, "toy", default_out("toy"))
    shape = toy.backbone.model_dump() | {"pretrained": "backbones/toy.safetensors", "mean": None, "std": None}
    model = TimmBackbone(**shape).build(CLASSES, seed=5)
    images, _ = session.data.validation.take(torch.arange(20))
    trained.eval()
    with torch.inference_mode():
        assert torch.equal(model(images), trained(images.float() / 255))
    assert card["validation_accuracy"] == round(records[-1].accuracy, 4)
    torch.testing.assert_close(model.mean.flatten(), torch.tensor([0.1, 0.2, 0.3]))


def test_the_averaged_weights_are_written(play: Run):
    session, _ = play({"epochs": 1})
    tensors = load_file(session.checkpoint)
    write_result(session, "toy", default_out("toy"))
    written = load_file(default_out("toy"))
    assert len(written) > 20
    for name, tensor in written.items():
        assert tensor.dtype == torch.float16
        assert torch.equal(tensor, tensors[f"average/backbone.{name}"].half())
    assert any(
        not torch.equal(tensors[f"average/backbone.{name}"], tensors[f"network/backbone.{name}"]) for name in written
    )


def test_the_card_describes_the_training(toy, play: Run):
    session, records = play()
    returned = write_result(session, "toy", default_out("toy"))
    path = default_out("toy")
    card = json.loads(path.with_suffix(".json").read_text())
    assert card == returned
    assert card["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert PretrainConfig.of(card["recipe"], "card") == toy
    assert card["data_digest"] == toy.data.load().digest
    assert card["class_names"] == list(session.data.class_names) == ["0", "1", "2"]
    assert card["images"] == len(session.data.train)
    assert card["parameters"] == sum(tensor.numel() for tensor in load_file(path).values())
    assert (card["mean"], card["std"]) == ([0.5] * 3, [0.25] * 3)
    assert set(card["versions"]) == {"torch", "timm"}
    assert abs(card["validation_accuracy"] - records[-1].accuracy) < 0.05  # the written weights are rounded to float16
    assert "toy (plain)" in card["origin"]
    assert "vit_tiny_patch16_224" in card["what"]


def test_writing_again_gives_the_same_file(play: Run):
    files = []
    for name in ("one", "two"):
        session, _ = play({"epochs": 1}, name=name)
        write_result(session, name, default_out(name))
        files.append(default_out(name).read_bytes())
    assert files[0] == files[1]


def test_validation_counts_every_image_once(play: Run, monkeypatch):
    session, _ = play({"epochs": 1, "ema_decay": None})
    network = build_network(session.config, CLASSES)
    monkeypatch.setattr("fedsweep.pretraining.loop.VALIDATION_BATCH", 7)
    accuracy, loss = validate(session, network)
    images, labels = session.data.validation.images, session.data.validation.labels
    with torch.inference_mode():
        logits = network(images.float() / 255)
    assert accuracy == (logits.argmax(1) == labels).double().mean().item()
    expected = -logits.log_softmax(1)[torch.arange(len(labels)), labels].double().mean()
    torch.testing.assert_close(loss, expected.item(), rtol=1e-5, atol=0)
