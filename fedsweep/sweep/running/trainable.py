"""The function that runs one trial on a Ray worker, and the worker's scratch copy of a remote trial folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import traceback
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune

from fedsweep.common.errors import DivergenceError, UserError, disk_is_full
from fedsweep.common.files import held
from fedsweep.results import SweepStore, TrialStore
from fedsweep.results.remote import Place
from fedsweep.results.remote.mirror import Mirror
from fedsweep.results.remote.objects import UnreachableError, persistently
from fedsweep.sweep.cluster.gpus import Meter, meter, ran_out
from fedsweep.sweep.cluster.node_requirements import Arrival

if TYPE_CHECKING:
    from fedsweep.federation.run import Device
    from fedsweep.results.history import RoundRecord


PREFIX = "fedsweep-trial-"
TAKEN = "a process that lives has it."


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder, gone at the end; what workers that were killed have left goes first.

    Beside it lies a file that its worker has locked, so that a living worker's folder is told from a dead one's.
    """
    _sweep_up()
    with ExitStack() as stack:
        lock = _locked(stack)
        folder = lock.with_suffix("")
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            _remove(lock)


def _locked(stack: ExitStack) -> Path:
    """A new lock file, held; another name where a worker that sweeps up took the first one before it was locked."""
    while True:
        lock = Path(tempfile.gettempdir()) / f"{PREFIX}{uuid.uuid4().hex}.lock"
        with suppress(UserError):
            stack.enter_context(held(lock, TAKEN))
            return lock


def _sweep_up() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*.lock"):
        with suppress(UserError, OSError):  # a living worker's, or just removed
            if stat.S_ISREG((found := lock.lstat()).st_mode) and found.st_uid == os.getuid():
                with held(lock, TAKEN):
                    _remove(lock)


def _remove(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)


def train(
    config: dict[str, Any],
    *,
    sweep: str,
    threads: int,
    device: Device,
    environment: dict[str, str],
    arrival: Arrival | None = None,
    elsewhere: Place | None = None,
    system_metrics: bool = False,
) -> None:
    """Run to round `until` of the trial whose plan lies under the key `trial`; a round is on disk before it is told.

    It is held to the fraction `gpus` of a GPU, and tells what it takes of it, once it has played a round.
    Rounds that are there already are told again, so that whoever judges them sees each one. An error is the last thing
    told, under `error`, and not raised: what Ray sees as an error is then a lost worker, and it hands the trial out
    again. A store that is `elsewhere` and does not answer is that too.
    Heavy imports happen once per worker; Ray reuses workers between trials.
    """
    if arrival is None:
        os.environ.update(environment)  # a worker has another working directory
    with _at(elsewhere, config["trial"], SweepStore(Path(sweep)).trial(config["trial"])) as (store, send):
        _play(config, store, send, threads, device, arrival, system_metrics)


def _play(
    config: dict[str, Any],
    store: TrialStore,
    send: Callable[[], None],
    threads: int,
    device: Device,
    arrival: Arrival | None,
    system_metrics: bool,
) -> None:
    """Tell the rounds of a trial in that folder, each after it was sent."""
    measure = Meter()
    taken: dict[str, int] = {}
    there = len(store.history())
    try:
        if arrival is not None:
            arrival.enter()
        measure = meter(device, config["gpus"])
        with contextlib.closing(_rounds(store, config["until"], threads, device, measure, system_metrics)) as rounds:
            for number, record in enumerate(rounds):
                if number >= there:
                    taken = measure.read()
                    send()
                tune.report({**record.metrics, "round": record.round, "seconds": record.seconds, **taken})
    except UnreachableError:
        raise
    except Exception as error:
        last = store.history()[-1:]
        told = {"round": last[0].round if last else 0, "error": traceback.format_exc(), "kind": kind_of(error)}
        tune.report({**(last[0].metrics if last else {}), **taken, **told})
    finally:  # not before: the error's traceback, now gone, held tensors
        measure.release()


@contextlib.contextmanager
def _at(elsewhere: Place | None, key: str, here: TrialStore) -> Iterator[tuple[TrialStore, Callable[[], None]]]:
    """The trial's folder, and what sends what is new in it: where the store is elsewhere, a copy of this worker's own.

    Raises:
        UnreachableError: the store does not answer.
    """
    if elsewhere is None:
        yield here, lambda: None
        return
    place = elsewhere.below("trials", key)
    with scratch() as folder:
        mirror = Mirror(place.filesystem, place.base, folder)
        persistently(mirror.pull)
        yield TrialStore(folder), lambda: persistently(mirror.push)


def _rounds(
    store: TrialStore, until: int, threads: int, device: Device, measure: Meter, system_metrics: bool
) -> Generator[RoundRecord, None, None]:
    """The trial's rounds up to `until`; nothing is built for those that are on disk."""
    history = store.history()
    if history and history[-1].round >= until:
        yield from (record for record in history if record.round <= until)
        return
    import torch

    from fedsweep.common.process_usage import SystemMeter
    from fedsweep.federation.run import check_digests, run_durably
    from fedsweep.federation.run_config import RunConfig
    from fedsweep.models.weight_cache import keep

    torch.set_num_threads(threads)
    keep()
    plan = store.read().plan
    run = RunConfig.of(plan.config, f"trial {plan.key}")
    check_digests(run, plan.digests)
    measure.start()
    yield from run_durably(run, store.checkpoint, device, until, SystemMeter().read if system_metrics else dict)


def kind_of(error: Exception) -> str:
    """What kind of end it is: `diverged`, `full` (no space left), `memory` (too little of a GPU), or `failed`."""
    if isinstance(error, DivergenceError):
        return "diverged"
    if disk_is_full(error):
        return "full"
    return "memory" if ran_out(error) else "failed"
