"""Properties of FedRA."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.common.randomness import stream
from fedsweep.federation.rounds import federate
from fedsweep.methods import Server
from fedsweep.methods.fedra import FedRA, cover
from fedsweep.models.names import layer_of
from fedsweep.testing.compare import identical_rounds, moved
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.types import Client, ImageSet, ServerState

SERVER = Server(12, AggregationConfig(), (12,))
STATE = ServerState({}, tuple(range(12)))


def clients(depths: list[int]) -> list[Client]:
    nothing = ImageSet(torch.empty(0, 3, 1, 1, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    return [Client(f"client {place:02}", "plain", nothing, depth) for place, depth in enumerate(depths)]


def matrix(method: FedRA, depths: list[int], seed: int) -> np.ndarray:
    """Return the allocation matrix M (clients, blocks), in which 1 means that a client holds a block."""
    cohort = clients(depths)
    rows = method.allocate(STATE, cohort, SERVER, stream(seed, "allocation"))
    drawn = np.zeros((len(depths), 12), dtype=int)
    for row, client in zip(drawn, cohort, strict=True):
        row[list(rows[client.id].held)] = 1
    return drawn


def test_at_full_depth_fedra_equals_all_large(federation):
    full = {"federation.depths": [12, 12, 12], "local.steps": 1}
    first, second = (federate(federation({"method": name, **full})) for name in ("fedra", "all_large"))
    assert identical_rounds(first, second)


def test_every_block_is_drawn_in_proportion_to_the_depth():
    depths, draws = [12, 6, 3, 1], 1500
    frequency = sum(matrix(FedRA(), depths, seed) for seed in range(draws)) / draws
    for row, depth in zip(frequency, depths, strict=True):
        deviation = np.sqrt(depth / 12 * (1 - depth / 12) / draws)
        assert np.abs(row - depth / 12).max() <= 4 * deviation


def test_blocks_are_drawn_anew_in_each_round_and_independently_for_each_client():
    first, second = matrix(FedRA(), [6, 6], 0), matrix(FedRA(), [6, 6], 1)
    assert (first != second).any()
    assert any((drawn[0] != drawn[1]).any() for drawn in (first, second))


DEPTHS = st.lists(st.integers(1, 12), min_size=1, max_size=8).filter(lambda depths: sum(depths) >= 12)


@given(DEPTHS, st.integers(0, 99))
def test_ensure_cover_draws_every_block_and_keeps_the_row_sums(depths, seed):
    drawn = matrix(FedRA(missing_layers="ensure_cover"), depths, seed)
    assert drawn.sum(axis=1).tolist() == depths
    assert drawn.any(axis=0).all()


def test_without_ensure_cover_some_blocks_have_no_client():
    missing = [12 - matrix(FedRA(), [6, 6], seed).any(axis=0).sum() for seed in range(50)]
    assert sum(missing) > 50


def test_ensure_cover_swaps_as_few_blocks_as_possible():
    rng = np.random.default_rng(0)
    for _ in range(50):
        drawn = rng.permuted(np.arange(12) < np.array([[8], [5], [3]]), axis=1)
        mended = drawn.copy()
        cover(mended, rng)
        assert (drawn & ~mended).sum() == (mended & ~drawn).sum() == (~drawn.any(axis=0)).sum()


def test_too_few_drawn_blocks_cannot_cover_all_blocks():
    with pytest.raises(ValueError, match=r"^11 drawn blocks cannot cover 12 blocks$"):
        cover(np.arange(12)[None] < 11, np.random.default_rng(0))


def test_depths_that_cannot_cover_all_blocks_are_rejected_before_a_run():
    FedRA().check([4, 4, 3], 12, AggregationConfig())
    FedRA(missing_layers="ensure_cover").check([4, 4, 4], 12, AggregationConfig())
    with pytest.raises(ValueError, match="ensure_cover") as refusal:
        FedRA(missing_layers="ensure_cover").check([4, 4, 3], 12, AggregationConfig())
    assert str(refusal.value) == (
        "`method.missing_layers` ensure_cover needs depths that sum to at least 12 in every cohort, "
        "but [4, 4, 3] sum to 11"
    )


def test_a_block_without_clients_stays_bit_identical_and_the_others_change(federation):
    start, first, second = federate(federation({"method": "fedra", "federation.depths": [2, 1, 3]}))
    for before, after in ((start, first), (first, second)):
        touched = {layer_of(name) for name in moved(before.state.adapter, after.state.adapter)}
        kept = set(range(12)) - touched
        assert None in touched
        assert len(kept) >= 12 - 2 - 1 - 3
        assert len(touched - {None}) >= 3


def test_the_server_runs_all_blocks(federation):
    small = federation({"method": "fedra", "federation.depths": [2, 1, 3]})
    assert small.initial_state().layers == tuple(range(12))
