"""Ray clusters on this machine, made of several nodes with one core each."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._private.node import Node
from ray.cluster_utils import Cluster

from tests.sweep.helpers import end_own_ray


@contextlib.contextmanager
def ray_cluster(nodes: int = 3, node_arguments: list[dict[str, Any]] | None = None) -> Iterator[Cluster]:
    """Start a head node without cores and worker nodes with one core each; stop them at the end of the block."""
    end_own_ray()
    with pytest.MonkeyPatch.context() as patch:
        # Under `uv run`, Ray would start the processes of its clients in a copy of the working directory.
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for arguments in node_arguments or [{}] * nodes:
                cluster.add_node(num_cpus=1, **arguments)
            yield cluster
        finally:
            cluster.shutdown()


@contextlib.contextmanager
def authenticated(mode: str, folder: Path) -> Iterator[Path]:
    """Set Ray's authentication mode for clusters that this process starts, with a new token."""
    end_own_ray()
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_AUTH")]:
            patch.delenv(name)
        patch.setenv("RAY_AUTH_MODE", mode)
        if mode == "token":
            patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        refresh()
        yield token
    refresh()


def refresh() -> None:
    """Make Ray's C++ code in this process read the environment variables again."""
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def alive(cluster: Cluster) -> int:
    """Return the number of running nodes of the cluster."""
    return sum(one["Alive"] for one in cluster.global_state.node_table())


def busy_node(cluster: Cluster) -> Node:
    """Return a node on which a trial is running."""
    actors = cluster.global_state.actor_table(None, actor_state_name="ALIVE").values()
    busy = {actor["Address"]["NodeID"] for actor in actors if actor["ActorClassName"] != "Library"}
    return next(node for node in cluster.worker_nodes if node.node_id in busy)
