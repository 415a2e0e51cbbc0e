"""Errors of Ray that Ray Tune does not expect if a worker is lost."""

import contextlib
from collections.abc import Iterator
from typing import Any

from ray.air.execution._internal import RayActorManager
from ray.exceptions import RayActorError, RayError, RayTaskError

LOW_ON_MEMORY = "due to the node running low on memory"
"""Part of Ray's message if it has killed a worker to keep its machine from running out of memory."""
ADVICE = "; free some memory or run fewer trials in parallel (`--at-once`)"
RETRIED = ", then run the same command with `--resume`"
NOT_RETRIED = (
    " in the next search; `--resume` does not run this trial again, because later samples depend on its failure"
)


@contextlib.contextmanager
def as_lost_workers() -> Iterator[None]:
    """Let Ray Tune treat every error of Ray in a running trial like the end of the trial's worker.

    Ray Tune expects only two kinds of errors, and any other error ends the whole sweep. In particular, Ray reports
    another error if it kills a worker because the machine runs out of memory.
    """
    patched: Any = RayActorManager
    original = patched._actor_task_failed

    def failed(manager: Any, tracked_actor_task: Any, exception: Exception) -> None:
        if isinstance(exception, RayError) and not isinstance(exception, RayActorError | RayTaskError):
            exception = RayActorError(error_msg=str(exception))
        original(manager, tracked_actor_task, exception)

    patched._actor_task_failed = failed
    try:
        yield
    finally:
        patched._actor_task_failed = original


def cause_of(error: str) -> str:
    """Return the cause of a worker's loss for a sentence, or an empty string if it is unknown.

    `error` is the text of Ray's error.
    """
    return " because the machine ran out of memory" if LOW_ON_MEMORY in error else ""


def reason_of(times: int, error: str, retried: bool) -> str:
    """Return the reason why a trial has failed that has lost its worker several times.

    Args:
        times: The number of lost workers.
        error: The text of Ray's last error.
        retried: Whether `--resume` runs failed trials of the sweep again.
    """
    cause = cause_of(error)
    advice = f"{ADVICE}{RETRIED if retried else NOT_RETRIED}"
    return f"its worker was lost {times} times" + (f", the last time{cause}{advice}" if cause else "")
