"""Nodes that are lost while they are checked or while they receive data. No Ray is started."""

from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

import pytest
import ray
from ray.exceptions import NodeDiedError, TaskUnschedulableError
from rich.console import Console

from fedsweep.common.errors import UserError
from fedsweep.sweep.cluster.cluster import Node
from fedsweep.sweep.cluster.file_delivery import Item
from fedsweep.sweep.cluster.node_requirements import Findings, Needs
from fedsweep.sweep.cluster.nodes import survey

NODES = [Node(name * 56, f"node {name}", 4, 0) for name in "abc"]
LACKS = Findings(lacking=[Item("digits", (("digits/images", 10),), "elsewhere", "0" * 64, True)])
READY = Findings()
GONE = [NodeDiedError("gone"), TaskUnschedulableError("gone")]


class Tasks:
    """A replacement for Ray's functions, with a list of answers for each node's tasks."""

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self.answers = answers
        self.sent = self  # stands for `Library.sent`

    def task(self, **_: Any) -> Callable[[Any], "Tasks"]:
        return lambda function: self

    def options(self, scheduling_strategy: Any) -> "Tasks":
        self.node = scheduling_strategy.node_id[0]
        return self

    def remote(self, *given: Any) -> Any:
        return (self.node, len(self.answers[self.node])) if given else (None, 0)

    def get(self, task: tuple[str | None, int]) -> Any:
        if task[0] is None:
            return 0
        answer = self.answers[task[0]].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Findings]]:
    """Return a function that surveys nodes with the given answers and returns the findings by node."""

    def played(**answers: Sequence[Any]) -> dict[str, Findings]:
        tasks = Tasks({name: list(said) for name, said in answers.items()})
        monkeypatch.setattr(ray, "remote", tasks.task)
        monkeypatch.setattr(ray, "get", tasks.get)
        monkeypatch.setattr(ray, "wait", lambda waiting, timeout: (waiting, []))
        nodes = [node for node in NODES if node.id[0] in answers]
        found = survey(nodes, Needs("", {}, {}, ()), tasks, Console(file=StringIO()))
        assert not any(tasks.answers.values())
        return {node.id[0]: findings for node, findings in found.items()}

    return played


@pytest.mark.parametrize("gone", GONE)
def test_a_node_that_is_lost_before_it_answers_is_left_out(cluster, gone):
    assert cluster(a=[READY], b=[gone], c=[READY]) == {"a": READY, "c": READY}


@pytest.mark.parametrize("gone", GONE)
@pytest.mark.parametrize("moment", ["while it is sent data", "when it is looked at again"])
def test_a_node_that_is_lost_while_it_gets_data_is_left_out(cluster, gone, moment):
    last = [gone, gone] if moment.startswith("while") else [None, gone]
    assert cluster(a=[READY], b=[LACKS, *last], c=[LACKS, None, READY]) == {"a": READY, "c": READY}


def test_all_nodes_that_lacked_data_may_be_lost_if_another_node_is_left(cluster):
    assert cluster(a=[READY], b=[LACKS, GONE[0], GONE[0]]) == {"a": READY}


@pytest.mark.parametrize("last", [[GONE[0]], [LACKS, None, GONE[0]]])
def test_an_error_is_raised_if_no_node_is_left(cluster, last):
    with pytest.raises(UserError, match=r"^the cluster lost 2 nodes before the sweep started; no other node"):
        cluster(a=[GONE[0]], b=last)


@pytest.mark.parametrize("answer", [RuntimeError("no timm"), Findings(["has no timm"])])
def test_an_error_is_raised_if_a_node_has_another_problem(cluster, answer):
    with pytest.raises(UserError, match=r"^1 of 1 node cannot run trials: node b .*no timm"):
        cluster(a=[GONE[0]], b=[answer])


def test_an_error_is_raised_if_a_node_cannot_receive_its_data(cluster):
    with pytest.raises(UserError, match=r"^1 of 2 nodes cannot run trials: node b could not receive its data \(.*full"):
        cluster(a=[LACKS, None], b=[LACKS, OSError("the disk is full")])
