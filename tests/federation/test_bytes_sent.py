"""Clients in another process, which know only the tensors that the server sent them, train as in the run."""

import pytest
from safetensors.torch import save

from benchmarks.bytes import SETTINGS as COLUMNS
from benchmarks.bytes import ClientProcess, config_of, ranked_methods, rows
from fedsweep.federation.build_and_run import build
from fedsweep.federation.rounds import federate
from fedsweep.testing.cases import method_of
from fedsweep.testing.compare import identical
from fedsweep.training import local_training

SETTINGS = {
    "unequal ranks": {"federation.ranks": [8, 4, 1]},
    "partial cohorts": {"federation.ranks": [4, 2, 8], "federation.clients_per_round": 2, "seed": 1},
    "unequal depths and scalings": {
        "federation.ranks": [2, 8, 4],
        "federation.depths": [1, 2, 4],
        "lora.alpha": 8.0,
        "lora.scaling": None,
        "lora.rank_scaling": "over_rank",
    },
    "sizes drawn in each round": {"federation.ranks": "dynamic", "federation.depths": "dynamic"},
    "one rank": {"lora.dropout": 0.3},
}


@pytest.fixture(scope="module")
def process():
    """Return a process that trains clients."""
    started = ClientProcess()
    yield started
    started.close()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", ranked_methods())
def test_the_tensors_that_cross_a_process_boundary_are_those_of_the_costs(process, monkeypatch, method, setting):
    """The state after each round is bit-identical to the run's, and so are the numbers of bytes."""
    monkeypatch.setattr(local_training, "JOINED_ON_CPU", 1)  # together, clients differ by rounding
    changes = {"method": method, **SETTINGS[setting]}
    if changes.get("federation.ranks") == "dynamic" and getattr(method_of({"name": method}), "changes_ranks", False):
        changes["federation.ranks"] = [8, 4, 1]  # the method draws no ranks, but changes them
    config = config_of(changes)
    _, *expected = federate(build(config))
    crossed = list(process.play(config))
    assert len(crossed) == len(expected) == 3
    for ours, theirs in zip(crossed, expected, strict=True):
        assert ours.down == theirs.metrics["bytes/down"] > 0
        assert ours.up == theirs.metrics["bytes/up"] > 0
        assert identical(ours.state.adapter, theirs.state.adapter)
    assert not identical(expected[0].state.adapter, expected[1].state.adapter)


def test_a_tensor_that_is_missing_is_noticed(process):
    """A client process that did not receive a block has no values for it."""
    federation = build(config := config_of({"method": "all_large"}))
    state, (client, *_) = federation.initial_state(), federation.cohort(1)
    row = federation.allocate(state, [client], 1)[client.id]
    process.ask("begin", config)
    few = {name: one for name, one in state.adapter.items() if not name.startswith("backbone.blocks.2.")}
    with pytest.raises(RuntimeError, match=r"DivergenceError: the loss of client inverted became nan|KeyError"):
        process.ask("train", 1, client.id, row, {}, save({name: one.clone() for name, one in few.items()}))


def test_the_table_lists_the_kilobytes_of_each_setting(process):
    (found,) = rows(process, ["all_large"], 12, 4)
    assert len(found) == 1 + 2 * len(COLUMNS) == 11
    place = 1 + 2 * [*COLUMNS].index("ranks 8")
    ours = build(config_of({"method": "all_large"}))
    size = sum(one.numel() * one.element_size() for one in ours.initial_state().adapter.values())
    assert [found[0], *found[place : place + 2]] == ["`all_large`", *2 * [f"{3 * size / 1000:,.1f}"]]
