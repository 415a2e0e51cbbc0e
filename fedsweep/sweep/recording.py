"""Ray's events in the driver: outcomes to the store, rounds to MLflow, rows to the live table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial

from fedsweep.store import Outcome, SweepStore, TrialPlan
from fedsweep.sweep.display import LiveTable
from fedsweep.tracking import Recorder


class Recording(Callback):
    """One writer for everything."""

    def __init__(self, sweep: SweepStore, recorder: Recorder, display: LiveTable, rounds: int) -> None:
        self.sweep, self.recorder, self.display, self.rounds = sweep, recorder, display, rounds

    def announce(self, plan: TrialPlan) -> None:
        """A trial is about to be handed to Ray: put its plan on disk first."""
        self.sweep.trial(plan.key).plan(plan)
        self.display.started(plan)
        self._sync(plan.key)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """A round is on disk."""
        self._sync(trial.config["trial"])

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """The trial ran to its end or the scheduler stopped it."""
        key = trial.config["trial"]
        last = trial.last_result.get("round", 0)
        outcome = "finished" if last >= self.rounds else "pruned"
        self.sweep.trial(key).end(Outcome(outcome=outcome, round=last))  # type: ignore[arg-type]
        self._sync(key)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """The trial raised or its worker died."""
        key = trial.config["trial"]
        store = self.sweep.trial(key)
        history = store.history()
        last = history[-1].round if history else 0
        if last < self.rounds:  # else it has all its rounds, and only its end went wrong
            store.end(Outcome(outcome="failed", round=last, error=_traceback_of(trial)))
        else:
            store.end(Outcome(outcome="finished", round=last))
        self._sync(key)

    def sync_all(self) -> None:
        """Bring MLflow up to the store once more, for what an earlier session or a locked database left out."""
        for trial in self.sweep.trials():
            self._sync(trial.plan.key)

    def _sync(self, key: str) -> None:
        record = self.sweep.trial(key).read()
        self.display.update(record)
        self.recorder.sync(record)

    def __getstate__(self) -> dict[str, Any]:
        """Ray pickles its callbacks; ours has nothing to restore."""
        return {}


def _traceback_of(trial: Trial) -> str:
    """The traceback inside the trial, from the file that Ray writes before it calls back; its storage gets it later."""
    path = trial.error_file
    if path is None or not Path(path).exists():
        return f"trial {trial.trial_id} ended with an error that Ray did not keep"
    lines = Path(path).read_text().strip().splitlines()
    return "\n".join(line for line in lines if not line.startswith("Failure # "))
