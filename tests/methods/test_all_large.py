"""Properties of AllLarge, which is plain SGD for one client and one round."""

import pytest
import torch
import torch.nn.functional as F

from fedsweep.common.randomness import stream
from fedsweep.federation.rounds import federate
from fedsweep.methods import ALL
from fedsweep.models import build_model
from fedsweep.models.names import folded_name
from fedsweep.testing.compare import identical, identical_rounds
from fedsweep.training.local_training import batches

ONE_CLIENT = {
    "federation.depths": [12], "data.domains": ["noisy"], "federation.rounds": 1, "lora.dropout": 0.0, "local.steps": 4,
}  # fmt: skip


def test_the_clients_depths_do_not_matter(federation):
    first, second = (
        federate(federation({"method": "all_large", "federation.depths": depths, "local.steps": 1}))
        for depths in ([12, 6, 3], [1, 1, 1])
    )
    assert identical_rounds(first, second)


def test_all_clients_run_all_blocks(federation):
    large = federation({"method": "all_large"})
    state = large.initial_state()
    rows = large.method.allocate(state, large.clients, large.server, stream(0, "allocation", 1))
    assert [row.trained for row in rows.values()] == [tuple(range(12))] * 3


OTHERS = (
    *("depthfl", "fedag", "fedbrick", "fedclip", "fedms", "fedot", "ft", "lfft", "promptfl", "zero_shot"),
    *("hetlora", "flexlora", "raflora", "rolora", "fedsa_lora"),
)
"""Methods that differ from plain SGD in their loss, tensors or factors; their own modules test them."""


@pytest.mark.parametrize("method", sorted({method.model_fields["name"].default for method in ALL} - set(OTHERS)))
def test_one_client_in_one_round_is_plain_sgd(federation, tiny, method):
    alone = federation({"method": method, **ONE_CLIENT})
    start, end = federate(alone)

    config = tiny.override({"method": method, **ONE_CLIENT}, "test")
    model = build_model(config.backbone, config.lora, 10, config.seed)
    images = alone.clients[0].train
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=config.optimizer.lr, momentum=config.optimizer.momentum, weight_decay=config.optimizer.weight_decay,
    )  # fmt: skip
    losses = []
    for batch in batches(len(images), 8, 4, stream(0, "batches", 1, "noisy")):
        pixels = (images.images[batch].float() / 255 - 0.5) / 0.5
        loss = F.cross_entropy(model.backbone(pixels), images.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.trainable().values(), 10.0)
        optimizer.step()
        losses.append(loss.item())

    assert len(losses) == 4
    assert not identical(start.state.adapter, end.state.adapter)
    found, trained = end.state.adapter, {name: one.detach() for name, one in model.trainable().items()}
    for name, tensor in trained.items():
        if (change := folded_name(name)) not in found:
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)
        elif ".lora_B." in name:  # the method may fold the product into W instead of keeping the factors
            a, s = name.replace(".lora_B.", ".lora_A."), config.lora.effective_scaling
            own = found[change] + s * found[name] @ found[a]
            torch.testing.assert_close(own, s * tensor @ trained[a], rtol=1e-5, atol=1e-7)
    assert end.metrics["loss/train"] == pytest.approx(sum(losses) / 4, rel=1e-6)
