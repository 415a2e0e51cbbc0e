"""The function that runs one trial on a Ray worker."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ray import tune

from fedsweep.common.errors import DivergenceError, disk_is_full
from fedsweep.common.files import LockedError
from fedsweep.results import Outcome, SweepStore, TrialStore
from fedsweep.results.remote import Place
from fedsweep.results.remote.mirror import Mirror
from fedsweep.results.remote.objects import UnreachableError, persistently
from fedsweep.results.trial_lock import Taken
from fedsweep.sweep.cluster.gpus import Meter, meter, ran_out
from fedsweep.sweep.cluster.temporary_folders import private_folder
from fedsweep.sweep.running.shared_sweep import LOOK_SECONDS

if TYPE_CHECKING:
    from fedsweep.federation.build_and_run import Device
    from fedsweep.results.history import RoundRecord
    from fedsweep.sweep.cluster.node_requirements import Arrival

PREFIX = "fedsweep-trial-"


def train(
    config: dict[str, Any],
    *,
    sweep: str,
    threads: int,
    device: Device,
    environment: dict[str, str],
    arrival: Arrival | None = None,
    remote: Place | None = None,
    system_metrics: bool = False,
    compared: Sequence[int] = (),
) -> None:
    """Run or continue a trial, and report each round to Ray once it is on disk.

    Rounds that are already on disk are reported again, so that the scheduler receives all rounds. The report of a new
    round includes the GPU memory that the trial used.

    The worker takes the trial first. If another process runs the trial, only the kind `taken` is reported.

    An error in the trial is not raised, but recorded, and reported under the key `error`. Ray itself sees an error only
    if the worker was lost or the remote store did not answer. In these cases, the trial is started again.

    Args:
        config: The trial's key (`trial`), the round to reach (`until`) and the trial's share of a GPU (`gpus`).
        sweep: The sweep's folder.
        threads: Number of threads for torch.
        device: The device for training.
        environment: Environment variables of the driver.
        arrival: The check that a worker on a cluster makes before its first trial.
        remote: The sweep's remote folder, if the results are in a remote store.
        system_metrics: Whether CPU, memory and GPU use are recorded.
        compared: The rounds at which the scheduler compares trials, which are always evaluated.
    """
    if arrival is None:
        os.environ.update(environment)  # a worker has another working directory than the driver
    local = SweepStore(Path(sweep)).trial(config["trial"])
    # Only one process runs a sweep in a remote store, so its trials need no lock.
    try:
        with local.take() if remote is None else nullcontext() as lock:
            if lock is None and remote is None:
                _report_end(local.history()[-1:], kind="taken")
                return
            _train(config, local, lock, threads, device, arrival, remote, system_metrics, compared)
    except OSError as error:  # the lock cannot be created
        if not disk_is_full(error):
            raise
        _report_end(local.history()[-1:], kind="full", error=traceback.format_exc())


def _train(
    config: dict[str, Any],
    local: TrialStore,
    lock: Taken | None,
    threads: int,
    device: Device,
    arrival: Arrival | None,
    remote: Place | None,
    system_metrics: bool,
    compared: Sequence[int],
) -> None:
    measure, memory = Meter(), dict[str, int]()
    with _trial_folder(remote, config["trial"], local) as (store, send):
        history = store.history()
        recorded, last_round = len(history), history[-1].round if history else 0
        if (known := store.error()) is not None:
            _report_end(history[-1:], kind=known.outcome, error=known.error)
            return
        try:
            if arrival is not None:
                arrival.enter()
            measure = meter(device, config["gpus"])
            played = _rounds(store, config["until"], compared, threads, device, measure, system_metrics)
            with closing(played) as rounds:
                for number, record in enumerate(rounds):
                    if number >= recorded:
                        memory = measure.read()
                        send()
                    # The driver may stop the trial here, and another process may then continue it.
                    with _unlocked(lock, store, max(record.round, last_round)):
                        tune.report({**record.metrics, "round": record.round, "seconds": record.seconds, **memory})
        except UnreachableError:
            raise
        except LockedError:
            _report_end(store.history()[-1:], kind="taken")
        except Exception as error:
            kind, text, last = kind_of(error), traceback.format_exc(), store.history()[-1:]
            if kind in ("diverged", "failed"):  # only these end a trial
                with suppress(OSError):  # the driver records it too
                    store.keep_error(Outcome(outcome=kind, round=last[0].round if last else 0, error=text))
            _report_end(last, kind=kind, error=text, **memory)
        finally:  # only now, because the error's traceback kept tensors alive
            measure.release()


@contextmanager
def _unlocked(lock: Taken | None, store: TrialStore, round: int) -> Iterator[None]:
    """Release the lock of a trial within the block, and raise LockedError if another process has then continued it.

    Args:
        lock: The lock; None if the trial needs none.
        store: The folder of the trial.
        round: The last recorded round.
    """
    if lock is None:
        yield
        return
    began = time.monotonic()
    with lock.paused():
        yield
    # Other processes leave a trial alone that was locked at one of their last two looks.
    if time.monotonic() - began > LOOK_SECONDS and (last := store.history()[-1:]) and last[0].round > round:
        raise LockedError("another process has continued the trial")


def _report_end(last: Sequence[RoundRecord], **end: object) -> None:
    """Report that a trial has ended without a new round. `last` contains its last recorded round, if any."""
    tune.report({**(last[0].metrics if last else {}), "round": last[0].round if last else 0, **end})


@contextmanager
def _trial_folder(remote: Place | None, key: str, local: TrialStore) -> Iterator[tuple[TrialStore, Callable[[], None]]]:
    """Yield the trial's folder, and a function that uploads its new files.

    If the store is remote, the folder is the worker's own copy. If the store is local, the function does nothing.
    """
    if remote is None:
        yield local, lambda: None
        return
    place = remote.below("trials", key)
    with private_folder(Path(tempfile.gettempdir()), PREFIX) as folder:
        mirror = Mirror(place.filesystem, place.base, folder)
        persistently(mirror.pull)
        yield TrialStore(folder), lambda: persistently(mirror.push)


def _rounds(
    store: TrialStore,
    until: int,
    compared: Sequence[int],
    threads: int,
    device: Device,
    measure: Meter,
    system_metrics: bool,
) -> Generator[RoundRecord, None, None]:
    """Yield the records of the trial's rounds up to `until`. If all of them are on disk, no model is built."""
    history = store.history()
    if history and history[-1].round >= until:
        yield from (record for record in history if record.round <= until)
        return
    import fedsweep.sweep.running.worker_imports  # noqa: F401  (it imports the other modules in less time)

    # isort: split
    import torch

    from fedsweep.common.process_usage import SystemMeter
    from fedsweep.federation.build_and_run import check_digests, run_resumably
    from fedsweep.federation.run_config import RunConfig
    from fedsweep.models.weight_cache import keep

    torch.set_num_threads(threads)
    keep()
    plan = store.read().plan
    run = RunConfig.of(plan.config, f"trial {plan.key}")
    check_digests(run, plan.digests)
    measure.start()
    system = SystemMeter().read if system_metrics else dict
    yield from run_resumably(run, store.checkpoint, device, until, system, compared=compared)


def kind_of(error: Exception) -> Literal["diverged", "full", "memory", "failed"]:
    """Return the kind of an error: `diverged`, `full` (disk is full), `memory` (GPU ran out of memory) or `failed`."""
    if isinstance(error, DivergenceError):
        return "diverged"
    if disk_is_full(error):
        return "full"
    return "memory" if ran_out(error) else "failed"
