"""The display of a pre-training, with a bar on the terminal and rows on stdout."""

import io

import torch
from rich.console import Console

from fedsweep.pretraining import loop as module
from fedsweep.pretraining.loop import EpochTable, default_out, start
from fedsweep.pretraining.network import EpochRecord


def test_rows_go_to_a_pipe_and_the_bar_to_the_terminal(toy, capsys, monkeypatch):
    monkeypatch.setattr(module, "REFRESH", 0.0)
    session, _ = start(toy, default_out("toy"))
    terminal = io.StringIO()
    with EpochTable(session, 1, Console(file=terminal, force_terminal=True, width=100)) as table:
        table.on_step(32, torch.tensor(1.25))
        table.add(EpochRecord(2, 1.25, 0.5, 0.75, 1e-3, 2.0))
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["epoch", "train", "loss", "val", "acc", "val", "loss", "lr", "seconds"]
    assert rows[1].split() == ["2", "1.2500", "50.00%", "0.7500", "1.00e-03", "2.0"]
    assert len(rows) == 2
    bar = terminal.getvalue()
    assert "epoch 2/3" in bar
    assert "images/s, loss 1.250, about" in bar
    assert "50.00%" not in bar


def test_without_a_terminal_the_loss_is_never_read(toy, capsys):
    session, _ = start(toy, default_out("toy"))
    with EpochTable(session, 0, Console(file=io.StringIO())) as table:
        table.on_step(32, torch.empty((), device="meta"))  # reading it would raise
    assert len(capsys.readouterr().out.splitlines()) == 1
