"""Properties of FT."""

import math

import pytest
import torch
import torch.nn.functional as F

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.data.image_sets import pool
from fedsweep.federation.rounds import federate
from fedsweep.testing.compare import moved
from fedsweep.testing.rounds import one_round
from fedsweep.training.local_training import batches


def test_one_client_and_one_round_equal_torchs_sgd_on_all_parameters(federation):
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


def test_there_are_no_adapters_and_all_parameters_are_sent(federation):
    untuned, first, _ = federate(federation({"method": "ft"}))
    assert not [name for name in untuned.state.adapter if "lora" in name]
    size = sum(tensor.numel() for tensor in untuned.state.adapter.values())
    assert first.metrics["parameters/trained"] == first.metrics["parameters/held"] == size
    assert first.metrics["bytes/up"] == first.metrics["bytes/down"] == 3 * 4 * size
    assert first.metrics["lora/relative_norm"] == first.metrics["lora/residual"] == 0


def test_the_server_trains_the_mean_by_sgd_on_synthetic_images(federation):
    synthetic = {"synthetic": {"name": "surrogate", "share": 0.015}, "partition.proxy_share": 0.2}
    base = {"name": "fedprox", "mu": 1.0}  # the proximal term applies to clients, not to the server
    one = {"base_optimizer": base, "federation.rounds": 1}
    plain = federation({"method": "ft", "partition.proxy_share": 0.2, **one})
    tuned = federation({"method": {"name": "ft", "synthetic_epochs": 2}, **synthetic, **one})
    (_, before), (_, after) = federate(plain), federate(tuned)
    config, model = tuned.trainer.optimizer, tuned.model
    images = pool(list(tuned.server.synthetic.values()))
    assert len(images) == 3 * len(tuned.server.synthetic["plain"]) > 16
    model.load_adapter(before.state.adapter)
    parameters = model.trainable()
    optimizer = torch.optim.SGD(
        parameters.values(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    model.train()
    steps = 2 * math.ceil(len(images) / 8)
    for rows in batches(len(images), 8, steps, stream(tuned.seed, "batches", 1, "server")):
        pixels, labels = images.take(torch.from_numpy(rows))
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(pixels), labels))
        torch.nn.utils.clip_grad_norm_(parameters.values(), config.clip_norm)
        optimizer.step()
    model.eval()
    for name, tensor in after.state.adapter.items():
        torch.testing.assert_close(tensor, parameters[name].detach(), rtol=1e-3, atol=1e-5)
    assert len(moved(before.state.adapter, after.state.adapter)) > 100


def test_without_epochs_on_the_server_no_synthetic_image_is_made(federation):
    synthetic = {"synthetic": {"name": "surrogate"}, "partition.proxy_share": 0.2}
    built = federation({"method": "ft", **synthetic})
    assert built.server.synthetic == {}
    with pytest.raises(UserError, match="`method` ft trains on synthetic images and needs a `synthetic`"):
        federation({"method": {"name": "ft", "synthetic_epochs": 1}})
