"""One run outside a sweep, kept in the store and in MLflow like a trial."""

import datetime
import secrets
import traceback
from collections.abc import Callable

from fedsweep.experiment import RunConfig
from fedsweep.history import RoundRecord
from fedsweep.play import Device, content_digests, run_durably
from fedsweep.store import Outcome, Store, TrialPlan, TrialStore
from fedsweep.tracking import Recorder


def record_run(
    name: str, config: RunConfig, store: Store, device: Device, show: Callable[[RoundRecord], None]
) -> TrialStore:
    """Play a run, hand every round to `show`, and keep everything, an error's traceback included."""
    stamp = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    trial = TrialStore(store.root / "runs" / name / stamp)
    resolved, digests = config.model_dump(mode="json"), content_digests(config)
    marks = config.marks()
    trial.plan(TrialPlan(key=stamp, number=0, arm={}, seed=config.seed, config=resolved, digests=digests, marks=marks))
    recorder = Recorder(store, name)
    recorder.sync(trial.read())
    try:
        for record in run_durably(config, trial.checkpoint, device):
            show(record)
            recorder.sync(trial.read())
    except (KeyboardInterrupt, BrokenPipeError):
        recorder.interrupt(trial.read())
        raise
    except Exception:
        history = trial.history()
        trial.end(Outcome(outcome="failed", round=history[-1].round if history else 0, error=traceback.format_exc()))
        recorder.sync(trial.read())
        raise
    trial.end(Outcome(outcome="finished", round=config.federation.rounds))
    recorder.sync(trial.read())
    return trial
