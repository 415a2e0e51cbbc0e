"""Budgets of clients: the largest depths and ranks whose costs are within a share of the full model's cost."""

from dataclasses import replace

import pytest

from fedsweep.common.errors import UserError
from fedsweep.federation.budget import Size, _balanced, _last, amount, counter_of
from fedsweep.federation.client_costs import cost_counter
from fedsweep.training.counting_trainer import CountingTrainer

SHARES = [1.0, 0.7, 0.3]
COSTS = ("bytes_up", "trained_parameters", "flops", "memory")


@pytest.fixture
def planned(tiny):
    """Return a function that makes a configuration with budgets for three clients."""

    def make(**changes):
        budgets = {"lora.rank": 6, "federation.depths": None, "federation.capacity": SHARES, "method": "fedra"}
        return tiny.override({**budgets, **changes}, "test")

    return make


def costs_of(config, client, size, count_step=True):
    """Return the costs of a client of the given size."""
    counter = counter_of(config, dict.fromkeys(config.client_domains(), size))
    return counter.largest_costs(next(one for one in counter.clients if one.id == client), count_step)


def full_cost(config, cost):
    """Return the cost of a client with all blocks and the full rank, counted without a budget."""
    plain = config.override({"federation.capacity": None, "federation.depths": [12], "method": "all_large"}, "test")
    first = cost_counter(plain, 10).clients[0]
    return amount(cost_counter(plain, 10).costs(first), cost)


@pytest.mark.parametrize("cost", COSTS)
def test_the_depth_is_the_largest_one_within_the_budget(planned, cost):
    config = planned(**{"federation.budget": cost})
    whole = full_cost(config, cost)
    for share, (client, depth) in zip(SHARES, config.capacities().items(), strict=True):
        assert amount(costs_of(config, client, Size(depth, None)), cost) <= share * whole * (1 + 1e-9)
        if depth < 12:
            assert amount(costs_of(config, client, Size(depth + 1, None)), cost) > share * whole
    depths = list(config.capacities().values())
    assert depths == sorted(depths, reverse=True)
    assert depths[2] < depths[1] < depths[0] == 12
    assert set(config.client_ranks().values()) == {None}
    assert config.depths() == set(depths)


@pytest.mark.parametrize("cost", ["bytes_up", "trained_parameters"])
def test_the_rank_is_the_largest_one_within_the_budget(planned, cost):
    config = planned(**{"federation.budget": cost, "federation.fit": "rank"})
    whole = full_cost(config, cost)
    ranks = config.client_ranks()
    assert set(config.capacities().values()) == {12}
    for share, (client, rank) in zip(SHARES, ranks.items(), strict=True):
        assert amount(costs_of(config, client, Size(12, rank)), cost) <= share * whole * (1 + 1e-9)
        if rank < 6:
            assert amount(costs_of(config, client, Size(12, rank + 1)), cost) > share * whole
    assert list(ranks.values()) == sorted(ranks.values(), reverse=True)
    assert config.ranks() == set(ranks.values())
    assert config.least_rank() == min(ranks.values())


def test_depth_and_rank_of_equal_bytes_have_equal_shares(planned):
    """A client of d blocks sends as many bytes as one of rank d if there are as many ranks as blocks."""
    wide = {"lora.rank": 12, "federation.capacity": [1.0, 0.52, 0.27]}
    deep, ranked = planned(**wide), planned(**wide, **{"federation.fit": "rank", "method": "all_large"})
    assert list(deep.capacities().values()) == list(ranked.client_ranks().values()) == [12, 6, 3]


@pytest.mark.parametrize(
    "fits", [lambda size: size.depth * size.rank <= 24, lambda size: 5 * size.depth + size.rank < 40]
)
def test_both_shares_are_reduced_as_little_as_possible(fits):
    found = _balanced(12, 8, fits)
    sizes = [Size(depth, rank) for depth in range(1, 13) for rank in range(1, 9)]
    allowed = [size for size in sizes if fits(size)]

    def level(size):
        return min(size.depth / 12, size.rank / 8)

    assert found in allowed
    assert level(found) == max(map(level, allowed))
    assert not any(one.depth > found.depth for one in allowed if level(one) == level(found) and one.rank >= found.rank)
    assert Size(found.depth, found.rank + 1) not in allowed


def test_nothing_fits_a_budget_below_the_smallest_size():
    assert _balanced(12, 8, lambda size: False) is None
    assert [_last(5, lambda number, most=most: number <= most) for most in (0, 1, 4, 9)] == [0, 1, 4, 5]


def test_a_run_with_budgets_equals_the_run_with_the_depths_and_ranks_that_follow(federation):
    """Only the hyperparameters differ: the clients, and thus all rounds, are those of explicit depths and ranks."""
    small = {"lora.rank": 6, "method": "all_large"}
    fitted = federation({**small, "federation.depths": None, "federation.capacity": SHARES, "federation.fit": "rank"})
    ranks = [client.rank for client in fitted.clients]
    given = federation({**small, "federation.depths": [12], "federation.ranks": ranks})
    sizes = [(one.id, one.capacity, one.rank) for one in given.clients]
    assert [(one.id, one.capacity, one.rank) for one in fitted.clients] == sizes
    assert len(set(ranks)) == 3
    assert fitted.server.ranks == given.server.ranks


def test_the_seed_does_not_change_the_sizes(planned):
    assert planned().capacities() is not None
    assert planned(seed=3).capacities() == planned(seed=0).capacities()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"federation.depths": [12]}, "exactly one of `federation.depths` and `federation.capacity` must be given, but "
         "both are given"),
        ({"federation.capacity": None}, "exactly one of `federation.depths` and `federation.capacity` must be given, "
         "but neither is"),
        ({"federation.ranks": [2]}, "`federation.ranks` must be null if `federation.capacity` is given"),
        ({"federation.capacity": [1.0, 0.5]}, "`federation.capacity` must have one share for each of the 3 clients, or "
         "one for all clients, but it has 2: [1.0, 0.5]"),
        ({"federation.capacity": [0.01]}, "`federation.capacity` must be at least 0."),
        ({"federation.fit": "rank", "federation.budget": "memory", "federation.capacity": [0.5]},
         "because a client with all blocks and rank 1 takes this share of the full model's peak memory, but"),
        ({"federation.fit": "rank", "method": "inclusivefl"}, "`federation.fit` must be depth, because `method` "
         "inclusivefl needs adapters of one rank, but it is rank"),
    ],
)  # fmt: skip
def test_budgets_that_cannot_be_met_are_rejected_in_one_sentence(planned, changes, sentence):
    with pytest.raises(UserError) as caught:
        planned(**changes)
    assert sentence in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_the_smallest_share_in_the_message_is_accepted(planned):
    with pytest.raises(UserError) as caught:
        planned(**{"federation.capacity": [0.01]})
    least = float(str(caught.value).split("must be at least ")[1].split(" ")[0])
    assert set(planned(**{"federation.capacity": [least]}).capacities().values()) == {1}


@pytest.mark.parametrize("cost", COSTS)
def test_a_training_step_is_counted_only_if_the_budget_needs_it(planned, cost, monkeypatch):
    steps, fit = [], CountingTrainer.fit
    monkeypatch.setattr(CountingTrainer, "fit", lambda *a: steps.append(a) or fit(*a))
    unknown = 33 + COSTS.index(cost)  # a batch size that no other test uses, so no counter is cached
    config = planned(**{"federation.budget": cost, "local.batch_size": unknown})
    assert bool(steps) is (cost in ("flops", "memory"))
    client = next(iter(config.client_domains()))
    few, every = (costs_of(config, client, Size(3, None), count_step) for count_step in (False, True))
    assert few == replace(every, forward=None, backward=None, memory=None, missing="No training step was counted.")


def test_costs_do_not_depend_on_the_images_of_a_client(planned):
    config = planned()
    one, other = list(config.client_domains())[:2]
    assert costs_of(config, one, Size(3, 2)) == costs_of(config, other, Size(3, 2))


@pytest.mark.parametrize("method", ["all_large", "fedsa_lora"])
def test_a_method_whose_clients_hold_all_blocks_does_not_fit_a_smaller_depth(planned, method):
    with pytest.raises(UserError) as caught:
        planned(method=method, **{"federation.capacity": [0.3]})
    assert f"for `method` {method}, whose clients take this share of the full model's" in str(caught.value)
    assert str(caught.value).endswith("with every depth, but one is 0.3.")


def test_a_method_whose_model_depends_on_all_depths_cannot_have_budgets(planned):
    """AllSmall has as many blocks as the smallest client, so a client's cost is unknown until all depths are chosen."""
    with pytest.raises(UserError, match=r"`federation.capacity` cannot be used with `method` all_small, whose model"):
        planned(method="all_small")
    fixed = planned(method={"name": "all_small", "depth": 3})
    assert costs_of(fixed, next(iter(fixed.client_domains())), Size(3, None)).bytes_up < full_cost(fixed, "bytes_up")


def test_the_full_model_trains_both_factors(planned):
    """A frozen A is not sent, so more blocks fit the same number of bytes."""
    both, frozen = planned(), planned(**{"aggregation.lora": "freeze_a"})
    assert list(frozen.capacities().values())[1] > list(both.capacities().values())[1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lora.position": "all"}, "`lora.position` must be l0, l1 or both for `backbone` digits_vit, but it is all"),
        ({"method": "promptfl"}, "`method` promptfl needs a `backbone` with a text encoder"),
        ({"lora.rank": 500}, "`lora.rank` must be at most"),
    ],
)
def test_a_model_that_cannot_be_built_is_rejected_before_its_costs_are_counted(planned, changes, sentence):
    with pytest.raises(UserError) as caught:
        planned(**changes)
    assert sentence in str(caught.value)


def test_the_most_expensive_stage_counts(planned):
    """RoLoRA trains and sends A and B in alternate rounds. The layers after the MLP have more inputs than outputs."""
    config = planned(**{"method": "rolora", "federation.fit": "rank", "federation.capacity": [0.6, 0.4, 0.2]})
    plain = config.override({"federation.capacity": None, "federation.depths": [12]}, "test")
    counter = cost_counter(plain, 10)
    costs = [counter.costs(counter.clients[0], stage=stage) for stage in counter.states]
    assert len(costs) == 2
    assert costs[0].bytes_up != costs[1].bytes_up
    whole = costs_of(config, next(iter(config.client_domains())), Size(12, None))
    assert whole.bytes_up == max(one.bytes_up for one in costs)
    assert whole.memory == max(one.memory for one in costs)
