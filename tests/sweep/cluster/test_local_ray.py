"""The start and the end of Ray on this machine, in a thread of its own. No Ray is started."""

import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import ray
from rich.console import Console

from fedsweep.common.errors import UserError
from fedsweep.common.signals import ending_signals_interrupt
from fedsweep.sweep.cluster import kept_ray, local_ray
from fedsweep.sweep.cluster import ray_session as ray_session_module
from fedsweep.sweep.cluster.cluster import HERE, OWN_RAY, ray_is_running
from fedsweep.sweep.cluster.local_ray import MOST_WARM, STOPPING, LocalRay, begun
from fedsweep.sweep.cluster.ray_session import OwnRay, ray_session, started_early
from fedsweep.sweep.space.settings import Resources

ONE = Resources(cpus_per_trial=1)
LATE = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


@pytest.fixture
def calls(clean: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the end of Ray, and return the list of the calls that start and end it. `clean` is in conftest.py."""
    called: list[str] = []
    monkeypatch.setattr("ray.shutdown", lambda: called.append("shutdown"))
    monkeypatch.setattr(local_ray, "lost_process", lambda: "")
    return called


@pytest.fixture
def starts(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that lets Ray start with the given results, and returns the list of calls."""

    def use(*results: Exception | None) -> list[str]:
        left = list(results)

        def init(**_: object) -> None:
            calls.append("init")
            if (result := left.pop(0)) is not None:
                raise result

        monkeypatch.setattr("ray.init", init)
        return calls

    return use


def test_a_ray_that_takes_too_long_to_start_gives_a_clear_error(
    starts: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    called, said = starts(*[Exception(LATE)] * 4), io.StringIO()
    waits, show, init = threading.Event(), LocalRay._show_start, ray.init

    def show_start(self: LocalRay) -> None:
        waits.set()
        show(self)

    def slow_init(**options: object) -> None:
        waits.wait(10)  # or else Ray fails before anybody waits for it, and nothing is said
        init(**options)

    monkeypatch.setattr(LocalRay, "_show_start", show_start)
    monkeypatch.setattr("ray.init", slow_init)
    with pytest.raises(UserError) as refused, begun(Console(file=said, width=200), ONE) as starting:
        starting.wait()
    assert str(refused.value) == (
        "Ray did not start on this machine after 4 attempts of 30 seconds (The current node timed out during startup); "
        "nothing was recorded, so run the same command again, when the machine is less busy."
    )
    assert called.count("init") == 4
    assert [line for line in said.getvalue().splitlines() if "busy" in line] == [
        f"This machine is busy: Ray has not started yet (attempt {number} of 4) ..." for number in (2, 3, 4)
    ]


def test_ray_that_starts_at_the_second_attempt_is_used_and_stopped(starts: Callable[..., list[str]]) -> None:
    called = starts(Exception(LATE), None)
    with ray_session():
        assert called == ["init", "shutdown", "init"]
    assert called[3:] == ["shutdown"]


def test_another_error_at_the_start_of_ray_is_not_repeated(starts: Callable[..., list[str]]) -> None:
    called = starts(ValueError("no such flag"))
    with pytest.raises(UserError, match=r"^Ray did not start on this machine \(no such flag\); "):
        ray_session().__enter__()
    assert called.count("init") == 1


def test_nothing_waits_for_ray_before_it_is_needed(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr("ray.init", lambda **_: may_end.wait(60) and calls.append("init"))
    with started_early("local", Console(quiet=True), ONE) as starting:
        assert starting is not None
        assert calls == []
        assert not ray_is_running()  # it is the sweep's own, so the sweep may use all cores
        may_end.set()
        with ray_session(starting=starting):
            assert calls == ["init"]
        assert calls == ["init"]
    assert calls == ["init", "shutdown"]


@pytest.mark.parametrize("change", [None, "resources", "busy", "lost"])
def test_sweeps_share_a_ray_unless_it_is_lost_busy_or_has_other_resources(
    starts: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, change: str | None
) -> None:
    called, warm = starts(None, None), list[int]()
    total = {"CPU": 2.0, "GPU": 1.0, "memory": 5.0}
    monkeypatch.setattr(kept_ray, "ANSWER_SECONDS", 0)
    monkeypatch.setattr(kept_ray, "lost_process", lambda: "the raylet" if change == "lost" else "")
    monkeypatch.setattr("ray.cluster_resources", lambda: total)
    monkeypatch.setattr("ray.available_resources", lambda: {**total, "memory": 1.0, "GPU": float(change != "busy")})
    monkeypatch.setattr(ray_session_module, "start_workers", warm.append)
    monkeypatch.setattr(local_ray, "available_cpus", lambda: 2)
    with OwnRay("local", Console(quiet=True)) as ray:
        ray.keep()
        assert warm == []
        for resources in (ONE, Resources(cpus_per_trial=2) if change == "resources" else ONE):
            ray.begin(resources)
            ray.begin(resources)  # once in advance, and once it is known that trials run
            with ray.session(HERE):
                pass
            ray.keep()
        assert called == (["init"] if change is None else ["init", "shutdown", "init"])
        assert warm == [2, 1 if change == "resources" else 2]
        ray.end()
        assert called.count("shutdown") == called.count("init")
    assert called.count("shutdown") == called.count("init")


def test_workers_that_cannot_start_in_advance_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("ray.nodes", lambda: asked.append("nodes") or [])
    kept_ray.start_workers(2)
    assert asked == ["nodes"]


def test_a_sweep_on_a_cluster_starts_nothing_here(starts: Callable[..., list[str]]) -> None:
    called = starts()
    with started_early("10.0.0.1:6379", Console(quiet=True), ONE) as starting:
        assert starting is None
    assert called == []


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_during_the_start_stops_ray_and_deletes_its_folder(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    folders: list[Path] = []

    def init(_temp_dir: str, **_: object) -> None:
        folders.append(Path(_temp_dir).parent)
        assert folders[0].exists()
        starting = cast(LocalRay, OWN_RAY[0])
        assert starting._stopping.wait(60)
        if fails:
            raise Exception(LATE)
        calls.append("init")

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(UserError, match="wrong data"), begun(Console(quiet=True), ONE):
        raise UserError("wrong data")
    assert calls == (["shutdown"] if fails else ["init", "shutdown"])
    assert len(folders) == 1  # no further attempt
    assert not folders[0].exists()


def test_a_signal_during_the_start_interrupts_at_once_and_ray_is_stopped_after_the_attempt(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()

    def init(**_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert cast(LocalRay, OWN_RAY[0])._stopping.wait(60)
        calls.append("init")

    monkeypatch.setattr("ray.init", init)

    def wait() -> None:
        with begun(Console(file=said, width=200), ONE) as starting:
            starting.wait()

    with ending_signals_interrupt() as received, pytest.raises(KeyboardInterrupt):
        wait()
    assert received.status == 143
    assert calls == ["init", "shutdown"]
    assert STOPPING in said.getvalue()


def test_a_closing_terminal_does_not_end_rays_processes(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: list[bool] = []
    shown = "import signal; print(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, []))"

    def init(**_: object) -> None:
        answer = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
        blocked.append(answer.stdout.strip() == "True")

    monkeypatch.setattr("ray.init", init)
    with begun(Console(quiet=True), ONE) as starting:
        starting.wait()
        blocked.append(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    assert blocked == [True, False]


def test_workers_write_bytecode_and_import_the_modules_of_a_trial_when_they_start(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import services

    shown = (
        "import os; print(os.getpgid(0) == os.getpid(), os.environ.get('PYTHONDONTWRITEBYTECODE'), "
        "os.environ['RAY_preload_python_modules'], os.environ['OMP_NUM_THREADS'], "
        "os.environ.get('RAY_gcs_rpc_server_reconnect_timeout_s'), "
        "os.environ['RAY_idle_worker_killing_time_threshold_ms'], end='')"
    )
    words: list[str] = []

    def init(**_: object) -> None:
        command = [sys.executable, "-c", f"import sys; print(sys.argv[1:]); {shown}", "--a=1"]
        command.append(f"{local_ray.PRESTARTED}64")
        process = services.ConsolePopen(command, env=dict(os.environ), stdout=subprocess.PIPE, text=True)
        words.extend(process.communicate()[0].splitlines())

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(local_ray, "available_cpus", lambda: 64)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for resources, at_once, workers in ((ONE, None, MOST_WARM), (ONE, 3, 3), (Resources(cpus_per_trial=32), None, 2)):
        words.clear()
        with begun(Console(quiet=True), resources, at_once) as starting:
            starting.wait()
        assert words[0] == str(["--a=1", f"{local_ray.PRESTARTED}{workers}"])
        assert words[1] == f"{sys.platform == 'linux'} None {local_ray.PRELOADED} {resources.threads} None 600000"
    assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1"


def test_a_users_own_settings_of_rays_processes_are_kept():
    given = {"RAY_idle_worker_killing_time_threshold_ms": "5", "OMP_NUM_THREADS": "3"}
    found = local_ray._Processes(workers=2, threads=1).variables(given)
    assert {name: found[name] for name in given} == given


class Cycle:
    """An object that only the collector can free, and that then calls a function."""

    def __init__(self, when_freed: Callable[[], object]) -> None:
        self.itself, self.when_freed = self, when_freed

    def __del__(self) -> None:
        self.when_freed()


def allocate_much() -> None:
    """Create so many objects that the collector starts several times if it is on."""
    kept: list[object] = []
    for _ in range(30_000):
        kept.append([kept])


def test_no_garbage_is_freed_while_ray_shuts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends the whole process if another thread frees one of its objects during that time."""
    shut, early = threading.Event(), list[bool]()

    def shutdown() -> None:
        Cycle(lambda: early.append(not shut.is_set()))
        other = threading.Thread(target=allocate_much)
        other.start()
        other.join()
        shut.set()

    monkeypatch.setattr("ray.shutdown", shutdown)
    monkeypatch.setattr(local_ray, "lost_process", lambda: "")
    local_ray.stop_ray()
    assert gc.isenabled()
    gc.collect()
    assert early == [False]


def test_ray_shuts_down_only_after_a_collection_that_another_thread_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    started, events = threading.Event(), list[str]()

    def slow() -> None:
        started.set()
        time.sleep(0.3)
        events.append("freed")

    monkeypatch.setattr("ray.shutdown", lambda: events.append("shut down"))
    monkeypatch.setattr(local_ray, "lost_process", lambda: "")
    gc.collect()
    Cycle(slow)
    other = threading.Thread(target=gc.collect)
    other.start()
    assert started.wait(10)
    local_ray.stop_ray()
    other.join()
    assert events == ["freed", "shut down"]
