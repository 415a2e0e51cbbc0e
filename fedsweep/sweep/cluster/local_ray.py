"""Ray on this machine: its start in a thread of its own, and its end."""

import atexit
import contextlib
import gc
import logging
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.imports import without_collections
from fedsweep.common.process_usage import logical_gpus
from fedsweep.common.signals import ENDING, kept_actions
from fedsweep.sweep.cluster.cluster import LOCAL, OWN_RAY, available_cpus
from fedsweep.sweep.cluster.temporary_folders import ray_folder
from fedsweep.sweep.space.settings import Resources

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
ANSWER_SECONDS = 10.0
STARTS = 4
"""Number of attempts to start Ray on this machine. Ray gives up an attempt after 30 seconds."""
NEEDLESS = ("start_api_server", "start_monitor", "start_log_monitor")
"""Methods with which a node of Ray starts its dashboard, autoscaler and log reader; a sweep uses none of them."""
PRELOADED = "fedsweep.sweep.running.worker_imports"
"""The module that each worker imports as soon as it starts. Ray logs an error if the import fails."""
KEPT_MILLISECONDS = 600_000
"""Time in milliseconds for which Ray keeps an idle worker. Ray's default is one second if no CPU is free.

Ray Tune reserves the CPUs of a trial before it asks for a worker. In between, Ray would stop the workers that have
started in advance, and the first trials would wait until new workers have imported their modules.
"""
MOST_WARM = 16
"""Largest number of workers that start together with Ray. Each worker needs memory."""
PRESTARTED = "--num_prestart_python_workers="
"""The raylet's option for the number of workers that start with Ray, for which `ray.init` has no argument."""
NOT_INHERITED = ("PYTHONDONTWRITEBYTECODE", "RAY_gcs_rpc_server_reconnect_timeout_s")
"""Environment variables of this process that its Ray processes do not get."""
STOPPING = "Stopping as soon as Ray's start has ended; this command has recorded nothing so far."


class LocalRay:
    """A Ray instance on this machine that exists from `begin` to `end`.

    A thread starts and stops the instance, so that the main thread can check the sweep in the meantime. On Linux, the
    kernel ends Ray's processes together with the thread that has started them, so the thread lives as long as they do.
    The instance has a folder that other users cannot open, and that is deleted at the end.
    """

    def __init__(self, console: Console, resources: Resources, at_once: int | None = None) -> None:
        """Create the instance without starting it.

        Args:
            console: The console for progress messages.
            resources: The resources of each trial.
            at_once: The largest number of parallel trials, if it is known.
        """
        self.console, self._cpus = console, available_cpus()
        self.workers = min(int(self._cpus / resources.cpus_per_trial), at_once or MOST_WARM, MOST_WARM)
        """Number of workers that start before there is a trial."""
        self._processes = _Processes(self.workers, resources.threads)
        self._news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._started, self._stopping, self._ended = threading.Event(), threading.Event(), threading.Event()

    def begin(self) -> None:
        """Begin to start Ray, and return at once."""
        with without_collections():
            import ray  # noqa: F401  (in this thread, because two threads that import the same modules can interlock)

        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *ENDING))  # until the thread can be ended
        try:
            OWN_RAY.append(self)
            threading.Thread(target=self._run, args=(mask | {signal.SIGHUP},), name="ray", daemon=True).start()
        except RuntimeError:  # the system has no thread left, so nobody would end this instance
            OWN_RAY.remove(self)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def wait(self) -> None:
        """Wait until Ray has started, and show this on the console. Return at once if Ray has started already.

        Raises:
            UserError: Ray does not start on this machine.
        """
        if not self._started.is_set():
            self._show_start()
        if self._error is not None:
            raise self._error

    def _show_start(self) -> None:
        with self.console.status("Starting Ray ...") as status:
            if not self.console.is_terminal:
                self.console.print("Starting Ray ...")
            while (news := self._news.get()) is not None:
                status.update(news)
                if not self.console.is_terminal:
                    self.console.print(news)

    def end(self, interrupted: bool = False) -> None:
        """Stop Ray and delete its folder. If Ray is still starting, wait until the current attempt has ended.

        If `interrupted` is true, the console shows what the user has to wait for.
        """
        if self not in OWN_RAY:  # it has ended, or was interrupted before it began
            return
        if interrupted and not self._started.is_set():
            self.console.print(STOPPING)
        self._stopping.set()
        self._ended.wait()

    def _run(self, mask: set[signal.Signals]) -> None:
        """Start Ray, and stop it when the main thread asks to.

        Ray's processes inherit `mask`, the signals that this thread blocks. It contains SIGHUP, because a closing
        terminal must not end them.
        """
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            with ray_folder() as folder:
                self._start(str(folder))
                self._finish_start()
                self._stopping.wait()
                stop_ray()
        except Exception as error:  # `wait` raises it in the main thread
            self._error = error
        finally:
            self._finish_start()
            OWN_RAY.remove(self)
            self._ended.set()

    def _finish_start(self) -> None:
        self._started.set()
        self._news.put(None)

    def _start(self, folder: str) -> None:
        """Start Ray, and try again if the machine is too busy to start it in time."""
        import ray

        gpus = logical.count if (logical := logical_gpus()) else None
        own: dict[str, Any] = {"include_dashboard": False, "_temp_dir": folder}
        for attempt in range(1, STARTS + 1):
            try:
                with kept_actions(), _lean(), self._processes.patched():
                    ray.init(address=LOCAL, num_cpus=self._cpus, num_gpus=gpus, **own, **QUIET)
                return
            except Exception as error:  # a plain Exception if a node takes longer than the 30 s that Ray waits
                ray.shutdown()
                told, late = one_line(error).split(". ")[0], "timed out" in str(error)
                if not late or attempt == STARTS or self._stopping.is_set():
                    tries = f" after {attempt} attempts of 30 seconds" if late else ""
                    remedy = ", so run the same command again, when the machine is less busy" if late else ""
                    raise UserError(
                        f"Ray did not start on this machine{tries} ({told}); nothing was recorded{remedy}."
                    ) from None
            self._news.put(f"This machine is busy: Ray has not started yet (attempt {attempt + 1} of {STARTS}) ...")


@contextlib.contextmanager
def begun(console: Console, resources: Resources, at_once: int | None = None) -> Iterator[LocalRay]:
    """Begin to start a Ray instance on this machine, yield it, and stop it at the end of the block.

    An interrupt of the main thread takes effect at once, and the end of the block then waits for the current attempt to
    start Ray.
    """
    starting, interrupted = LocalRay(console, resources, at_once), False
    try:
        starting.begin()
        yield starting
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        starting.end(interrupted)


@contextlib.contextmanager
def _lean() -> Iterator[None]:
    """Let Ray start only the processes that a sweep needs within the block, which halves the time of the start.

    Ray has no options for this purpose. If a version of Ray lacks one of the methods, its process is started.
    """
    from ray._private import utils
    from ray._private.node import Node

    def missing() -> ImportError:
        return ImportError("the agent of the dashboard loads only what Ray itself needs")

    patched: list[tuple[Any, str, Any]] = [(Node, name, lambda *_, **__: None) for name in NEEDLESS]
    patched.append((utils, "get_dashboard_dependency_error", missing))
    kept = [(where, name, getattr(where, name, None), new) for where, name, new in patched]
    for where, name, _, new in kept:
        setattr(where, name, new)
    logger = logging.getLogger("ray._private.worker")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that it sets no signal handlers outside the main thread
    try:
        yield
    finally:
        logger.setLevel(level)
        for where, name, original, _ in kept:
            setattr(where, name, original)


@dataclass(frozen=True)
class _Processes:
    """The settings of Ray's processes on this machine for which Ray has no options."""

    workers: int
    """Number of workers that start together with Ray, before there is a trial."""
    threads: int
    """Number of threads of a worker."""

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Let Ray start its processes with these settings within the block.

        Each process of Ray gets a process group of its own. `ray job stop`, a shell and `timeout` send a signal to the
        whole process group of the sweep. If Ray's processes received it too, Ray's C++ code would end this process as
        soon as the raylet has ended, before the sweep can close its records. On Linux, the kernel ends Ray's processes
        if this process ends in any other way. Elsewhere, Ray needs the common process group for the same purpose.
        """
        from ray._private import services

        patched: Any = services
        original = patched.ConsolePopen
        group = {"process_group": 0} if sys.platform == "linux" else {}

        def popen(command: Sequence[str], **named: Any) -> subprocess.Popen[bytes]:
            words = [f"{PRESTARTED}{self.workers}" if one.startswith(PRESTARTED) else one for one in command]
            process: subprocess.Popen[bytes] = original(words, **named | group | {"env": self.variables(named["env"])})
            return process

        patched.ConsolePopen = popen
        try:
            yield
        finally:
            patched.ConsolePopen = original

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of Ray's processes. `inherited` are those of this process.

        A worker imports the modules of a trial as soon as it starts. PYTHONDONTWRITEBYTECODE is left out. With this
        variable, each worker would compile all modules that have no bytecode yet, for several seconds. The variable
        RAY_gcs_rpc_server_reconnect_timeout_s is left out, too. It is meant for this process only. After this process
        was killed, the two agents that the raylet has started would wait that long for the GCS before they end.
        """
        own = {
            "RAY_preload_python_modules": PRELOADED,
            "RAY_idle_worker_killing_time_threshold_ms": str(KEPT_MILLISECONDS),
            "OMP_NUM_THREADS": str(self.threads),
        }
        return {name: one for name, one in (own | dict(inherited)).items() if name not in NOT_INHERITED}


def lost_process() -> str:
    """Return the process that has ended although Ray on this machine needs it, or an empty string if there is none."""
    import ray

    node: Any = ray._private.worker._global_node
    if node is None:
        return ""
    for name, kind in (("raylet", "raylet"), ("GCS", "gcs_server")):
        if any(one.process.poll() is not None for one in node.all_processes.get(kind, ())):
            return f"the {name} on this machine"
    return ""


def stop_ray() -> None:
    """Shut down Ray. If it has lost a process, kill what is left of it, because `ray.shutdown` may wait for it."""
    import ray

    with _garbage_kept() as unfinished:
        if not lost_process():
            ray.shutdown()
            return
        node: Any = ray._private.worker._global_node
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
            # Ray would create its folder again to delete spilled objects, although it may be deleted by then.
            node.destroy_external_storage = lambda: None
        closing = threading.Thread(target=ray.shutdown, name="ray.shutdown", daemon=True)
        closing.start()
        closing.join(ANSWER_SECONDS / 2)
        if closing.is_alive():
            atexit.unregister(ray.shutdown)
            unfinished.set()


@contextlib.contextmanager
def _garbage_kept() -> Iterator[threading.Event]:
    """Keep garbage within the block: wait for a running collection to end, and let none begin.

    Some garbage refers to objects of Ray. If another thread, such as the one that imports MLflow, frees them while Ray
    shuts down, Ray's C++ code ends this process at once. If the yielded event is set, garbage is kept after the block.
    """
    enabled, own, collected = gc.isenabled(), threading.get_ident(), threading.Event()
    unfinished = threading.Event()

    def notice(phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() == own and phase == "stop":
            collected.set()

    gc.disable()
    gc.callbacks.append(notice)
    try:
        while not collected.is_set():
            gc.collect(0)  # returns at once while another thread collects
            collected.wait(0.01)
        yield unfinished
    finally:
        gc.callbacks.remove(notice)
        if enabled and not unfinished.is_set():
            gc.enable()
