"""What only FT promises."""

import torch
import torch.nn.functional as F

from fedsweep.federation import federate
from fedsweep.seeding import stream
from fedsweep.training import batches
from tests.compare import moved
from tests.conformance.rounds import one_round


def test_one_client_and_one_round_are_torchs_sgd_on_all_parameters(federation):
    built = federation({"method": "ft", "data.domains": ["plain"], "federation.depths": [12], "federation.rounds": 1})
    config, model, (client,) = built.trainer.optimizer, built.model, built.clients
    start, (update,) = one_round(built)
    model.load_adapter(start.state.adapter)
    parameters = model.trainable()
    optimizer = torch.optim.SGD(
        parameters.values(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    model.train()
    for rows in batches(len(client.train), 8, 2, stream(built.seed, "batches", 1, client.id)):
        pixels, labels = client.train.take(torch.from_numpy(rows))
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(pixels), labels))
        torch.nn.utils.clip_grad_norm_(parameters.values(), config.clip_norm)
        optimizer.step()
    model.eval()
    assert set(update.adapter) == set(parameters) == {name for name, _ in model.backbone.named_parameters("backbone")}
    for name, tensor in update.adapter.items():
        torch.testing.assert_close(tensor, parameters[name].detach(), rtol=1e-5, atol=1e-6)
    assert len(moved(start.state.adapter, update.adapter)) > 100


def test_there_are_no_adapters_and_all_is_sent(federation):
    untuned, first, _ = federate(federation({"method": "ft"}))
    assert not [name for name in untuned.state.adapter if "lora" in name]
    size = sum(tensor.numel() for tensor in untuned.state.adapter.values())
    assert first.metrics["parameters/trained"] == first.metrics["parameters/held"] == size
    assert first.metrics["bytes/up"] == first.metrics["bytes/down"] == 3 * 4 * size
    assert first.metrics["lora/relative_norm"] == first.metrics["lora/residual"] == 0
