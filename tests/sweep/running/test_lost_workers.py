"""The errors with which Ray reports that a worker was lost. No Ray is started."""

from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.air.execution._internal import RayActorManager
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError

from fedsweep.sweep.running.lost_workers import as_lost_workers


def fail(error: Exception) -> list[Any]:
    """Let a trial's task fail with an error, and return the errors that Ray Tune receives."""
    task, received = MagicMock(), list[Any]()
    task._tracked_actor._on_error = lambda actor, error: received.append(error)
    task._on_error = None
    RayActorManager._actor_task_failed(MagicMock(), tracked_actor_task=task, exception=error)  # Ray names its arguments
    return received


@pytest.mark.parametrize("error", [OutOfMemoryError("1 worker was killed"), NodeDiedError("1 worker was killed")])
def test_a_worker_that_ray_kills_is_lost_and_does_not_end_the_sweep(error: Exception) -> None:
    with as_lost_workers():
        (received,) = fail(error)
    assert isinstance(received, RayActorError)
    assert str(received) == "1 worker was killed"
    with pytest.raises(RuntimeError, match="1 worker was killed"):  # what Ray Tune does by itself
        fail(error)


def test_other_errors_are_left_as_they_are() -> None:
    with as_lost_workers():
        error = RayActorError(error_msg="lost")
        assert fail(error) == [error]
        with pytest.raises(RuntimeError, match="no error of Ray"):
            fail(ValueError("no error of Ray"))
