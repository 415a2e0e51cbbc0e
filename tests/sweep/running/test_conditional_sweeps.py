"""A whole grid sweep with conditions, and its report; `test_pruned_and_failed.py` tests sampled sweeps."""

from pathlib import Path

import pytest

from tests.sweep.helpers import GRID, fedsweep, newest, table, write_space

pytestmark = pytest.mark.slow

WHOLE = {"method": "inclusivefl", "method.beta": 0.2, "lora.rank": 4}


def test_one_factor_with_a_condition_runs_and_compares_every_arm_with_the_baseline(tmp_path: Path) -> None:
    axes = {
        "method": {"grid": ["inclusivefl", "fedra"]},
        "method.beta": {"grid": [0.2, 0.4], "when": {"method.name": "inclusivefl"}},
        "lora.rank": {"grid": [4, 1]},
    }
    write_space(tmp_path, "mine", {**GRID, "space": axes, "baseline": WHOLE})
    fedsweep(tmp_path, "tune", "mine", "--design", "one_factor", "federation.rounds=1", "--at-once", "1")
    trials = newest(tmp_path, "mine").trials()
    assert len(trials) == 2 * (1 + 1 + 1 + 1)
    assert {trial.outcome and trial.outcome.outcome for trial in trials} == {"finished"}
    for trial in trials:
        assert ("method.beta" in trial.plan.arm) == (trial.plan.arm["method"] == "inclusivefl")
    assert len(table(tmp_path, "mine").splitlines()) == 1 + 4
    report = (newest(tmp_path, "mine").folder / "report" / "table.md").read_text()
    for pair in ("method fedra against method inclusivefl, beta 0.2", "beta 0.4 against 0.2", "rank 1 against 4"):
        assert pair in report
    again = fedsweep(tmp_path, "tune", "mine", "federation.rounds=1", "--resume", "--dry-run")
    assert "lora.rank=1" in again.stdout
