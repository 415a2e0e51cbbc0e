"""The output of `fedsweep status` for people."""

import io
import platform

import pytest
from rich.console import Console

from fedsweep.cli import watch


def shown(machine: str, objective: str) -> list[str]:
    """Return the lines that describe a running sweep with one running trial and two arms."""
    first = {"label": "lora.rank=4", "mean": 0.70802, "difference": -0.0165, "verdict": "open", "baseline": False}
    second = {"label": "lora.rank=8", "mean": None, "difference": None, "verdict": None, "baseline": True}
    arms = [{"n": 1, "p_holm": None, **arm} for arm in (first, second)]
    trial = {"label": "lora.rank=4", "seed": 1, "round": 2, "value": 0.5961}
    sweep = {
        "space": "ranks", "id": "one", "running": True, "process": 7, "machine": machine, "joined": [],
        "objective": objective, "rounds": 10,
        "trials": {"ended": 1, "begun": 1, "planned": None}, "parallel": 2, "seconds_left": None,
        "changes": [], "trials_begun": [trial], "arms": arms,
    }  # fmt: skip
    text = io.StringIO()
    watch._show(Console(file=text, width=80), sweep)
    return [" ".join(line.split()) for line in text.getvalue().splitlines() if line.strip()]


@pytest.mark.parametrize(("machine", "place"), [(platform.node(), ""), ("another", " on another")])
def test_the_machine_is_named_if_it_is_another_one(machine: str, place: str):
    first, second, *_ = shown(machine, "accuracy/mean")
    assert first == f"ranks@one: running (process 7{place})"
    assert second == "1 trial has ended, 1 is running"


def test_accuracies_are_in_percent_and_differences_in_points():
    lines = shown(platform.node(), "accuracy/mean")
    assert {"lora.rank=4 1 2/10 59.61%", "lora.rank=4 1 70.80% -1.65 points open", "lora.rank=8 1 - baseline -"} <= {
        *lines
    }


def test_other_metrics_have_four_decimals():
    assert {"lora.rank=4 1 2/10 0.5961", "lora.rank=4 1 0.7080 -0.0165 open"} <= {*shown("another", "loss/test")}
