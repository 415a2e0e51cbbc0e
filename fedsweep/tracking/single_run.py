"""A function that runs an experiment outside of a sweep and records it in the results folder and in MLflow."""

import contextlib
import datetime
import secrets
import traceback
from collections.abc import Callable

from fedsweep.common.process_usage import SystemMeter
from fedsweep.federation.build_and_run import Device, content_digests, run_resumably
from fedsweep.federation.run_config import RunConfig
from fedsweep.results import Outcome, Store, TrialPlan, TrialStore
from fedsweep.results.history import RoundRecord
from fedsweep.results.remote.objects import UnreachableError
from fedsweep.tracking import Destination, Recorder
from fedsweep.types import RoundListener


def record_run(
    name: str,
    config: RunConfig,
    store: Store,
    device: Device,
    show: Callable[[RoundRecord], None],
    destination: Destination | None = None,
    system_metrics: bool = False,
    listener: RoundListener | None = None,
) -> tuple[TrialStore, Recorder]:
    """Run an experiment, pass each round's record to `show`, and record the results.

    If the run fails, its traceback is recorded. If `listener` is given, it follows the progress within each round.

    Returns:
        The run in the results folder, and the recorder that wrote the run to MLflow.
    """
    stamp = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    trial = store.run(name, stamp)
    resolved, digests = config.model_dump(mode="json"), content_digests(config)
    marks = config.marks()
    trial.plan(TrialPlan(key=stamp, number=0, arm={}, seed=config.seed, config=resolved, digests=digests, marks=marks))
    with Recorder(store, name, destination) as recorder:  # waits for MLflow at the end
        recorder.sync(trial.read())
        try:
            measure = SystemMeter().read if system_metrics else dict
            for record in run_resumably(config, trial.checkpoint, device, measure=measure, listener=listener):
                trial.remote.push()
                show(record)
                recorder.sync(trial.read())
        except (KeyboardInterrupt, BrokenPipeError):
            recorder.interrupt(trial.read())
            raise
        except Exception:
            last = max((record.round for record in trial.history()), default=0)
            trial.end(Outcome(outcome="failed", round=last, error=traceback.format_exc()))
            recorder.sync(trial.read())
            raise
        trial.end(Outcome(outcome="finished", round=config.federation.rounds))
        recorder.sync(trial.read())
        with contextlib.suppress(UnreachableError):  # the caller reports it
            trial.remote.push(needed=True)
    return trial, recorder
