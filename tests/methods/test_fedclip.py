"""Properties of FedCLIP."""

import numpy as np
import torch

from fedsweep.federation.rounds import federate
from fedsweep.methods.capabilities import predicted
from fedsweep.testing.rounds import one_round
from tests.references import fedag as reference


def clip(folder, **method):
    backbone = {"backbone": {"name": "clip", "model": str(folder)}, "lora.position": "mlp"}
    return {"method": {"name": "fedclip", **method}, **backbone}


def test_only_the_adapter_is_trained_and_sent(federation, random_clip):
    start, updates = one_round(federation(clip(random_clip, hidden=24)))
    shapes = {name: tuple(tensor.shape) for name, tensor in start.state.adapter.items()}
    assert shapes == {
        "image_adapter.0.weight": (24, 16), "image_adapter.0.bias": (24,),
        "image_adapter.2.weight": (16, 24), "image_adapter.2.bias": (16,),
    }  # fmt: skip
    for update in updates:
        assert update.adapter.keys() == shapes.keys()
        assert all(not torch.equal(tensor, start.state.adapter[name]) for name, tensor in update.adapter.items())


def test_logits_are_scaled_cosines_of_adapted_features(federation, random_clip):
    built = federation(clip(random_clip))
    *_, last = federate(built)
    model, images = built.model, built.domains[0].test
    model.load_adapter(last.state.adapter)
    found = predicted(built.method, last.state, built.trainer.reader, images)
    with torch.no_grad():
        seen = model.projected(model.walk(images.take(torch.arange(len(images)))[0], range(12))).double().numpy()
        texts = model.text_features(range(12)).double().numpy()
        w2, b2, w1, b1 = [one.double().numpy() for one in model.image_adapter.parameters()]
        scale = model.backbone.logit_scale.exp().item()
    rows = [reference.logits(reference.adapted(one, w2, b2, w1, b1), texts, scale) for one in seen]
    np.testing.assert_allclose(found.numpy(), np.array(rows), rtol=1e-3, atol=1e-3)


def test_each_image_is_encoded_once_for_all_rounds(federation, random_clip, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path))
    small = {"data.domains": ["plain"], "federation.depths": [12], "federation.rounds": 3, "local.steps": "epoch"}
    built = federation({**clip(random_clip), **small}, train=64, test=50)
    seen = []
    built.model.backbone.stem["embeddings"].register_forward_hook(lambda module, inputs, out: seen.append(len(out)))
    rounds = list(federate(built))
    images = len(built.clients[0].train) + len(built.domains[0].test)
    assert len(rounds) == 4
    assert images <= sum(seen) <= images + 15 * len(seen)
    assert sum(seen) < 2 * images
