"""Properties of every method whose clients can have adapters of unequal rank (`federation.ranks`)."""

import math
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import Json
from fedsweep.federation.client_costs import classes_of, cost_counter
from fedsweep.federation.rounds import Federation, federate
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import LoraRule, Messages, Stages, UnequalRanks
from fedsweep.models.names import rank_dim
from fedsweep.results.checkpoint import Checkpoint, load, save
from fedsweep.testing.cases import method_of
from fedsweep.testing.compare import identical, identical_rounds, tensors_in, unkept
from fedsweep.testing.fixtures import NewFederation
from fedsweep.testing.rounds import one_round
from fedsweep.training.costs import size_in_bytes
from fedsweep.types import AdapterState, ClientUpdate, RoundResult, ServerState

FULL = 4
UNEQUAL: dict[str, Json] = {"lora.rank": FULL, "federation.ranks": [2, FULL, 1], "federation.depths": [3, 1, 2]}
"""Three clients with unequal ranks and depths. The deepest client has neither the largest nor the smallest rank."""
SOME: dict[str, Json] = {"federation.clients_per_round": 2, "seed": 1, "local.steps": 1}
"""Further changes, for cohorts of two clients. The client of the largest rank takes part in one of the two rounds."""


@pytest.fixture
def ranked(chosen: dict[str, Json]) -> dict[str, Json]:
    """Return the changes for three clients with unequal ranks; tests with this fixture run only on suitable methods."""
    return {**chosen, **UNEQUAL}


@pytest.fixture(scope="module")
def played() -> dict[str, list[RoundResult]]:
    """Return an empty cache of runs, keyed by method name, which several tests share."""
    return {}


@pytest.fixture
def ranked_run(
    federation: NewFederation, name: str, ranked: dict[str, Json], played: dict[str, list[RoundResult]]
) -> list[RoundResult]:
    """Return an uninterrupted run of a method: the untuned model and two rounds of two clients each."""
    if name not in played:
        played[name] = list(federate(federation({**ranked, **SOME})))
    return played[name]


def factors(state: AdapterState) -> dict[str, torch.Tensor]:
    """Return the LoRA factors among the tensors of an adapter."""
    found = {name: tensor for name, tensor in state.items() if rank_dim(name) is not None}
    assert found
    return found


def assert_rank(state: AdapterState, rank: int, like: ServerState) -> None:
    """Assert that the factors A have the shape (rank, ...) and B (out, rank, ...), and other tensors that of `like`."""
    for name, tensor in state.items():
        expected = list(like.adapter[name].shape)
        if (dim := rank_dim(name)) is not None:
            expected[dim] = rank
        assert list(tensor.shape) == expected, name


def updates_of(given: Federation, before: RoundResult) -> list[ClientUpdate]:
    """Return the updates of the round after `before`."""
    round = before.round + 1
    cohort, trainer = given.cohort(round), given.trainer.at(round, before.state.client_memory)
    state = given.method.begin_round(before.state, given.server, trainer)
    return given.method.local_updates(state, cohort, given.allocate(state, cohort, round), trainer)


def test_unequal_ranks_are_used_or_rejected(tiny: RunConfig, chosen: dict[str, Json]) -> None:
    if isinstance(method_of(chosen["method"]), UnequalRanks):  # type: ignore[arg-type]
        assert list(tiny.override({**chosen, **UNEQUAL}, "test").client_ranks().values()) == [2, FULL, 1]
        return
    with pytest.raises(UserError, match=r"`federation\.ranks` must be null, because `method` "):
        tiny.override({**chosen, "lora.rank": FULL, "federation.ranks": [2, FULL, 1]}, "test")


def test_the_order_of_clients_does_not_change_a_run_with_unequal_ranks(
    federation: NewFederation, ranked: dict[str, Json], ranked_run: list[RoundResult]
) -> None:
    given = federation({**ranked, **SOME})
    again = federate(unkept(replace(given, clients=list(reversed(given.clients)))))
    assert identical_rounds(ranked_run, again)


def test_a_run_with_unequal_ranks_can_be_resumed(
    federation: NewFederation, ranked: dict[str, Json], ranked_run: list[RoundResult], tmp_path: Path
) -> None:
    fresh = federation({**ranked, **SOME})
    save(tmp_path / "checkpoint", Checkpoint(1, ranked_run[1].state, ()))
    read = load(tmp_path / "checkpoint", like=fresh.initial_state())
    assert identical(read.state, ranked_run[1].state)
    assert identical_rounds(ranked_run[2:], federate(fresh, RoundResult(read.round, read.state)))


def test_the_server_has_finite_tensors_of_the_full_rank(ranked_run: list[RoundResult]) -> None:
    untuned, *rounds = ranked_run
    assert_rank(factors(untuned.state.adapter), FULL, untuned.state)
    assert len(rounds) == 2
    for result in rounds:
        assert set(result.state.adapter) == set(untuned.state.adapter)
        assert_rank(result.state.adapter, FULL, untuned.state)
        assert all(tensor.isfinite().all() for tensor in tensors_in(result.state))
        assert all(math.isfinite(value) for value in result.metrics.values())


def test_what_no_rank_of_the_cohort_reaches_does_not_change(
    federation: NewFederation, ranked: dict[str, Json], ranked_run: list[RoundResult]
) -> None:
    """A method that replaces the factors in each round may change all rows and columns."""
    given, largest = federation({**ranked, **SOME}), []
    for before, after in pairwise(ranked_run):
        updates = updates_of(given, before)
        largest.append(max(update.allocation.rank or FULL for update in updates))
        if isinstance(given.method, LoraRule) and not given.method.keeps_factors:
            continue
        for name, old in factors(before.state.adapter).items():
            dim, new = rank_dim(name) or 0, after.state.adapter[name]
            reached = max((one.adapter[name].shape[dim] for one in updates if name in one.adapter), default=0)
            parts = [one.narrow(dim, reached, FULL - reached) for one in (old, new)]
            assert torch.equal(*parts), name
    assert sorted(largest) == [2, FULL]


def test_each_client_receives_and_sends_factors_of_its_rank(federation: NewFederation, ranked: dict[str, Json]) -> None:
    given = federation(ranked)
    start, updates = one_round(given)
    rows = given.allocate(start.state, given.cohort(1), 1)
    assert {client: row.rank for client, row in rows.items()} == {one.id: one.rank for one in given.clients}
    assert len({row.rank for row in rows.values()}) == 3
    full = given.initial_state()
    for update in updates:
        row = rows[update.client]
        assert update.allocation == row
        assert_rank({**update.adapter, **update.private}, row.rank or FULL, full)
        received = Messages.of_method(given.method).received(start.state, update.client, row)
        assert_rank({name: one for name, one in received.items() if name in full.adapter}, row.rank or FULL, full)
    expected = given.method.aggregate(start.state, updates, given.server)
    orders = list(permutations(updates))
    assert len(orders) == 6
    for order in orders:
        assert identical(given.method.aggregate(start.state, order, given.server), expected)


def test_the_costs_of_a_round_are_the_sizes_of_the_tensors(
    federation: NewFederation, ranked: dict[str, Json], ranked_run: list[RoundResult]
) -> None:
    given = federation({**ranked, **SOME})
    for before, after in pairwise(ranked_run):
        round = after.round
        rows = given.allocate(before.state, given.cohort(round), round)
        sent = [size_in_bytes(one) for one in given.sent(before.state, rows)]
        assert after.metrics["bytes/down"] == sum(sent) > 0
        updates = updates_of(given, before)
        values = sum(tensor.numel() for one in updates for tensor in [*one.adapter.values(), *one.extra.values()])
        assert after.metrics["bytes/up"] == 4 * values
    smaller = federation({**ranked, **SOME, "federation.ranks": [1]})
    *_, least = federate(smaller)
    assert least.metrics["bytes/up"] < ranked_run[-1].metrics["bytes/up"]


def test_the_counted_bytes_are_those_of_each_later_round(
    federation: NewFederation, tiny: RunConfig, ranked: dict[str, Json]
) -> None:
    """In a later round, the server may send other tensors than in the first (`Messages.remember_cohort`)."""
    if getattr(method_of(ranked["method"]), "changes_ranks", False):  # type: ignore[arg-type]
        return
    changes: dict[str, Json] = {**ranked, "federation.rounds": 3, "local.steps": 1}
    config = tiny.override(changes, "test")
    counter, stages = cost_counter(config, classes_of(config)), Stages.of_method(config.method)
    for before, after in list(pairwise(federate(federation(changes))))[1:]:
        stage = stages.stage_of(before.state)
        costs = [counter.costs(client, stage=stage) for client in counter.clients]
        assert sum(one.bytes_down for one in costs) == after.metrics["bytes/down"]
        assert sum(one.bytes_up for one in costs) == after.metrics["bytes/up"]


def test_one_full_rank_for_all_equals_no_ranks(federation: NewFederation, ranked: dict[str, Json]) -> None:
    """The tensors and the metrics are bit-identical; metrics of unequal ranks may be added."""
    runs = [list(federate(federation({**ranked, **SOME, "federation.ranks": ranks}))) for ranks in ([FULL], None)]
    for one, other in zip(*runs, strict=True):
        assert identical(one.state.adapter, other.state.adapter)
        assert dict(one.metrics).items() >= dict(other.metrics).items()
    assert not identical(runs[0][0].state.adapter, runs[0][-1].state.adapter)


def test_ranks_can_be_drawn_in_each_round(federation: NewFederation, ranked: dict[str, Json]) -> None:
    changes: dict[str, Json] = {**ranked, "federation.ranks": "dynamic", "local.steps": 1}
    if getattr(method_of(ranked["method"]), "changes_ranks", False):  # type: ignore[arg-type]
        with pytest.raises(UserError, match="which changes the clients' ranks itself, but it is dynamic"):
            federation(changes)
        return
    given = federation(changes)
    drawn = [[client.rank for client in given.cohort(round)] for round in (1, 2)]
    assert drawn[0] != drawn[1]
    results = list(federate(given))
    assert len(results) == 3
    for result in results:
        assert_rank(result.state.adapter, FULL, results[0].state)
        assert all(math.isfinite(value) for value in result.metrics.values())
