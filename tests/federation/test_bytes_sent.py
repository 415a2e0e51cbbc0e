"""Clients in another process, which know only the tensors that the server sent them, train as in the run."""

from itertools import takewhile
from pathlib import Path

import pytest
from safetensors.torch import save

from benchmarks.bytes import COLUMNS, METHODS, WIDTH, ClientProcess, cell, config_of, table_rows
from fedsweep.federation.build_and_run import build
from fedsweep.federation.rounds import federate
from fedsweep.methods import BUILT_IN
from fedsweep.methods.capabilities import UnequalRanks
from fedsweep.testing.compare import identical
from fedsweep.training import local_training

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "ranks.md"
ROWS = table_rows()
RANKED = [name for name, one in zip(METHODS, BUILT_IN, strict=True) if issubclass(one, UnequalRanks)]
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


def cases():
    """Return the rows and settings; the default tier has all settings of `RANKED`, and partial cohorts of the rest."""
    return [
        pytest.param(
            row, setting, marks=[] if row.strip("`") in RANKED or setting == "partial cohorts" else pytest.mark.slow
        )
        for row, changes in ROWS.items()
        for setting in SETTINGS
        if changes["method"] in RANKED or setting != "unequal ranks"
    ]


def documented():
    """Return the cells of the table in docs/concepts/ranks.md, keyed by row and by column."""
    lines = PAGE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| method | full |"))
    (_, *columns), _, *rows = (
        [one.strip() for one in line.strip("|").split("|")]
        for line in takewhile(lambda line: line.startswith("|"), lines[start:])
    )
    return {row: dict(zip(columns, cells, strict=True)) for row, *cells in rows}


def cells():
    """Return the row and the column of each cell; the default tier has one cell of each row, in varying columns."""
    return [
        pytest.param(row, column, marks=[] if number % len(COLUMNS) == place else pytest.mark.slow)
        for number, row in enumerate(ROWS)
        for place, column in enumerate(COLUMNS)
    ]


@pytest.fixture(scope="module")
def process():
    """Return a process that trains clients."""
    started = ClientProcess()
    yield started
    started.close()


@pytest.mark.parametrize(("row", "setting"), cases())
def test_the_tensors_that_cross_a_process_boundary_are_those_of_the_costs(process, monkeypatch, row, setting):
    """The state after each round is bit-identical to the run's, and so are the numbers of bytes."""
    monkeypatch.setattr(local_training, "JOINED_ON_CPU", 1)  # together, clients differ by rounding
    changes = {**ROWS[row], **SETTINGS[setting]}
    if changes["method"] not in RANKED:
        changes.pop("federation.ranks", None)
    elif changes.get("federation.ranks") == "dynamic" and changes["method"] == "hetlora":
        changes["federation.ranks"] = [8, 4, 1]  # HetLoRA draws no ranks, but changes them
    config = config_of(changes)
    _, *expected = federate(build(config))
    crossed = list(process.play(config))
    trains = config.method.name != "zero_shot"
    assert len(crossed) == len(expected) == 3
    for ours, theirs in zip(crossed, expected, strict=True):
        assert (ours.down, ours.up) == (theirs.metrics["bytes/down"], theirs.metrics["bytes/up"])
        assert (ours.down > 0, ours.up > 0) == (trains, trains)
        assert identical(ours.state.adapter, theirs.state.adapter)
    assert identical(expected[0].state.adapter, expected[1].state.adapter) != trains


def test_a_tensor_that_is_missing_is_noticed(process):
    """A client process that did not receive a block has no values for it."""
    federation = build(config := config_of({"method": "all_large"}))
    state, (client, *_) = federation.initial_state(), federation.cohort(1)
    row = federation.allocate(state, [client], 1)[client.id]
    process.ask("begin", config)
    few = {name: one for name, one in state.adapter.items() if not name.startswith("backbone.blocks.2.")}
    with pytest.raises(RuntimeError, match=r"DivergenceError: the loss of client inverted became nan|KeyError"):
        process.ask("train", 1, client.id, row, {}, save({name: one.clone() for name, one in few.items()}))


def test_a_cell_lists_the_kilobytes_of_all_clients(process):
    ours = build(config_of({"method": "all_large"}))
    size = sum(one.numel() * one.element_size() for one in ours.initial_state().adapter.values())
    assert cell(process, {"method": "all_large"}, COLUMNS["full"], 12) == f"{3 * size / 1000:,.1f}"


def test_the_documented_table_has_a_row_for_each_method():
    found = documented()
    assert [*found] == [*ROWS]
    assert {row["method"] for row in ROWS.values()} == {*METHODS}
    assert all([*row] == [*COLUMNS] for row in found.values())


@pytest.mark.parametrize(("row", "column"), cells())
def test_a_cell_of_the_documented_table_is_what_crosses_the_process_boundary(process, row, column):
    assert cell(process, ROWS[row], COLUMNS[column], WIDTH) == documented()[row][column]
