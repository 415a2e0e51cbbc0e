"""Properties that every method must have."""

import math
import random
from dataclasses import replace
from itertools import islice, permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsweep.common import randomness
from fedsweep.common.randomness import stream
from fedsweep.common.yaml_values import Json
from fedsweep.federation.rounds import Federation, federate
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.base import FederatedMethod
from fedsweep.methods.capabilities import FrozenBlocks, LoraRule, Messages, OwnMetrics, SeparateModels, SideInputs
from fedsweep.models.lora import effective_scaling
from fedsweep.models.names import folded_name, layer_of, names_within, not_folded
from fedsweep.results.checkpoint import Checkpoint, load, save
from fedsweep.testing.compare import (
    copied,
    frozen,
    identical,
    identical_rounds,
    memory,
    tensors_in,
    unkept,
    with_products,
)
from fedsweep.testing.fixtures import NewFederation
from fedsweep.testing.rounds import one_round
from fedsweep.training.round_metrics import names_of
from fedsweep.types import AdapterState, ClientId, ClientUpdate, ImageSet, LayerAllocation, RoundResult, ServerState

FirstRound = tuple[Federation, RoundResult, list[ClientUpdate]]
SMALL: dict[str, Json] = {"federation.depths": [2, 1, 3]}
IN_TRAINING = [name for name in randomness.STREAMS if name != "evaluation"]
SOME: dict[str, Json] = {"federation.clients_per_round": 2, "seed": 1}
"""The run that other runs are compared with: two of three clients take part in each round, others in the second."""


@pytest.fixture
def small(federation: NewFederation, chosen: dict[str, Json]) -> Federation:
    """Return a federation with clients of depth 2, 1 and 3, so that some blocks are held by no client."""
    return federation({**chosen, **SMALL})


@pytest.fixture(scope="module")
def rounds() -> dict[str, FirstRound]:
    """Return an empty cache of first rounds, keyed by method name, which several tests share."""
    return {}


@pytest.fixture
def first_round(
    federation: NewFederation, chosen: dict[str, Json], name: str, rounds: dict[str, FirstRound]
) -> FirstRound:
    """Return the small federation with the state and the updates of its first round, which tests must not change."""
    if name not in rounds:
        small = federation({**chosen, **SMALL})
        rounds[name] = (small, *one_round(small))
    return rounds[name]


@pytest.fixture(scope="module")
def played() -> dict[str, list[RoundResult]]:
    """Return an empty cache of runs, keyed by method name, which several tests share."""
    return {}


@pytest.fixture
def straight(
    federation: NewFederation, name: str, chosen: dict[str, Json], played: dict[str, list[RoundResult]]
) -> list[RoundResult]:
    """Return an uninterrupted run of a method: the untuned model and two rounds."""
    if name not in played:
        given = federation({**chosen, **SOME})
        assert given.cohort(1) != given.cohort(2)
        played[name] = list(federate(given))
    return played[name]


def begun(federation: Federation) -> list[RoundResult]:
    """Return the untuned model and as many rounds as it takes to reach every stage of the method."""
    return list(islice(federate(federation), 2 + getattr(federation.method, "global_rounds", 0)))


def given_to(small: Federation, state: ServerState, client: ClientId) -> AdapterState:
    """Return the adapter from which a client starts a round."""
    return SeparateModels.of_method(small.method).sent_adapter(state, client)


def test_another_seed_gives_another_run(
    federation: NewFederation, chosen: dict[str, Json], straight: list[RoundResult]
) -> None:
    other = federation({**chosen, **SOME, "seed": 2})
    second = begun(other)
    kept = bool(other.trainer.reader.kept._files)
    untuned = type(other.method).predict is FederatedMethod.predict  # logits of round 0, which arms share
    assert kept == (untuned or isinstance(other.method, FrozenBlocks | SideInputs))
    if kept:  # cached rows of the first run must not be used for this run
        assert identical_rounds(second, begun(unkept(other)))
    for left, right in zip(straight, second, strict=False):
        pretrained = not other.method.needs.lora and all(name.startswith("backbone.") for name in left.state.adapter)
        alike = pretrained and (left.round == 0 or not left.state.adapter)  # no random weights, or no trained tensors
        assert identical(left.state.adapter, right.state.adapter) == alike


def test_the_same_seed_gives_the_same_bits_and_leaves_global_generators_unchanged(
    federation: NewFederation, chosen: dict[str, Json], straight: list[RoundResult]
) -> None:
    """The order of the clients and the cache of frozen blocks' outputs do not change the result."""

    def generators() -> list[object]:
        return [torch.get_rng_state(), random.getstate(), [str(part) for part in np.random.get_state(legacy=True)]]

    torch.manual_seed(1)
    random.seed(1)
    before = generators()
    given = federation({**chosen, **SOME})
    again = list(federate(unkept(replace(given, clients=list(reversed(given.clients))))))
    assert identical(before, generators())
    assert identical_rounds(straight, again)


def test_no_test_image_reaches_the_state(
    federation: NewFederation, chosen: dict[str, Json], straight: list[RoundResult]
) -> None:
    """The models are bit-identical for other test, tuning and validation images; only the accuracies differ.

    The validation images of clients are not turned, because methods may train by them.
    """

    def turned(images: ImageSet) -> ImageSet:
        return ImageSet(255 - images.take(torch.arange(len(images)))[0], images.labels.roll(1))

    given = federation({**chosen, **SOME})
    clients = [
        replace(one, test=one.test and turned(one.test), tuning=one.tuning and turned(one.tuning))
        for one in given.clients
    ]
    domains = [
        replace(one, test=turned(one.test), validation=one.validation and turned(one.validation))
        for one in given.domains
    ]
    others = begun(replace(given, clients=clients, domains=domains))
    assert len(others) >= 2
    for ours, theirs in zip(straight, others, strict=False):
        assert identical(ours.state, theirs.state)
        assert dict(ours.metrics) != dict(theirs.metrics)


def test_a_resumed_run_equals_an_uninterrupted_run(
    federation: NewFederation, chosen: dict[str, Json], straight: list[RoundResult], tmp_path: Path
) -> None:
    fresh = federation({**chosen, **SOME})
    save(tmp_path / "checkpoint", Checkpoint(1, straight[1].state, ()))
    read = load(tmp_path / "checkpoint", like=fresh.initial_state())
    assert read.round == 1
    assert identical_rounds(straight[2:], federate(fresh, RoundResult(read.round, read.state)))


def test_the_state_survives_a_round_trip_to_disk(
    small: Federation, straight: list[RoundResult], tmp_path: Path
) -> None:
    for result in straight:
        save(tmp_path / "checkpoint", Checkpoint(result.round, result.state, ()))
        assert identical(load(tmp_path / "checkpoint", like=small.initial_state()).state, result.state)
    assert not identical(straight[0].state, straight[-1].state)


def test_aggregation_does_not_depend_on_the_order_of_the_updates(first_round: FirstRound) -> None:
    small, start, updates = first_round
    expected = small.method.aggregate(start.state, updates, small.server)
    orders = list(permutations(updates))
    assert len(orders) == 6
    for order in orders:
        assert identical(small.method.aggregate(start.state, order, small.server), expected)


def test_local_updates_change_neither_the_state_nor_the_frozen_backbone(small: Federation) -> None:
    start = small.initial_state()
    kept = replace(start, adapter=copied(start.adapter))
    cohort = small.cohort(1)
    allocations = small.method.allocate(start, cohort, small.server, stream(0, "allocation", 1))
    moving = small.model.movable()
    before = {name: tensor for name, tensor in frozen(small.model).items() if name not in moving}
    small.method.local_updates(start, cohort, allocations, small.trainer.at(1))
    assert identical(start, kept)
    after = {name: tensor for name, tensor in frozen(small.model).items() if name not in moving}
    assert len(before) + len(moving) > 12 * 12
    assert identical(before, after)


def test_training_changes_the_head_and_the_blocks_that_clients_hold(first_round: FirstRound) -> None:
    small, start, updates = first_round
    after = small.method.aggregate(start.state, updates, small.server)
    assert {layer_of(name) for update in updates for name in {**update.adapter, **update.private}} - {None} == {
        layer for update in updates for layer in update.allocation.trained
    }
    sent = [(update.client, name) for update in updates for name in update.adapter]
    assert sent or not start.state.adapter
    for client, name in sent:
        if "lora_A" not in name:  # B = 0, so A has no gradient yet
            one, other = (given_to(small, state, client) for state in (start.state, after))
            places = [name, folded_name(name)] if "lora_B" in name else [name]  # the change may be folded into W
            assert any(not torch.equal(one[place], other[place]) for place in places if place in one), name


def test_a_block_that_no_client_trained_does_not_change(first_round: FirstRound) -> None:
    small, start, updates = first_round
    few = [
        replace(
            update,
            allocation=LayerAllocation.of([layer for layer in update.allocation.held if layer < 2]),
            adapter={name: update.adapter[name] for name in names_within(update.adapter, (0, 1))},
            private={name: update.private[name] for name in names_within(update.private, (0, 1))},
        )
        for update in updates
    ]
    aggregate, first = small.method.aggregate(start.state, few, small.server), small.clients[0].id
    after = given_to(small, aggregate, first)
    untrained = [name for name in start.state.adapter if (layer_of(name) or 0) >= 2]
    blocks = {layer_of(name) for name in start.state.adapter} - {None}
    assert blocks == set(range(12)) or not small.method.needs.lora
    assert {layer_of(name) for name in untrained} == blocks - {0, 1}
    for name in untrained:
        assert torch.equal(after[name], start.state.adapter[name]), name


def test_every_update_contains_only_tensors_that_its_client_trains(first_round: FirstRound) -> None:
    small, start, updates = first_round
    messages = Messages.of_method(small.method)
    assert [update.client for update in updates] == [client.id for client in small.cohort(1)]
    for update in updates:
        assert set(update.allocation.trained) <= set(update.allocation.held)
        row = update.allocation
        trained = {**update.adapter, **update.private}
        within = set(names_within(start.state.adapter, row.trained, row.excluded_prefixes))
        assert set(trained) == set(messages.trained_names(start.state, start.state.adapter, row)) <= within
        assert isinstance(small.method, Messages) or set(trained) == set(not_folded(within))
        assert set(update.adapter) == set(messages.sent_names(start.state, start.state.adapter, row))
        assert not set(update.adapter) & set(update.private)
        assert {layer_of(name) for name in trained} - {None} == set(update.allocation.trained)
        for name, tensor in trained.items():
            assert tensor.shape == start.state.adapter[name].shape


def test_model_states_and_updates_share_no_memory(first_round: FirstRound) -> None:
    small, start, updates = first_round
    after = small.method.aggregate(start.state, updates, small.server)
    alone = small.method.aggregate(start.state, updates[:1], small.server)
    owners = [start.state, after, alone, *updates, list(small.model.parameters())]
    owned = [memory(owner) for owner in owners]
    assert all(owned) or not start.state.adapter
    assert sum(map(len, owned)) == len(set().union(*owned))
    assert len(memory(after)) == len(list(tensors_in(after)))


def test_aggregation_changes_neither_state_nor_updates(first_round: FirstRound) -> None:
    small, start, updates = first_round
    kept = [copied(start.state.adapter), *(copied(update.adapter) for update in updates)]
    small.method.aggregate(start.state, updates, small.server)
    assert identical(kept, [start.state.adapter, *(update.adapter for update in updates)])


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_copies_of_one_update_average_to_it(first_round: FirstRound, weights: str) -> None:
    small, start, updates = first_round
    server = replace(small.server, aggregation=small.server.aggregation.model_copy(update={"weights": weights}))
    copies = [
        replace(updates[0], client=client.id, num_examples=examples)
        for client, examples in zip(small.clients, [7, 40, 13], strict=True)
    ]
    after, sent = small.method.aggregate(start.state, copies, server), updates[0].adapter
    products = isinstance(small.method, LoraRule) and (small.method.folds or not small.method.keeps_factors)
    for client in small.clients:
        given = given_to(small, after, client.id)
        found, expected = {name: given[name] for name in sent}, sent
        if products:  # the server replaces the factors by others with the same products, or folds the products
            found, expected = with_products(found), with_products(expected)
            changes = {name: folded_name(name.replace(".product.", ".lora_A.")) for name in found}
            for name in (one for one, change in changes.items() if change in given):
                found[name] = found[name] + given[changes[name]] / effective_scaling(small.server.lora)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-8)
    assert any(not torch.equal(sent[name], start.state.adapter[name]) for name in sent) or not start.state.adapter


def test_metrics_are_numbers_under_the_listed_names(
    straight: list[RoundResult], tiny: RunConfig, chosen: dict[str, Json]
) -> None:
    config = tiny.override({**chosen, **SOME}, "test")
    promised, clients = config.metrics(), config.client_domains()
    own = len([*OwnMetrics.of_method(config.method).metric_names(clients), *names_of(config.evaluation.metrics)])
    shares = (config.partition.test_share, config.partition.tuning_share)
    of_clients = (3 + len(clients)) * sum(share > 0 for share in shares)
    of_ranks = int(config.federation.sets_ranks)
    untuned, *rounds = straight
    assert len(rounds) == 2
    assert len(promised) == len(set(promised)) == 5 + 3 + 1 + 5 + 4 + own + of_clients + of_ranks
    assert set(untuned.metrics) == {
        metric for metric in promised if metric.startswith(("accuracy/", "validation/", "loss/test", "evaluation/"))
    }
    for result in rounds:
        assert list(result.metrics) == promised
        assert all(type(value) is float and math.isfinite(value) for value in result.metrics.values())


def test_adapters_of_different_ranks_start_with_common_rows(
    federation: NewFederation, chosen: dict[str, Json], small: Federation
) -> None:
    if not small.method.needs.lora:
        pytest.skip("the method has no LoRA adapters")
    rank = next(len(tensor) for name, tensor in small.fresh.items() if ".lora_A." in name)
    assert rank > 1
    lower = federation({**chosen, **SMALL, "lora.rank": rank // 2})
    factors = {name for name in small.fresh if ".lora_A." in name}
    assert all(torch.equal(lower.fresh[name], small.fresh[name][: rank // 2]) for name in factors)


def test_a_seed_of_all_streams_of_training_determines_the_round(
    federation: NewFederation, chosen: dict[str, Json], first_round: FirstRound
) -> None:
    _, start, updates = first_round
    started, again = one_round(federation({**chosen, **SMALL, "seed_streams": IN_TRAINING, "seed": 0}))
    assert identical(started, start)
    assert identical(again, updates)


def test_a_seed_of_no_used_stream_changes_nothing(
    federation: NewFederation, chosen: dict[str, Json], first_round: FirstRound
) -> None:
    _, start, updates = first_round
    started, again = one_round(federation({**chosen, **SMALL, "seed_streams": ["evaluation"], "seed": 7}))
    assert identical(started, start)
    assert identical(again, updates)
