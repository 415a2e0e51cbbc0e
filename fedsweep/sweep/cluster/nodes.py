"""Whether every node of a cluster is ready for the trials of a sweep, told at once before the first one starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fedsweep.common.errors import UserError
from fedsweep.common.paths import environment
from fedsweep.results import Store
from fedsweep.sweep.cluster.cluster import Cluster, Node
from fedsweep.sweep.cluster.file_delivery import Item, Library, fetch
from fedsweep.sweep.cluster.node_probe import enter, last_line, probed
from fedsweep.sweep.cluster.node_requirements import RULE, Arrival, Findings, Needs, look
from fedsweep.sweep.plan.plan import Plan


def make_ready(cluster: Cluster, plan: Plan, store: Store, console: Console, deliver: bool = True) -> Arrival | None:
    """Look at every node on which a trial fits, and put data there that it lacks; None for this machine alone.

    With `deliver` false, nothing is written on any node.

    Raises:
        UserError: nodes differ from this machine; all of them, and all that is wrong, in one sentence.
    """
    if cluster.is_local:
        return None
    import ray

    nodes = [node for node in cluster.nodes if node.slots(plan.space.resources)]
    needs = Needs.of(plan)
    here = ray.get_runtime_context().get_node_id()
    librarian: Any = ray.remote(num_cpus=0, max_concurrency=8)(Library)  # type: ignore[call-overload]
    library = librarian.options(scheduling_strategy=_on(here)).remote(needs.items)
    with probed(store) as probe:
        findings = survey(nodes, replace(needs, probe=probe), library if deliver else None, console)
    _tell(cluster, findings, console)
    return Arrival(needs, library)


def survey(nodes: Sequence[Node], needs: Needs, library: Any, console: Console) -> dict[Node, Findings]:
    """What each node found at itself, once those that lack data have it from the library; nodes that went are left out.

    Without a library nothing is sent.

    Raises:
        UserError: a node is not as it must be, or none is left.
    """
    findings = _everywhere(nodes, needs)
    lacking = {node: found.lacking for node, found in findings.items() if found.lacking}
    if lacking and library is not None:
        _deliver(lacking, library, console)
        for node in lacking:
            del findings[node]
        findings |= _everywhere(list(lacking), needs)
    if nodes and not findings:
        raise UserError(f"{counted(len(nodes))} of the cluster went away before they were ready; none is left.")
    return findings


def _on(node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _everywhere(nodes: Sequence[Node], needs: Needs) -> dict[Node, Findings]:
    """The findings of each node that has not gone meanwhile.

    Raises:
        UserError: one has a problem, be it that it cannot even import fedsweep.
    """
    import ray

    asking: Any = ray.remote(num_cpus=0, max_retries=0)(look)
    answers = {node: asking.options(scheduling_strategy=_on(node.id)).remote(needs) for node in nodes}
    found = {}
    for node, answer in answers.items():
        try:
            found[node] = ray.get(answer)
        except Exception as error:  # whatever an installation may raise while it is imported
            if not _went(error):
                found[node] = Findings([f"cannot run fedsweep ({last_line(error)})"])
    _refuse(found)
    return found


def _went(error: Exception) -> bool:
    """Whether a task failed because its node is gone, which shows only after some missed heartbeats."""
    from ray.exceptions import NodeDiedError, TaskUnschedulableError

    return isinstance(error, NodeDiedError | TaskUnschedulableError)


def _refuse(findings: Mapping[Node, Findings]) -> None:
    wrong = [f"{node.name} {' and '.join(found.problems)}" for node, found in findings.items() if found.problems]
    if wrong:
        raise UserError(f"{len(wrong)} of {counted(len(findings))} cannot run trials: {'; '.join(wrong)}; {RULE}.")


def _deliver(lacking: Mapping[Node, Sequence[Item]], library: Any, console: Console) -> None:
    """Fetch on all nodes at once, with a bar over the bytes.

    Raises:
        UserError: a node could not take them.
    """
    import ray

    total = sum(item.bytes for items in lacking.values() for item in items)
    what = f"data to {counted(len(lacking))}"
    fetching: Any = ray.remote(num_cpus=0, max_retries=0)(_fetch)
    tasks = {
        fetching.options(scheduling_strategy=_on(node.id)).remote(environment(), items, library): node
        for node, items in lacking.items()
    }
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    wrong, waiting = [], list(tasks)
    if not console.is_terminal:
        console.print(f"{total / 1e6:.1f} MB of {what}")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(what, total=total)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=0.5)
            progress.update(bar, completed=ray.get(library.sent.remote()))
            for task in done:
                try:
                    ray.get(task)
                except Exception as error:  # a full disk
                    if not _went(error):
                        wrong.append(f"{tasks[task].name} could not take its data ({last_line(error)})")
    if wrong:
        raise UserError(f"{len(wrong)} of {counted(len(tasks))} cannot run trials: {'; '.join(wrong)}.")


def _fetch(environment: Mapping[str, str], items: Sequence[Item], library: Any) -> None:
    """On the node, in the process that has looked at it before or another one."""
    enter(environment)
    fetch(items, library)


def counted(nodes: int) -> str:
    """`1 node`, `3 nodes`."""
    return f"{nodes} node{'s' if nodes != 1 else ''}"


def _tell(cluster: Cluster, findings: Mapping[Node, Findings], console: Console) -> None:
    """Where the trials run, and whether others could send work there."""
    where = f"{counted(len(findings))} of the Ray cluster {cluster.address}"
    console.print(f"The sweep runs on {where}{', and on those that it adds' if cluster.at_once else ''}.")
    if not cluster.address.startswith("127.") and any(found.open_to_all for found in findings.values()):
        console.print(
            f"Warning: whoever reaches {cluster.address} can run code there, because the cluster was started without "
            "RAY_AUTH_MODE=token (docs/cluster.md, Security)."
        )
