"""The result that a trial reports if it cannot begin. No Ray is started."""

import sys
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from fedsweep.results import SweepStore, TrialPlan
from fedsweep.sweep.running.trainable import train


@pytest.mark.parametrize("module", ["torch", "fedsweep.federation.build_and_run"])
def test_an_import_that_fails_is_reported_as_an_error_of_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(tune, "report", reported.append)
    monkeypatch.setitem(sys.modules, module, None)
    SweepStore(tmp_path).trial("k").plan(TrialPlan(key="k", number=0, arm={}, seed=0, config={}))
    given = {"trial": "k", "until": 1, "gpus": 0}
    train(given, sweep=str(tmp_path), threads=1, device="cpu", environment={})
    (last,) = reported
    assert (last["round"], last["kind"]) == (0, "failed")
    assert f"import of {module} halted" in last["error"]
