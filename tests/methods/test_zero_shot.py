"""Properties of zero-shot CLIP, which trains nothing and sends nothing."""

import pytest
import torch
import torch.nn.functional as F

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import federate


@pytest.fixture
def shot(federation, random_clip):
    backbone = {"backbone": {"name": "clip", "model": str(random_clip)}, "lora.position": "mlp"}
    return federation({"method": "zero_shot", **backbone})


def test_every_round_is_the_untuned_model(shot):
    untuned, *rounds = federate(shot)
    assert untuned.state.adapter == {}
    for result in rounds:
        assert {name: result.metrics[name] for name in untuned.metrics} == dict(untuned.metrics)
        assert result.metrics["bytes/up"] == result.metrics["bytes/down"] == result.metrics["parameters/trained"] == 0


def test_accuracy_and_loss_are_those_of_the_model_alone(shot):
    *_, last = federate(shot)
    with torch.no_grad():
        for domain in shot.domains:
            logits = shot.model(domain.test.take(torch.arange(len(domain.test)))[0])
            right = (logits.argmax(1) == domain.test.labels).double().mean().item()
            assert last.metrics[f"accuracy/domain/{domain.name}"] == right
        losses = [
            F.cross_entropy(shot.model(one.train.take(torch.arange(len(one.train)))[0]), one.train.labels).item()
            for one in shot.clients
        ]
    sizes = [len(one.train) for one in shot.clients]
    mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    assert last.metrics["loss/train"] == pytest.approx(mean, rel=1e-4)


def test_zero_shot_needs_a_text_encoder(federation):
    with pytest.raises(UserError, match="`method` zero_shot needs a `backbone` with a text encoder"):
        federation({"method": "zero_shot"})
