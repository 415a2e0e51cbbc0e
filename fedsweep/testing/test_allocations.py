"""The blocks that a method allocates to the clients of a round. `--method` selects the method."""

import pytest

from fedsweep.common.randomness import stream
from fedsweep.common.yaml_values import Json
from fedsweep.methods.base import FederatedMethod
from fedsweep.testing.fixtures import NewFederation


def test_an_allocation_has_as_many_blocks_as_the_client_can_hold(
    federation: NewFederation, chosen: dict[str, Json]
) -> None:
    depths = [12, 5, 2]
    federated = federation({**chosen, "federation.depths": depths})
    state = federated.initial_state()
    counts: set[tuple[int, ...]] = set()
    for round in range(1, 21):
        rng = stream(0, "allocation", round)
        rows = federated.method.allocate(state, federated.clients, federated.server, rng)
        counts.add(tuple(len(rows[client.id].held) for client in federated.clients))
        for row in rows.values():
            assert list(row.held) == sorted(set(row.held))
            assert set(row.trained) <= set(row.held) <= set(range(12))
    (found,) = counts  # the number is the same in all rounds
    assert found == tuple(depths) or len(set(found)) == 1
    if type(federated.method).allocate is FederatedMethod.allocate:
        assert set(found) == {len(state.layers)}


@pytest.mark.parametrize("depths", [[12, 5, 2], [12]])
def test_the_method_declares_whether_it_draws_blocks(
    federation: NewFederation, chosen: dict[str, Json], depths: list[int]
) -> None:
    federated = federation({**chosen, "federation.depths": depths})
    state, method = federated.initial_state(), federated.method
    rngs = [stream(seed, "allocation", 1) for seed in range(20)]
    rows = [method.allocate(state, federated.clients, federated.server, rng) for rng in rngs]
    assert any(one != rows[0] for one in rows) == method.draws_blocks(depths, federated.model.num_layers)
