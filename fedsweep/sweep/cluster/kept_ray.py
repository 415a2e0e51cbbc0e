"""Ray on this machine between two linked sweeps: the check that nothing of a sweep is left, and new workers."""

import contextlib
import time

from fedsweep.sweep.cluster.local_ray import ANSWER_SECONDS, KEPT_MILLISECONDS, lost_process

IDLE_SECONDS = 0.1
"""Seconds between two checks whether the actors of a sweep have ended."""


def is_idle() -> bool:
    """Return whether Ray on this machine works, and nothing uses its cores and GPUs.

    The actors and placement groups of a sweep that has just ended are given some seconds to end.
    """
    import ray

    end = time.monotonic() + ANSWER_SECONDS
    while not lost_process():
        total, free = ray.cluster_resources(), ray.available_resources()
        if all(free.get(name) == total[name] for name in ("CPU", "GPU") if name in total):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(IDLE_SECONDS)
    return False


def start_workers(workers: int) -> None:
    """Let Ray start workers that import the modules of a trial in advance, and return at once.

    The workers of a sweep end with its trials. Without new ones, the first trials of the next sweep would wait until
    their workers have imported these modules. Ray has no function for this purpose, so this one sends the request that
    Ray's own processes send. If a version of Ray does not answer it, workers start with the first trials.
    """
    with contextlib.suppress(Exception):
        import ray
        from ray._private.grpc_utils import init_grpc_channel
        from ray.core.generated import common_pb2, node_manager_pb2
        from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub

        python, messages = vars(common_pb2)["PYTHON"], vars(node_manager_pb2)
        request = messages["PrestartWorkersRequest"](
            language=python, num_workers=workers, keep_alive_duration_secs=KEPT_MILLISECONDS // 1000
        )
        (node,) = (one for one in ray.nodes() if one["Alive"])
        with init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
            NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=ANSWER_SECONDS)
