"""Properties of AllSmall."""

import pytest

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import federate
from fedsweep.models.names import layer_of
from fedsweep.testing.compare import identical_rounds, moved


def test_only_the_smallest_clients_blocks_ever_run(federation):
    small = federation({"method": "all_small", "federation.depths": [12, 6, 3]})
    ran: set[int] = set()
    for layer, block in enumerate(small.model.backbone.blocks):
        block.register_forward_hook(lambda *_, layer=layer: ran.add(layer))
    results = list(federate(small))
    assert len(results) == 3
    assert ran == {0, 1, 2}
    assert all(result.state.layers == (0, 1, 2) for result in results)


def test_the_blocks_above_stay_bit_identical(federation):
    start, *_, last = federate(federation({"method": "all_small", "federation.depths": [12, 6, 3]}))
    assert {layer_of(name) for name in moved(start.state.adapter, last.state.adapter)} == {None, 0, 1, 2}


def test_the_larger_clients_depths_do_not_matter(federation):
    first, second = (
        federate(federation({"method": "all_small", "federation.depths": depths})) for depths in ([12, 6, 3], [3, 3, 8])
    )
    assert identical_rounds(first, second)


def test_the_depth_is_the_minimum_over_all_clients_and_not_over_the_cohort(federation):
    small = federation({"method": "all_small", "federation.depths": [2, 6, 9], "federation.clients_per_round": 1})
    assert [result.state.layers for result in federate(small)] == [(0, 1)] * 3


def test_the_depth_can_be_given(federation):
    small = federation({"method": {"name": "all_small", "depth": 2}, "federation.depths": [12, 6, 3]})
    assert small.initial_state().layers == (0, 1)


def test_a_depth_above_the_number_of_blocks_is_rejected(tiny):
    with pytest.raises(UserError, match=r"`method\.depth` must be at most 12, the number of blocks, but it is 13"):
        tiny.override({"method": {"name": "all_small", "depth": 13}}, "test")
