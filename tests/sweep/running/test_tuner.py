"""The checks before Ray starts, and the records after Ray ends. No Ray is started."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsweep.common.errors import UserError
from fedsweep.results import Outcome, SweepStore
from fedsweep.results.checkpoint import Checkpoint, save
from fedsweep.results.history import RoundRecord
from fedsweep.sweep.cluster import cluster
from fedsweep.sweep.cluster.cluster import check_resources, concurrency
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import clear_leftovers, exclusively, mark_finished
from fedsweep.sweep.space.settings import Resources
from fedsweep.types import ServerState
from tests.sweep.helpers import GRID, ROUNDS, write_space


def test_only_trials_with_all_rounds_are_marked_as_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial with all rounds counts as finished even if the session ended before the outcome was written."""
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "tiny", GRID)
    sweep = SweepStore(tmp_path / "sweep")
    whole, part, pruned, fresh = Plan.read("tiny", {}, {}).grid()
    for plan, rounds in ((whole, ROUNDS), (part, ROUNDS - 1), (pruned, 1), (fresh, None)):
        trial = sweep.trial(plan.key)
        trial.plan(plan)
        if rounds is not None:
            history = tuple(RoundRecord(round, {"accuracy/mean": 0.5}, 1.0) for round in range(rounds + 1))
            save(trial.checkpoint, Checkpoint(rounds, ServerState({}, (0,)), history))
    sweep.trial(pruned.key).end(Outcome(outcome="pruned", round=1))
    mark_finished(sweep, ROUNDS)
    outcomes = [trial.outcome and (trial.outcome.outcome, trial.outcome.round) for trial in sweep.trials()]
    assert outcomes == [("finished", ROUNDS), None, ("pruned", 1), None]


def test_failed_trials_are_repeated_but_diverged_trials_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "tiny", GRID)
    sweep = SweepStore(tmp_path / "sweep")
    plans = Plan.read("tiny", {}, {}).grid()
    history = tuple(RoundRecord(round, {"accuracy/mean": 0.5}, 1.0) for round in range(2))
    for plan, outcome in zip(plans, ("failed", "diverged", "pruned"), strict=False):
        sweep.trial(plan.key).plan(plan)
        save(sweep.trial(plan.key).checkpoint, Checkpoint(1, ServerState({}, (0,)), history))
        sweep.trial(plan.key).end(Outcome(outcome=outcome, round=1))  # type: ignore[arg-type]
    torn = sweep.trial(plans[0].key).folder / ".checkpoint.safetensors.abc"
    torn.write_text("half")
    for retry, expected in ((False, ["failed", "diverged", "pruned"]), (True, [None, "diverged", "pruned"])):
        clear_leftovers(sweep, ROUNDS, retry=retry)
        assert [trial.outcome and trial.outcome.outcome for trial in sweep.trials()] == expected
    assert not torn.exists()


def test_a_sweep_is_run_by_one_process_at_a_time(tmp_path: Path) -> None:
    sweep = SweepStore(tmp_path)
    with exclusively(sweep), pytest.raises(UserError, match="is being run by another process"), exclusively(sweep):
        pass
    with exclusively(sweep):
        pass


@pytest.mark.parametrize(
    ("cpus", "gpus", "side_by_side"),
    [(1, 0, 8), (2, 0, 4), (3, 0, 2), (0.5, 0, 16), (1, 0.5, 4), (1, 2, 1), (1, 0.3, 6)],
)
def test_the_number_of_parallel_trials(
    monkeypatch: pytest.MonkeyPatch, cpus: float, gpus: float, side_by_side: int
) -> None:
    """The machine has eight cores and two GPUs."""
    monkeypatch.setattr(cluster, "available_cpus", lambda: 8)
    monkeypatch.setattr("torch.cuda", SimpleNamespace(device_count=lambda: 2))
    resources = Resources(cpus_per_trial=cpus, gpus_per_trial=gpus)
    check_resources(resources)
    assert concurrency(resources) == side_by_side


@pytest.mark.parametrize("gpus", [1.5, 2.25, 3])
def test_gpus_that_ray_would_wait_for_are_rejected(monkeypatch: pytest.MonkeyPatch, gpus: float) -> None:
    monkeypatch.setattr("torch.cuda", SimpleNamespace(device_count=lambda: 2))
    with pytest.raises(UserError, match="`gpus_per_trial`"):
        check_resources(Resources(gpus_per_trial=gpus))
