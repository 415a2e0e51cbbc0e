"""Properties of RoLoRA, and whole runs against tests/references/ranks.py."""

import math
from itertools import pairwise

import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import RESIDUAL, federate
from fedsweep.models.names import layer_of
from fedsweep.testing.compare import moved
from fedsweep.training.costs import size_in_bytes
from fedsweep.types import ServerState
from tests.federation.test_whole_runs import BASES, COMMON, compare, doubled, world_of
from tests.references import ranks as reference

ROUNDS = {"method": "rolora", "federation.rounds": 4, "federation.depths": [12]}
STRONG = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


def kinds(names) -> set[str]:
    """Return the kinds of the named tensors: `A`, `B` and `head`."""
    return {name.partition(".lora_")[2][:1] or "head" for name in names}


@pytest.mark.parametrize("ranks", [[4], [4, 1, 2]])
@pytest.mark.parametrize("base", BASES)
def test_whole_runs_equal_the_reference(federation, base, ranks):
    """Cohorts of two of three clients with unequal depths, three rounds, in double precision."""
    changes = {"method": "rolora", "base_optimizer": {"name": base, **BASES[base]}}
    small = doubled(federation({**COMMON, **changes, "lora.rank": 4, "federation.ranks": ranks}))
    played = reference.RoLoRA(world_of(small), small.fresh)
    played.ranks = {one.id: one.rank for one in small.clients}
    compare(small, played)


@pytest.mark.parametrize("base", BASES)
def test_each_round_changes_only_one_factor_and_the_head(federation, base):
    """Neither weight decay, momentum nor the base optimizer changes the other factor."""
    changes = {"optimizer": STRONG, "base_optimizer": {"name": base, **BASES[base]}}
    results = list(federate(federation({**ROUNDS, **changes})))
    changed = [kinds(moved(one.state.adapter, other.state.adapter)) for one, other in pairwise(results)]
    assert changed == [{"B", "head"}, {"A", "head"}] * 2


@pytest.mark.parametrize("base", BASES)
def test_the_mean_of_the_products_is_exact_for_equal_ranks(federation, base):
    changes = {"base_optimizer": {"name": base, **BASES[base]}, "federation.depths": [12, 6, 3], "federation.rounds": 2}
    _, *results = federate(federation({**ROUNDS, **changes}))
    assert len(results) == 2
    for result in results:
        assert result.metrics[RESIDUAL] < 1e-6
    _, *inexact = federate(federation({**ROUNDS, **changes, "method": "all_large"}))
    assert all(result.metrics[RESIDUAL] > 1e-6 for result in inexact)


@pytest.mark.parametrize("method", ["rolora", {"name": "fedra"}])
def test_the_mean_is_that_of_the_only_client(federation, method):
    """For a cohort of one, the state after a round is the client's update."""
    changes = {"method": method, "data.domains": ["plain"], "federation.depths": [12], "federation.rounds": 2}
    if method != "rolora":
        changes["aggregation.lora"] = "freeze_a"
    small = federation(changes)
    start, *results = federate(small)
    for round, (before, after) in enumerate(zip([start, *results], results, strict=False), start=1):
        cohort = small.cohort(round)
        rows = small.allocate(before.state, cohort, round)
        (update,) = small.method.local_updates(before.state, cohort, rows, small.trainer.at(round))
        assert after.metrics[RESIDUAL] == pytest.approx(0, abs=1e-6)
        for name, tensor in update.adapter.items():
            torch.testing.assert_close(after.state.adapter[name], tensor, rtol=1e-6, atol=1e-8)
        assert moved(before.state.adapter, after.state.adapter) <= set(update.adapter)


def sizes(state: ServerState, kind: str) -> int:
    return size_in_bytes({name: one for name, one in state.adapter.items() if kinds([name]) == {kind}})


def test_a_full_cohort_sends_and_receives_one_factor_and_the_head(federation):
    """Only in the first round does a client receive both factors."""
    start, *results = federate(federation({**ROUNDS, "lora.position": "l1"}))
    a, b, head = (sizes(start.state, kind) for kind in ("A", "B", "head"))
    assert a == 2 * b  # the last layer of the MLP has twice as many inputs as outputs
    assert [one.metrics["bytes/up"] for one in results] == [3 * (b + head), 3 * (a + head)] * 2
    down = [3 * (a + b + head), 3 * (b + head), 3 * (a + head), 3 * (b + head)]
    assert [one.metrics["bytes/down"] for one in results] == down


def test_a_client_that_missed_a_round_receives_both_factors(federation):
    small = federation({**ROUNDS, "federation.clients_per_round": 2, "seed": 1})
    start, *results = federate(small)
    a, b, head = (sizes(start.state, kind) for kind in ("A", "B", "head"))
    seen = set()
    for round, result in enumerate(results[1:], start=2):
        now, before = ({one.id for one in small.cohort(one)} for one in (round, round - 1))
        stayed, changed = len(now & before), b if round % 2 == 0 else a
        expected = stayed * (changed + head) + (2 - stayed) * (a + b + head)
        assert result.metrics["bytes/down"] == expected
        seen.add(stayed)
    assert seen == {1, 2}


def test_a_client_with_more_blocks_or_a_larger_rank_receives_both_factors(federation):
    """A client whose size is drawn in each round still has the frozen factor of the blocks and rows that it had."""
    changes = {"federation.depths": "dynamic", "federation.ranks": "dynamic", "federation.rounds": 8, "lora.rank": 3}
    small, results = federation({**ROUNDS, **changes}), []
    results = list(federate(small))
    kept = {True: 0, False: 0}
    for round in range(2, 9):
        state, before = results[round - 1].state, small.allocate(results[round - 2].state, small.cohort(round - 1), 1)
        for client, row in small.allocate(state, small.cohort(round), round).items():
            has = row.rank <= before[client].rank and len(row.held) <= len(before[client].held)
            names = small.method.received_names(state, client, row)
            assert {layer_of(name) for name in names} - {None} == set(row.held)
            trained = "B" if round % 2 else "A"
            assert kinds(names) == ({"A", "B", "head"} - ({trained} if has else set()))
            kept[has] += 1
    assert min(kept.values()) > 2


def test_a_columns_mean_is_over_the_clients_whose_rank_reaches_it(federation):
    """The mean of the products counts missing columns as zero, and therefore differs."""
    small = federation({**ROUNDS, "lora.rank": 4, "federation.ranks": [4, 2, 1]})
    _, first, second, *_ = federate(small)
    assert all(math.isfinite(one.metrics[RESIDUAL]) for one in (first, second))
    assert first.metrics[RESIDUAL] > 0.01


@pytest.mark.parametrize("changes", [{"aggregation.lora": "freeze_a"}, {"aggregation.lora": "product_svd"}])
def test_an_aggregation_of_another_kind_is_rejected(federation, changes):
    (value,) = changes.values()
    with pytest.raises(
        UserError,
        match=f"`aggregation.lora` must be factors for `method` rolora, which has a rule of its own, but it is {value}",
    ):
        federation({**ROUNDS, **changes})
