"""Properties of PromptFL."""

import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import federate
from fedsweep.testing.compare import memory
from fedsweep.testing.rounds import one_round


def clip(folder):
    return {"method": "promptfl", "backbone": {"name": "clip", "model": str(folder)}, "lora.position": "mlp"}


def test_only_the_context_is_trained_and_sent(federation, random_clip):
    start, updates = one_round(federation(clip(random_clip)))
    assert set(start.state.adapter) == {"prompt.context"}
    assert start.state.adapter["prompt.context"].shape == (16, 16)
    for update in updates:
        assert set(update.adapter) == {"prompt.context"}
        assert not torch.equal(update.adapter["prompt.context"], start.state.adapter["prompt.context"])


def test_clients_and_server_share_no_storage(federation, random_clip):
    built = federation(clip(random_clip))
    start, updates = one_round(built)
    after = built.method.aggregate(start.state, updates, built.server)
    owned = [memory(one) for one in (start.state.adapter, after.adapter, built.model.trainable(), *updates)]
    assert sum(map(len, owned)) == len(set().union(*owned)) == 3 + len(updates)


def test_every_image_is_encoded_once_for_all_rounds(federation, random_clip, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path))
    small = {"data.domains": ["plain"], "federation.depths": [12], "federation.rounds": 3, "local.steps": "epoch"}
    built = federation({**clip(random_clip), **small}, train=100, test=50)
    seen = []
    stem = built.model.backbone.stem["embeddings"]
    stem.register_forward_hook(lambda module, inputs, out: seen.append(len(out)))
    rounds = list(federate(built))
    images = len(built.clients[0].train) + len(built.domains[0].test)
    batches = 2 + (images // built.trainer.local.batch_size + 2)
    assert len(rounds) == 4
    assert images <= sum(seen) <= images + 15 * batches  # batches are padded to multiples of 16


def test_a_context_longer_than_the_encoders_input_is_rejected(federation, random_clip):
    with pytest.raises(UserError, match="a prompt must have at most 32 tokens, but"):
        federation({**clip(random_clip), "method": {"name": "promptfl", "context": 40}})


def test_a_context_without_room_for_class_names_is_reported_before_a_run(tiny, random_clip):
    config = tiny.override({**clip(random_clip), "method": {"name": "promptfl", "context": 40}}, "test")
    with pytest.raises(UserError, match=r"^`method\.context` 40 is too large: a prompt must have at most 32 tokens"):
        config.method.check_weights(config.backbone, ("7", "8"))


def test_clients_that_train_no_block_have_no_structural_bias(federation, random_clip):
    *_, last = federate(federation({**clip(random_clip), "evaluation.metrics": ["structural_bias"]}))
    assert last.metrics["structural_bias/gradient"] == 0
