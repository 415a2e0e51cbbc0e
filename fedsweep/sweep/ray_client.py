"""A sweep through Ray Client: its driver runs on the cluster's head, and this terminal shows it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from fedsweep.errors import UserError, one_line
from fedsweep.paths import available, environment, home
from fedsweep.store import Store
from fedsweep.sweep.cluster import Cluster
from fedsweep.sweep.engine import engine_digest
from fedsweep.sweep.head import Driver, Request
from fedsweep.sweep.joining import CLIENT, check_answers, prepare_environment, token_problem, without_stderr
from fedsweep.sweep.sharing import last_line, probed

CLIENT_SETTINGS = {
    "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "3",  # three attempts of three seconds each, not of 5, 10 and 15
    "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "3",
}
CARRIED = ("FEDSWEEP_DATA", "FEDSWEEP_CACHE", "FEDSWEEP_CACHE_GB")
TERMINAL = ("TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
INTERRUPTS = 2
"""How often Ctrl-C is passed on; the next one leaves at once."""


def run_on_head(address: str, words: Sequence[str], store: str) -> int:
    """Run `fedsweep WORDS` on the head of a cluster, show it here, and return its exit code.

    A relative `store` is a folder that this machine shares with the head; any other is as the head finds it.

    Raises:
        UserError: the cluster does not let us in, or the head cannot run the command as this machine would.
    """
    with _connected(address):
        import ray

        actor: Any = ray.remote(Driver)
        # A share of what only a head has; and what it has of GPUs stays visible to the command.
        on_head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
        keep_gpus = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
        try:
            driver = actor.options(**on_head, runtime_env=keep_gpus).remote()
            _check_head(driver, address, store)
            there = store if "://" in store else str(Path(store).absolute())
            verb, *rest = words
            given = [verb, "--address", ray.get(driver.cluster.remote()), "--store", there, *rest]
            name = ray.get(driver.start.remote(_request(given)))
        except (ray.exceptions.RayError, ConnectionError) as error:  # an installation that cannot be imported
            raise UserError(f"the head of {address} cannot run fedsweep ({last_line(error)}).") from None
        print(f"The sweep's driver runs on {name}, the head of {address}; its store is {there} there.", file=sys.stderr)
        try:
            return _shown(driver)
        except (ray.exceptions.RayError, ConnectionError) as error:
            print(f"The sweep's driver is lost ({last_line(error)}); --resume goes on.", file=sys.stderr)
            return 1


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    """Ray Client for the time of the block.

    Raises:
        UserError: it is not installed, nothing answers, or the cluster does not let us in.
    """
    if find_spec("grpc") is None:
        raise UserError(
            f"`--address` {address} is Ray Client's, which needs the package grpcio; "
            "`pip install fedsweep[cluster]` installs it."
        )
    for name, value in CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    prepare_environment(Cluster(address))
    check_answers(address.removeprefix(CLIENT), {})
    import ray

    said = _Said()
    try:
        with without_stderr(), warnings.catch_warnings(action="ignore"):
            _join(address)
    except Exception as error:  # ConnectionError, AuthenticationError, RuntimeError of another version
        ray.shutdown()
        raise UserError(_why_not(address, error, said.last)) from None
    finally:
        said.end()
    try:
        yield
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    """Enter through Ray Client. The first process that a head starts for one may die at its birth (Ray 2.60)."""
    import ray

    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionAbortedError:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)


class _Said(logging.Handler):
    """What Ray Client says on its way in, which is where it tells of a token that was refused."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.last = ""
        self._logger = logging.getLogger("ray.util.client.worker")
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)

    def end(self) -> None:
        """Listen no more."""
        self._logger.removeHandler(self)
        self._logger.setLevel(logging.CRITICAL)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the last refusal."""
        if "Received" in (message := record.getMessage()):
            self.last = message


def _why_not(address: str, error: Exception, said: str) -> str:
    """One sentence about a cluster that did not let us in."""
    if problem := token_problem(address, error, said):
        return problem
    if str(error) == "ray client connection timeout":
        return f"what answers at {address} is no Ray Client server; its port is 10001 unless `ray start` named another."
    if "ersion" in str(error):
        return f"the Ray cluster at {address} has another Ray or Python than this machine: {one_line(error)}."
    return f"the Ray cluster at {address} cannot be joined: {one_line(error)}."


def _check_head(driver: Any, address: str, store: str) -> None:
    """Refuse a head that would run another fedsweep, or record in another folder, than who asks would think.

    Raises:
        UserError: it would.
    """
    import ray

    shared = "://" not in store and not Path(store).is_absolute()
    with probed(Store(Path(store))) if shared else contextlib.nullcontext("") as probe:
        if not (problem := ray.get(driver.problem.remote(engine_digest(), probe))):
            return
    hint = "; `--store` takes the absolute path of a folder that the cluster shares" if probe else ""
    raise UserError(f"the head of {address} {problem}{hint}.")


def _request(words: Sequence[str]) -> Request:
    """The command, with all experiments and search spaces that this machine would find."""
    files = {
        f"{kind}/{name}.yaml": path.read_text(encoding="utf-8", errors="replace")
        for kind in ("experiments", "search_spaces")
        for name, path in available(kind).items()
    }
    given = os.environ.keys() & {*CARRIED}
    variables = {name: value for name, value in environment().items() if name in given}
    variables |= {name: os.environ[name] for name in TERMINAL if name in os.environ} | {"FEDSWEEP_HOME": str(home())}
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]
    return Request(words, files, variables, terminals)


def _shown(driver: Any) -> int:
    """Write here what the command writes there until it ends, and pass Ctrl-C on."""
    import ray

    pressed = passed_on = 0

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if pressed > INTERRUPTS:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)  # an exception in the middle of an answer would lose what it holds
    try:
        while True:
            chunks, code = ray.get(driver.read.remote(_size()))
            for stream, written in chunks:
                _write(stream, written)
            if code is not None:
                return int(code) if code >= 0 else 128 - int(code)
            for _ in range(pressed - passed_on):
                driver.interrupt.remote()
            passed_on = pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _size() -> tuple[int, int]:
    """Columns and lines of this terminal, which may have changed."""
    columns, lines = shutil.get_terminal_size()
    return columns, lines


def _write(stream: int, written: bytes) -> None:
    file = sys.stdout if stream == 1 else sys.stderr
    file.buffer.write(written)
    file.buffer.flush()
