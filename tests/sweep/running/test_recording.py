"""The files that the driver writes after a worker is lost. No Ray is started."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from fedsweep.federation.rounds import ServerState
from fedsweep.results import SweepStore, TrialPlan
from fedsweep.results.checkpoint import Checkpoint, save
from fedsweep.results.history import RoundRecord
from fedsweep.sweep.cluster.packing import Packing
from fedsweep.sweep.running.recording import LOST_WORKERS, Recording, WriteGuard
from fedsweep.sweep.running.shared_sweep import OtherTrials
from fedsweep.sweep.running.steering import Steering

ROUNDS = 3
PLAN = TrialPlan(key="k", number=0, arm={"lora.rank": 4}, seed=0, config={})


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    sweep = SweepStore(tmp_path)
    sweep.trial("k").plan(PLAN)
    packing = Packing(0, 1, sweep)
    steering = Steering(MagicMock(), sweep)
    mocks, asked = (MagicMock(), MagicMock(), ROUNDS, MagicMock()), {"steering": steering, "others": OtherTrials(sweep)}
    return Recording(sweep, *mocks, WriteGuard(), packing, **asked)


def lose(recording: Recording, error_file: Path | None = None) -> Any:
    trial: Any = SimpleNamespace(config={"trial": "k"}, error_file=error_file, trial_id="t")
    recording.on_trial_error(0, [], trial)
    return recording.sweep.trial("k").outcome()


def test_mlflow_begins_to_write_when_a_trial_starts(recording: Recording) -> None:
    recording.sync("k")
    recorder: Any = recording.recorder
    assert (recorder.sync.call_count, recorder.begin.call_count) == (1, 0)
    recording.on_trial_start(0, [], MagicMock())
    assert recorder.begin.call_count == 1


def test_a_trial_that_loses_its_worker_too_often_has_failed(recording: Recording) -> None:
    for _ in range(LOST_WORKERS):
        assert lose(recording) is None
    said = [call.args[0] for call in recording.display.console.print.call_args_list]  # type: ignore[attr-defined]
    assert said == ["lora.rank=4: the worker was lost, and the trial continues after round 0."] * LOST_WORKERS
    failed = lose(recording)
    assert (failed.outcome, failed.reason) == ("failed", "its worker was lost 4 times")


@pytest.mark.parametrize(
    ("retried", "then"),
    [
        (True, ", then run the same command with `--resume`"),
        (
            False,
            " in the next search; `--resume` does not run this trial again, because later samples depend on "
            "its failure",
        ),
    ],
)
def test_a_worker_that_ray_kills_for_memory_is_replaced_and_then_the_reason_says_what_to_do(
    recording: Recording, tmp_path: Path, retried: bool, then: str
) -> None:
    recording.retried = retried
    error = tmp_path / "error.txt"
    error.write_text(
        "Failure # 1\n1 worker(s) were killed due to the node running low on memory. Memory on the node ..."
    )
    for _ in range(LOST_WORKERS):
        assert lose(recording, error) is None
    said = [call.args[0] for call in recording.display.console.print.call_args_list]  # type: ignore[attr-defined]
    assert {*said} == {
        "lora.rank=4: the worker was lost because the machine ran out of memory, and the trial continues after round 0."
    }
    assert lose(recording, error).reason == (
        "its worker was lost 4 times, the last time because the machine ran out of memory; free some memory or run "
        f"fewer trials in parallel (`--at-once`){then}"
    )


def test_a_lost_worker_whose_trial_has_no_plan_does_not_break_rays_loop(recording: Recording) -> None:
    """The plan is missing if the disk was full; only the message about the lost worker needs the plan."""
    recording.sweep.trial("k").folder.joinpath("trial.json").unlink()
    recording._lost["k"] = LOST_WORKERS
    assert lose(recording).outcome == "failed"


def test_a_trial_whose_worker_is_lost_after_the_last_round_has_finished(recording: Recording) -> None:
    history = tuple(RoundRecord(round, {}, 1.0) for round in range(ROUNDS + 1))
    save(recording.sweep.trial("k").checkpoint, Checkpoint(ROUNDS, ServerState({}, (0,)), history))
    assert lose(recording).outcome == "finished"
