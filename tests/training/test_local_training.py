"""Local training, with its batches, its steps, a new optimizer per session, and tensors that must not change."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.common.errors import DivergenceError
from fedsweep.common.randomness import stream
from fedsweep.federation.build_and_run import build
from fedsweep.models.names import layer_of
from fedsweep.testing.compare import assert_close, identical, moved
from fedsweep.training.base_optimizers import FedDyn
from fedsweep.training.local_training import LocalConfig, LocalTask, batches, cross_entropy
from fedsweep.training.optimizers import AdamConfig, SGDConfig
from fedsweep.types import LayerAllocation


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 30), st.integers(0, 2**31))
def test_every_pass_over_the_images_is_a_permutation(examples, batch_size, steps, seed):
    drawn = list(batches(examples, batch_size, steps, np.random.default_rng(seed)))
    assert len(drawn) == steps
    assert all(1 <= len(batch) <= batch_size for batch in drawn)
    per_pass = -(-examples // batch_size)
    for start in range(0, steps, per_pass):
        whole = drawn[start : start + per_pass]
        assert all(len(batch) == batch_size for batch in whole[: per_pass - 1])
        seen = np.concatenate(whole).tolist()
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(range(examples))
        if len(whole) == per_pass:
            assert len(seen) == examples


def test_passes_and_rounds_are_shuffled_anew():
    first, second = batches(50, 50, 2, stream(0, "batches", 1, "plain"))
    other = next(batches(50, 50, 1, stream(0, "batches", 2, "plain")))
    assert len({tuple(order.tolist()) for order in (first, second, other, np.arange(50))}) == 4


@pytest.fixture
def small(federation):
    """Return a federation with the clients plain, inverted and noisy, which have 40, 35 and 30 images."""
    return federation({"lora.dropout": 0.5})


def tasks(small, objective=cross_entropy, blocks=range(12)) -> list[LocalTask]:
    """Return one training task per client, which starts from the current adapter of the model."""
    start = small.model.adapter()
    return [LocalTask(client, start, LayerAllocation.of(list(blocks)), objective) for client in small.clients]


@pytest.mark.parametrize(
    ("steps", "sizes"),
    [
        ("epoch", [[15, 15, 10], [15, 15, 5], [15, 15]]),
        ("min_client", [[15, 15], [15, 15], [15, 15]]),
        (1, [[15], [15], [15]]),
        (4, [[15, 15, 10, 15], [15, 15, 5, 15], [15, 15, 15, 15]]),
    ],
)
def test_the_number_of_steps_is_an_epoch_a_capped_epoch_or_a_number(small, steps, sizes):
    seen = []

    def noting(model, images, labels, path):
        seen.append(len(images))
        return cross_entropy(model, images, labels, path)

    trainer = replace(small.trainer, local=LocalConfig(batch_size=15, steps=steps), fewest=15)
    updates = trainer.fit(tasks(small, noting, [0]))
    assert seen == [size for client in sizes for size in client]
    assert [update.num_examples for update in updates] == [40, 35, 30]


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 64))
def test_the_released_codes_cap_is_one_step_above_the_smallest_clients_epoch(images, fewest, size):
    """The released code stops at the first batch whose index, from 0, exceeds the smallest client's batches."""
    of_all = -(-min(images, fewest) // size)
    taken = 0
    for number in range(-(-images // size)):
        if number > of_all:
            break
        taken += 1
    assert LocalConfig(batch_size=size, steps="min_client").steps_for(images, min(images, fewest)) == taken


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 5))
def test_an_epoch_is_a_complete_pass_and_a_number_of_steps_is_exact(images, size, epochs):
    once, several = (LocalConfig(batch_size=size, epochs=count).steps_for(images, images) for count in (1, epochs))
    assert several == epochs * once
    taken = np.concatenate(list(batches(images, size, several, np.random.default_rng(0))))
    assert sorted(taken) == sorted([*range(images)] * epochs)
    assert LocalConfig(batch_size=size, steps=7, epochs=epochs).steps_for(images, images) == 7


def test_a_built_trainer_knows_the_smallest_of_all_clients(tiny):
    skew = {"partition": {"name": "feature_label_skew", "clients_per_domain": 2}, "federation.clients_per_round": 1}
    built = build(tiny.override(skew, "test"))
    assert built.trainer.fewest == min(len(client.train) for client in built.clients)
    assert len({len(client.train) for client in built.clients}) > 1


@pytest.mark.parametrize("optimizer", [SGDConfig(), AdamConfig()], ids=lambda config: config.name)
def test_a_clients_training_does_not_depend_on_other_clients(small, optimizer):
    given, trainer = tasks(small), replace(small.trainer, optimizer=optimizer)
    together = trainer.fit(given)
    alone = [trainer.fit([task])[0] for task in reversed(given)]
    assert [update.client for update in together] == ["plain", "inverted", "noisy"]
    for one, other in zip(together, alone[::-1], strict=True):
        assert one.metrics == pytest.approx(dict(other.metrics), rel=1e-5)
        assert_close(one.adapter, other.adapter)
    assert identical(together, trainer.fit(given))


def always_the_same_images(model, images, labels, path):
    return cross_entropy(model, torch.zeros_like(images), torch.zeros_like(labels), path)


@pytest.mark.parametrize(("dropout", "objective"), [(0.0, cross_entropy), (0.5, always_the_same_images)])
def test_clients_and_rounds_differ_in_batches_and_in_dropout(federation, dropout, objective):
    small = federation({"lora.dropout": dropout})
    given = tasks(small, objective)[0]
    twin = replace(given, client=replace(given.client, id="twin"))
    updates = [*small.trainer.fit([given, twin]), *small.trainer.at(5).fit([given])]
    assert len({update.metrics["loss"] for update in updates}) == 3


def test_only_the_trained_blocks_and_the_head_change(small):
    before = small.model.adapter()
    given = replace(tasks(small)[0], allocation=LayerAllocation(held=(0, 4, 7), trained=(4,)))
    (update,) = small.trainer.fit([given])
    assert sorted({layer_of(name) or -1 for name in update.adapter}) == [-1, 4]
    after = small.model.adapter()
    assert moved(before, after) <= set(update.adapter)
    assert {layer_of(name) for name in moved(before, after)} == {None, 4}


def test_the_loss_is_the_mean_over_the_steps(small):
    def counted(model, images, labels, path):
        counted.calls += 1
        return cross_entropy(model, images, labels, path) * 0 + float(counted.calls)

    counted.calls = 0
    (update,) = replace(small.trainer, local=LocalConfig(batch_size=8, steps=4)).fit(tasks(small, counted)[:1])
    assert update.metrics["loss"] == (1 + 2 + 3 + 4) / 4


def test_dropout_is_on_in_training_and_off_afterwards(small):
    modes = []

    def noting(model, images, labels, path):
        modes.append(model.training)
        return cross_entropy(model, images, labels, path)

    small.trainer.fit(tasks(small, noting)[:1])
    assert modes == [True, True]
    assert not any(module.training for module in small.model.modules())


def test_torchs_global_generator_is_neither_changed_nor_used(small):
    given, updates = tasks(small)[:1], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        updates.append(small.trainer.fit(given))
        assert torch.equal(torch.get_rng_state(), before)
    assert identical(*updates)


def test_a_diverging_client_ends_the_run_in_one_sentence(small):
    def exploding(model, images, labels, path):
        return cross_entropy(model, images, labels, path) * float("inf")

    trainer = replace(small.trainer, local=LocalConfig(batch_size=8, steps=1), round=3)
    with pytest.raises(DivergenceError) as refusal:
        trainer.fit(tasks(small, exploding))
    assert str(refusal.value) == "the loss of client plain became inf in round 3; try a smaller `optimizer.lr`"


def test_an_adapter_that_diverges_in_the_last_step_ends_the_run(small):
    """No loss is computed after the last step, so the adapter itself must be checked."""
    optimizer = small.trainer.optimizer.model_copy(update={"lr": 1e38, "clip_norm": None})
    trainer = replace(small.trainer, optimizer=optimizer, local=LocalConfig(batch_size=8, steps=1), round=3)
    with pytest.raises(DivergenceError, match="the adapter of client plain became infinite or NaN in round 3"):
        trainer.fit(tasks(small, lambda *given: cross_entropy(*given) * 1e4))


def test_momentum_starts_afresh_for_every_client_and_round(small):
    """A new optimizer has no momentum in its first step, so momentum has no effect in sessions of a single step."""
    config = small.trainer.optimizer
    fits = []
    given = tasks(small)[:2]
    for momentum in (0.0, 0.9):
        optimizer = config.model_copy(update={"momentum": momentum})
        trainer = replace(small.trainer, optimizer=optimizer, local=LocalConfig(batch_size=8, steps=1))
        fits.append([trainer.fit(given), trainer.at(2).fit(given)])
    assert identical(*fits)


def test_a_session_uses_the_gradient_that_feddyn_remembers(small):
    """One step of plain SGD changes by lr times the remembered gradient, only for the client that has one."""
    sgd = SGDConfig(lr=0.5, momentum=0.0, weight_decay=0.0, clip_norm=None)
    local = small.trainer.local.model_copy(update={"steps": 1})
    trainer = replace(small.trainer, base=FedDyn(alpha=1.0), optimizer=sgd, local=local)
    head, asked = "backbone.head.weight", tasks(small)
    remembered = torch.randn(asked[0].start[head].shape, generator=torch.Generator().manual_seed(0))
    plain, steered = (trainer.at(1, memory).fit(asked) for memory in ({}, {asked[0].client.id: {head: remembered}}))
    difference = steered[0].adapter[head] - plain[0].adapter[head]
    torch.testing.assert_close(difference, 0.5 * remembered, rtol=1e-4, atol=1e-5)
    assert moved(plain[0].adapter, steered[0].adapter) == {head}
    assert identical(plain[1:], steered[1:])
