"""Functions that check the nodes of a cluster before the first trial, and send them the data that they lack."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import NodeDiedError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fedsweep.common.errors import UserError
from fedsweep.common.paths import environment
from fedsweep.results import Store
from fedsweep.results.remote.objects import filesystem, put, remove
from fedsweep.sweep.cluster.cluster import Cluster, Node
from fedsweep.sweep.cluster.file_delivery import Item, Library, fetch
from fedsweep.sweep.cluster.node_requirements import RULE, Arrival, Findings, Needs, enter, look
from fedsweep.sweep.plan.plan import Plan

_on = partial(NodeAffinitySchedulingStrategy, soft=False)


def make_ready(cluster: Cluster, plan: Plan, store: Store, console: Console, deliver: bool = True) -> Arrival:
    """Check the nodes of a cluster and, if `deliver` is true, send them the data that they lack.

    Returns:
        The check that each worker runs before its first trial.

    Raises:
        UserError: A node does not meet the requirements. The message lists the problems of all nodes.
    """
    nodes = [node for node in cluster.nodes if node.slots(plan.space.resources)]
    needs = Needs.of(plan)
    driver = _on(ray.get_runtime_context().get_node_id())
    librarian: Any = ray.remote(num_cpus=0, max_concurrency=8)(Library)  # type: ignore[call-overload]
    library = librarian.options(scheduling_strategy=driver).remote(needs.items)
    with _probed(store) as probe:
        findings = survey(nodes, replace(needs, probe=probe), library if deliver else None, console)
    where = f"{_count(findings)} of the Ray cluster {cluster.address}"
    console.print(f"The sweep runs on {where}{' and on nodes that the cluster adds' if cluster.at_once else ''}.")
    if not cluster.address.startswith("127.") and any(found.open_to_all for found in findings.values()):
        console.print(
            f"Warning: anyone who can connect to {cluster.address} can run code on the cluster, because it was started "
            "without RAY_AUTH_MODE=token (cluster.md in the documentation, Security)."
        )
    return Arrival(needs, library)


@contextmanager
def _probed(store: Store) -> Iterator[str]:
    """Create a test file in the store, and delete it at the end of the block.

    Each node later reads the test file to check that it can use the store. The yielded text consists of the store's
    address, the character `#`, and the name of the file.
    """
    address, name = store.uri or str(store.root), f".shared-{secrets.token_hex(4)}"
    found, base = filesystem(address)
    put(found, f"{base}/{name}", secrets.token_hex(4).encode())
    try:
        yield f"{address}#{name}"
    finally:
        remove(found, f"{base}/{name}")


def survey(nodes: Sequence[Node], needs: Needs, library: Any, console: Console) -> dict[Node, Findings]:
    """Check the nodes, and map each node to its findings.

    If `library` (a Ray actor) is not None, it sends missing data to the nodes, and these nodes are checked again. A
    node that the cluster loses during the checks is left out.

    Raises:
        UserError: A node does not meet the requirements, or the cluster lost all nodes.
    """
    findings = _everywhere(nodes, needs)
    lacking = {node: found.lacking for node, found in findings.items() if found.lacking}
    if lacking and library is not None:
        _deliver(lacking, library, console)
        ready = {node: found for node, found in findings.items() if node not in lacking}
        findings = ready | _everywhere(list(lacking), needs)
    if nodes and not findings:
        raise UserError(f"the cluster lost {_count(nodes)} before the sweep started; no other node can run trials.")
    return findings


def _start(function: Callable[..., Any], arguments: Mapping[Node, tuple[Any, ...]]) -> dict[Any, Node]:
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    return {remote.options(scheduling_strategy=_on(node.id)).remote(*given): node for node, given in arguments.items()}


def _everywhere(nodes: Sequence[Node], needs: Needs) -> dict[Node, Findings]:
    """Check all nodes in parallel, and map each node to its findings. Nodes that the cluster loses are left out.

    Raises:
        UserError: A node does not meet the requirements. The message lists the problems of all nodes.
    """
    found = {}
    for node, answer in _answers(_start(look, dict.fromkeys(nodes, (needs,)))):
        failed = isinstance(answer, Exception)  # the node may be unable to import fedsweep
        found[node] = Findings([f"cannot run fedsweep ({_last_line(answer)})"]) if failed else answer
    wrong = [f"{node.name} {' and '.join(one.problems)}" for node, one in found.items() if one.problems]
    if wrong:
        raise UserError(f"{len(wrong)} of {_count(found)} cannot run trials: {'; '.join(wrong)}; {RULE}.")
    return found


def _answers(tasks: Mapping[Any, Node]) -> Iterator[tuple[Node, Any]]:
    """Yield each node with the result or the error of its task. Nodes that the cluster has lost are left out."""
    for task, node in tasks.items():
        try:
            answer = ray.get(task)
        except (NodeDiedError, TaskUnschedulableError):
            continue
        except Exception as error:
            answer = error
        yield node, answer


def _last_line(error: Exception) -> str:
    """Return the last line of an error from a node, which is the message of the original error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__


def _deliver(lacking: Mapping[Node, Sequence[Item]], library: Any, console: Console) -> None:
    total = sum(item.bytes for items in lacking.values() for item in items)
    what = f"data to {_count(lacking)}"
    tasks = _start(_fetch, {node: (environment(), items, library) for node, items in lacking.items()})
    columns = (TextColumn(f"Sending {what}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    if not console.is_terminal:
        console.print(f"Sending {total / 1e6:.1f} MB of {what}.")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(what, total=total)
        waiting = list(tasks)
        while waiting:
            _, waiting = ray.wait(waiting, timeout=0.5)
            progress.update(bar, completed=ray.get(library.sent.remote()))
    errors = {node: error for node, error in _answers(tasks) if error is not None}  # such as a full disk
    if wrong := [f"{node.name} could not receive its data ({_last_line(error)})" for node, error in errors.items()]:
        raise UserError(f"{len(wrong)} of {_count(tasks)} cannot run trials: {'; '.join(wrong)}.")


def _fetch(environment: Mapping[str, str], items: Sequence[Item], library: Any) -> None:
    """Download `items` from the Ray actor `library` to the node on which this function runs.

    The environment variables in `environment` are set first, because the function may run in a new process.
    """
    enter(environment)
    fetch(items, library)


def _count(nodes: Sequence[Any] | Mapping[Any, Any]) -> str:
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"
