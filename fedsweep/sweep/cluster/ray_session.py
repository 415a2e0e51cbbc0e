"""Functions that start Ray on this machine, or connect to a Ray cluster, for the duration of a sweep."""

import contextlib
import logging
import os
import platform
import re
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.signals import kept_handlers
from fedsweep.sweep.cluster.cluster import HERE, LOCAL, Cluster, Node, ray_is_running
from fedsweep.sweep.cluster.kept_ray import is_idle, start_workers
from fedsweep.sweep.cluster.local_ray import ANSWER_SECONDS, QUIET, LocalRay, begun, stop_ray
from fedsweep.sweep.space.settings import Resources

RAY_SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call after the end of a session must not start Ray again
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # Under `uv run`, Ray would copy the working directory with all prepared images, and start workers in the copy.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "604800",  # a week: a resumed sweep does not read the state that Ray Tune writes
    # By default, Ray waits 2 s until a stopped trial has freed its memory. If that takes longer, Ray marks the worker's
    # next trial as an error without calling the searcher or the callbacks.
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": "3600",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
# Despite its name, this variable works on every system. With 0, Ray's servers listen on 127.0.0.1 only.
LOCAL_SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # If the GCS is killed, Ray ends this process after 60 s by default. The report and MLflow may need more time.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_gcs_server_port_wait_time_s": "120",
}
JOINING_SETTINGS = {"RAY_NUM_REDIS_GET_RETRIES": "3"}  # try 3 times, not 20, if a cluster rejects the token
HOST_AND_PORT = re.compile(r"(?P<host>[\w.-]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d{1,5})")
TOKEN_HINT = "set RAY_AUTH_TOKEN_PATH to the file with the cluster's token (cluster.md in the documentation, Security)"  # noqa: S105


WORKER_SECONDS = 120.0
"""The time in which a worker must answer, which includes its start."""


def check_address(address: str) -> None:
    """Raise UserError unless `address` is `local`, `auto`, or HOST:PORT of a Ray cluster's head node."""
    if address.startswith("ray://"):
        raise UserError(
            f"`--address` {address} is an address of Ray Client, which fedsweep does not support; use `ray job submit "
            "-- fedsweep tune ...` to run the command on the cluster's head (cluster.md in the documentation)."
        )
    if address not in (LOCAL, "auto") and not HOST_AND_PORT.fullmatch(address):
        raise UserError(
            f"`--address` must be local, auto, or HOST:PORT of a Ray cluster's head, but it is `{address}`."
        )


def not_followed(address: str) -> str:
    """Return a note if the sweep ignores the environment variable RAY_ADDRESS, and otherwise an empty string.

    `address` is the value of the option `--address`. A sweep uses a cluster only if this option asks for one. A
    forgotten environment variable must not send work and data to other machines.
    """
    if address != LOCAL or (other := os.environ.get("RAY_ADDRESS")) in (None, "", LOCAL):
        return ""
    return f"The sweep runs on this machine only. To use the cluster in RAY_ADDRESS ({other}), add `--address auto`."


def prepare_environment(cluster: Cluster = HERE) -> None:
    """Set the environment variables that Ray reads on import.

    If fedsweep starts Ray and no access token is set, fedsweep creates a token. Ray then accepts work only from
    processes that know the token. The token is kept in the environment, which only this user can read. By default, Ray
    would write it to a file that every user can read.
    """
    settings = RAY_SETTINGS | (LOCAL_SETTINGS if cluster.is_local else JOINING_SETTINGS)
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    has_token = bool({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys())
    if not cluster.is_local:
        if has_token or Path("~/.ray/auth_token").expanduser().is_file():
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray itself does not set it if an address is given
    elif not ray_is_running():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if not has_token:
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def opened(address: str, at_once: int | None = None) -> Iterator[Cluster]:
    """Connect to the machines of the sweep for the duration of the block, and yield them.

    Args:
        address: `local` for this machine, or `auto` or HOST:PORT for a Ray cluster.
        at_once: The number of parallel trials that the user requested, if any.

    Raises:
        UserError: The cluster cannot be joined.
    """
    if address == LOCAL:
        yield Cluster(at_once=at_once)
        return
    prepare_environment(Cluster(address))
    _check_answers(address)
    import ray

    try:
        with kept_handlers(), _captured_stderr() as said:
            ray.init(address, **QUIET)
    except Exception as error:  # ConnectionError, AuthenticationError, RuntimeError of another version
        ray.shutdown()
        raise UserError(_why_not(address, error, "".join(said))) from None
    try:
        _silence()
        yield Cluster(ray.get_runtime_context().gcs_address, tuple(_alive(ray.nodes())), at_once)
    finally:
        stop_ray()


@contextlib.contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """Capture stderr within the block. The yielded list receives the text at the end of the block.

    If a cluster rejects the process, Ray 2.52 writes the reason only to stderr, from C++ code that bypasses
    `sys.stderr`.
    """
    told: list[str] = []
    kept = os.dup(2)
    with tempfile.TemporaryFile() as silent:
        try:
            os.dup2(silent.fileno(), 2)
            yield told
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            silent.seek(0)
            told.append(silent.read().decode(errors="replace"))


def _check_answers(address: str) -> None:
    """Raise UserError if nothing listens at the address. Without this check, Ray would retry for two minutes."""
    where = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if not (found := HOST_AND_PORT.fullmatch(where)):
        if where != "auto":  # from RAY_ADDRESS
            check_address(where)
        return
    try:
        socket.create_connection((found["host"].strip("[]"), int(found["port"])), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"no Ray cluster can be reached at {where}: {one_line(error)}.") from None


def _why_not(address: str, error: Exception, said: str) -> str:
    told = f"{error} {error.__cause__ or ''} {said}"
    if any(one in told for one in ("Unauthenticated", "InvalidAuthToken", "missing authentication token")):
        has = "the given token is wrong" if os.environ.get("RAY_AUTH_MODE") == "token" else "none was given"
        return f"the Ray cluster at {address} requires a token, but {has}; {TOKEN_HINT}."
    if type(error).__name__ == "AuthenticationError":
        return f"`--address` {address} cannot be used: RAY_AUTH_MODE is token, but no token was found; {TOKEN_HINT}."
    if address == "auto" and isinstance(error, ConnectionError) and error.__cause__ is None:
        return "`--address` auto found no Ray cluster on this machine, and RAY_ADDRESS does not name one."
    return f"the Ray cluster at {address} cannot be joined: {one_line(error)}."


def _alive(found: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Return the nodes that are alive. `found` is the result of `ray.nodes()`.

    If several nodes have the same name, the beginning of each node's id is appended to its name.
    """
    up = [(one.get("NodeName") or one["NodeManagerAddress"], one) for one in found if one["Alive"]]
    names = [name for name, _ in up]
    return [
        Node(
            one["NodeID"],
            name if names.count(name) == 1 else f"{name} ({one['NodeID'][:8]})",
            one["Resources"].get("CPU", 0),
            one["Resources"].get("GPU", 0),
        )
        for name, one in up
    ]


@contextlib.contextmanager
def ray_session(cluster: Cluster = HERE, starting: LocalRay | None = None) -> Iterator[None]:
    """Provide Ray for the trials: the joined cluster, the Ray instance of this process, or a new Ray instance.

    Only an instance that this function has started is stopped at the end, so a notebook can run several sweeps with the
    instance that it has started.

    Args:
        cluster: The machines of the sweep.
        starting: The new instance, if it is being started already. The caller stops it.

    Raises:
        UserError: Ray does not start on this machine, or the instance of this process has several nodes.
    """
    if not cluster.is_local:
        yield
        return
    prepare_environment()
    if starting is not None:
        starting.wait()
        _silence()
        yield
    elif ray_is_running():
        _check_one_node()
        _silence()
        yield
    else:
        with begun(Console(quiet=True), Resources()) as new, ray_session(cluster, new):
            yield


def _check_one_node() -> None:
    """Raise UserError if the Ray instance of this process has several nodes."""
    import ray

    if (nodes := len(_alive(ray.nodes()))) > 1:
        raise UserError(
            f"this process has joined a Ray cluster of {nodes} nodes; call `ray.shutdown()` to leave it, and use "
            "`--address` to run a sweep on a cluster."
        )


@contextlib.contextmanager
def started_early(
    address: str, console: Console, resources: Resources, at_once: int | None = None
) -> Iterator[LocalRay | None]:
    """Begin to start Ray on this machine, yield the new instance, and stop it at the end of the block.

    Nothing is started, and None is yielded, if the sweep uses a cluster or the Ray instance of this process.
    """
    if address != LOCAL or ray_is_running():
        yield None
        return
    prepare_environment()
    with begun(console, resources, at_once) as starting:
        yield starting


class OwnRay:
    """The Ray instance that fedsweep starts on this machine, which linked sweeps share one after the other.

    The instance is stopped at the end of a `with` block over this object, or earlier by `end`. Nothing is started if
    the sweeps use a cluster or the Ray instance of this process.
    """

    def __init__(self, address: str, console: Console) -> None:
        self._address, self._console = address, console
        self._stack = contextlib.ExitStack()
        self._instance: LocalRay | None = None
        self._resources: Resources | None = None
        self._used = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def begin(self, resources: Resources, at_once: int | None = None) -> None:
        """Begin to start Ray, and return at once.

        The instance of the last sweep is kept if it was started for the same resources, works, and is idle.

        Args:
            resources: The resources of each trial.
            at_once: The largest number of parallel trials, if it is known.
        """
        if self._instance is not None and self._used and (self._resources != resources or not is_idle()):
            self.end()
        if self._instance is None:
            early = started_early(self._address, self._console, resources, at_once)
            self._instance, self._resources = self._stack.enter_context(early), resources

    def session(self, cluster: Cluster) -> contextlib.AbstractContextManager[None]:
        """Provide Ray for the trials of a sweep (see `ray_session`)."""
        self._used = True
        return ray_session(cluster, self._instance)

    def keep(self) -> None:
        """Start workers for the next sweep in advance, if there is an instance."""
        if self._instance is not None and self._used:
            start_workers(self._instance.workers)

    def end(self) -> None:
        """Stop the instance, if there is one."""
        self._instance, self._used = None, False
        self._stack.close()


def check_worker() -> None:
    """Start Ray on this machine, wait for the answer of a worker, and stop Ray.

    Raises:
        UserError: Ray does not start on this machine.
    """
    prepare_environment()
    with OwnRay(LOCAL, Console(quiet=True)) as own:
        own.begin(Resources(gpus_per_trial=0), at_once=1)
        with own.session(HERE):
            import ray

            ray.get(ray.remote(platform.node).remote(), timeout=WORKER_SECONDS)


def _silence() -> None:
    """Silence Ray, because the sweep itself reports what the user needs to know."""
    import ray

    # Ray would print the last page of its log if a raylet is lost; the sweep says in one sentence what is kept.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    for noisy in ("ray.tune", "ray.tune.execution.tune_controller", "ray.tune.tune"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
