"""The machines of a sweep (this one, or a Ray cluster's nodes), their GPUs, and the number of parallel trials."""

import math
import platform
import sys
from dataclasses import dataclass

from joblib import cpu_count

from fedsweep.common.errors import UserError
from fedsweep.common.process_usage import COUNT, SIZE, logical_gpus
from fedsweep.sweep.space.search_space import Resources

LOCAL = "local"


@dataclass(frozen=True)
class Node:
    """A machine with its cores and GPUs."""

    id: str
    name: str
    cpus: float
    gpus: float

    def slots(self, resources: Resources) -> int:
        """Return the number of trials that fit on the node; with `auto`, only the cores of a GPU node count."""
        slots, share = int(self.cpus / resources.cpus_per_trial), resources.gpus_per_trial
        if share == "auto":
            return slots if self.gpus >= 1 else 0
        if share > 0:
            slots = min(slots, int(self.gpus) * int(1 / share) if share <= 1 else int(self.gpus / share))
        return slots


@dataclass(frozen=True)
class Cluster:
    """The machines of a sweep."""

    address: str = LOCAL
    nodes: tuple[Node, ...] = ()
    """The nodes of a cluster; empty for this machine, whose cores and GPUs are counted when needed."""
    at_once: int | None = None
    """The requested number of trials side by side, which a cluster may add nodes for."""

    @property
    def is_local(self) -> bool:
        """True without a cluster: the sweep runs on this machine."""
        return self.address == LOCAL


HERE = Cluster()


def available_cpus() -> int:
    """Return the number of cores that this process may use, within a container's quota."""
    return int(cpu_count())


def ray_is_running() -> bool:
    """Return whether Ray is initialised in this process, for example by a notebook."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _nodes(resources: Resources, cluster: Cluster) -> tuple[Node, ...]:
    if not cluster.is_local:
        return cluster.nodes
    cpus, gpus = float(available_cpus()), 0.0
    if resources.on_gpu:
        from fedsweep.sweep.cluster.gpus import count_gpus  # imports torch

        gpus = float(count_gpus())
    if ray_is_running():
        has = sys.modules["ray"].cluster_resources()
        cpus, gpus = min(cpus, has.get("CPU", 0)), min(gpus, has.get("GPU", 0))
    return (Node("", "this machine", cpus, gpus),)


def concurrency(resources: Resources, cluster: Cluster = HERE) -> int:
    """Return how many trials run in parallel: as many as fit, or the requested number."""
    if cluster.at_once and not cluster.is_local:
        return cluster.at_once
    fit = max(sum(node.slots(resources) for node in _nodes(resources, cluster)), 1)
    return min(fit, cluster.at_once or fit)


def most_on_a_gpu(resources: Resources, cluster: Cluster = HERE) -> int:
    """Return the number of trials per GPU that keeps all cores busy. More trials would only divide the GPU's memory."""
    at_once = concurrency(resources, cluster)
    nodes = [node for node in _nodes(resources, cluster) if node.gpus >= 1]
    on_each = [math.ceil(min(node.slots(resources), at_once) / int(node.gpus)) for node in nodes]
    return max(*on_each, 1) if on_each else at_once


def gpus_of(resources: Resources, cluster: Cluster = HERE) -> int:
    """Return the number of GPUs of all nodes, or of this machine if trials use any."""
    return sum(int(node.gpus) for node in _nodes(resources, cluster))


def processor(resources: Resources) -> str:
    """Return a description of the hardware that determines the last digits of a trial's results."""
    threads = f"{resources.threads} thread{'s' * (resources.threads > 1)}"
    if resources.device == "cpu":
        return f"{platform.machine()}, {threads}"
    import torch

    return f"{torch.cuda.get_device_name()}, {threads}"


def check_resources(resources: Resources, cluster: Cluster = HERE) -> None:
    """Raise UserError unless a machine has the cores and GPUs of a trial; Ray would silently wait for ever."""
    gpus, cpus = resources.gpus_per_trial, resources.cpus_per_trial
    if gpus != "auto" and gpus > 1 and gpus != int(gpus):
        raise UserError(f"`gpus_per_trial` must be a fraction of one GPU or a whole number, but it is {gpus:g}.")
    if not cluster.is_local:
        if logical_gpus() is not None and resources.on_gpu:
            raise UserError(f"{COUNT} makes logical GPUs of this machine alone, and the sweep is to run on a cluster.")
        _check_nodes_fit(resources, cluster)
        return
    (here,) = _nodes(resources, cluster)
    if gpus == "auto" and here.gpus == 0:
        raise UserError(
            "`gpus_per_trial` auto measures how many trials fit on a GPU, but Ray finds none on this machine; "
            f"use `--gpus-per-trial 0` to run on the CPU, or {COUNT}=1 with {SIZE} to simulate a GPU on it."
        )
    if gpus != "auto" and gpus > here.gpus:
        raise UserError(
            f"`gpus_per_trial` is {gpus:g}, but the number of GPUs that Ray finds on this machine is {here.gpus:g}; "
            "use `--gpus-per-trial 0` to run on the CPU."
        )
    if cpus > here.cpus:
        raise UserError(f"`cpus_per_trial` is {cpus:g}, but this machine has {here.cpus:g} cores.")


def _check_nodes_fit(resources: Resources, cluster: Cluster) -> None:
    if cluster.at_once or any(node.slots(resources) for node in cluster.nodes):
        return
    gpus = resources.gpus_per_trial
    asked = {"cpus": resources.cpus_per_trial, "gpus": 1 if gpus == "auto" else gpus}  # one to measure on
    said = {"cpus": f"{asked['cpus']:g}", "gpus": "auto" if gpus == "auto" else f"{gpus:g}"}
    for name, what in (("gpus", "GPUs"), ("cpus", "cores")):
        if asked[name] > (most := max((getattr(node, name) for node in cluster.nodes), default=0)):
            raise UserError(
                f"`{name}_per_trial` is {said[name]}, but no node of the cluster {cluster.address} has more than "
                f"{most:g} {what}, and a trial runs on one node."
            )
    raise UserError(
        f"`cpus_per_trial` is {said['cpus']} and `gpus_per_trial` {said['gpus']}, but no node of the cluster "
        f"{cluster.address} has both, and a trial runs on one node."
    )
