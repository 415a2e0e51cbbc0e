"""The machines of a sweep: their cores and GPUs, and the number of trials that they run in parallel."""

import math
import platform
import sys
from dataclasses import dataclass

from joblib import cpu_count

from fedsweep.common.errors import UserError
from fedsweep.common.process_usage import COUNT, SIZE, logical_gpus
from fedsweep.results import SweepManifest
from fedsweep.sweep.space.settings import Resources

LOCAL = "local"
DEVICES = {"cpu": "the CPU", "cuda": "a GPU"}
"""Names of devices in error messages."""


@dataclass(frozen=True)
class Node:
    """A machine with its cores and GPUs."""

    id: str
    name: str
    cpus: float
    gpus: float

    def slots(self, resources: Resources) -> int:
        """Return the number of trials that the node can run at once.

        If the option `gpus_per_trial` is `auto`, the number depends only on the node's cores, and is 0 for a node
        without a GPU.
        """
        slots, share = int(self.cpus / resources.cpus_per_trial), resources.gpus
        if share == "auto":
            return slots if self.gpus >= 1 else 0
        if share > 0:
            slots = min(slots, int(self.gpus) * int(1 / share) if share <= 1 else int(self.gpus / share))
        return slots


@dataclass(frozen=True)
class Cluster:
    """The machines of a sweep: this machine, or the nodes of a Ray cluster."""

    address: str = LOCAL
    nodes: tuple[Node, ...] = ()
    """The nodes of a Ray cluster; empty for this machine, whose cores and GPUs are counted when needed."""
    at_once: int | None = None
    """The requested number of parallel trials. A cluster that scales automatically may add nodes for them."""

    @property
    def is_local(self) -> bool:
        """True if the sweep runs on this machine, without a cluster."""
        return self.address == LOCAL


HERE = Cluster()


def available_cpus() -> int:
    """Return the number of CPU cores that this process may use.

    The CPU quota of a container is taken into account.
    """
    return int(cpu_count())


OWN_RAY: list[object] = []
"""The Ray instance that fedsweep is starting or has started in this process, if any."""


def ray_is_running() -> bool:
    """Return whether other code has initialised Ray in this process, for example a notebook."""
    return not OWN_RAY and "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


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
    """Return the number of trials that run in parallel.

    By default, as many trials run as fit on the machines. The user can request another number (`cluster.at_once`). On a
    Ray cluster, this number is used even if it does not fit, because the cluster may add nodes. Without a cluster, it
    is only an upper limit.
    """
    if cluster.at_once and not cluster.is_local:
        return cluster.at_once
    fit = max(sum(node.slots(resources) for node in _nodes(resources, cluster)), 1)
    return min(fit, cluster.at_once or fit)


def most_on_a_gpu(resources: Resources, cluster: Cluster = HERE) -> int:
    """Return the number of trials per GPU that is sufficient to keep all CPU cores busy.

    With more trials per GPU, each trial would have less memory, and some trials would have to wait for a core.
    """
    at_once = concurrency(resources, cluster)
    nodes = [node for node in _nodes(resources, cluster) if node.gpus >= 1]
    on_each = [math.ceil(min(node.slots(resources), at_once) / int(node.gpus)) for node in nodes]
    return max(*on_each, 1) if on_each else at_once


def gpus_of(resources: Resources, cluster: Cluster = HERE) -> int:
    """Return the total number of GPUs of the cluster's nodes.

    Without a cluster, return the number of this machine's GPUs, or 0 if trials use no GPU.
    """
    return sum(int(node.gpus) for node in _nodes(resources, cluster))


def processor(resources: Resources) -> str:
    """Return the processor type and the number of threads of a trial, e.g. `x86_64, 1 thread`.

    The last digits of a trial's metrics depend on the type and on the number. The text is empty if trials run on the
    GPUs of a cluster, and this machine has no GPU.
    """
    threads = f"{resources.threads} thread{'s' * (resources.threads > 1)}"
    if resources.device == "cpu":
        return f"{platform.machine()}, {threads}"
    import torch

    return f"{torch.cuda.get_device_name()}, {threads}" if torch.cuda.is_available() else ""


def decided(resources: Resources, cluster: Cluster = HERE, started: SweepManifest | None = None) -> Resources:
    """Return `resources` with a value for `gpus_per_trial` if it is null.

    A new sweep gets `auto` if a machine has a GPU, and 0 otherwise. A resumed sweep gets the value for the device on
    which it was started. `started` is the manifest of the resumed sweep, or None for a new sweep.
    """
    if resources.gpus_per_trial is not None:
        return resources
    if started is None:
        on_gpu = has_gpus(cluster)
    else:
        on_gpu = started.device == "cuda" or (started.device == "cpu" and logical_gpus() is not None)
    return resources.model_copy(update={"gpus_per_trial": "auto" if on_gpu else 0.0})


def has_gpus(cluster: Cluster = HERE) -> bool:
    """Return whether a machine of the sweep has a GPU. A logical (simulated) GPU counts as a GPU."""
    return gpus_of(Resources(gpus_per_trial="auto"), cluster) > 0


def check_device(resources: Resources, cluster: Cluster, started: SweepManifest) -> None:
    """Raise UserError if a resumed sweep would continue on another device (CPU or GPU) than it was started on.

    A manifest of an older version of fedsweep does not record the device, and is not checked.
    """
    if started.device is None:
        return
    may_grow = cluster.at_once and not cluster.is_local  # nodes with a GPU may be added
    lacks_gpu = started.device == "cuda" and not may_grow and (logical_gpus() is not None or not has_gpus(cluster))
    if started.device == resources.device and not lacks_gpu:
        return
    begun = f"sweep {started.id} of {started.name} was started on {DEVICES[started.device]}"
    rule = "all trials of a sweep must run on the same device"
    if lacks_gpu:
        where = "this machine" if cluster.is_local else f"the cluster {cluster.address}"
        raise UserError(
            f"{begun}, but {where} has no GPU; {rule}, so resume it on a machine with a GPU, or start a new sweep."
        )
    asked, remedy = ("0", "auto") if started.device == "cuda" else (resources.gpus, "0")
    raise UserError(
        f"{begun}, but `gpus_per_trial` is {asked}; {rule}, so use `--gpus-per-trial {remedy}`, or start a new sweep."
    )


def check_resources(resources: Resources, cluster: Cluster = HERE) -> None:
    """Raise UserError unless at least one machine has enough cores and GPUs for a trial.

    Without this check, Ray would wait for such a machine forever.
    """
    gpus, cpus = resources.gpus, resources.cpus_per_trial
    if gpus != "auto" and gpus > 1 and gpus != int(gpus):
        raise UserError(f"`gpus_per_trial` must be a fraction of one GPU or a whole number, but it is {gpus:g}.")
    if not cluster.is_local:
        if logical_gpus() is not None and resources.on_gpu:
            raise UserError(f"the variable {COUNT} simulates GPUs on this machine only; unset it to use a cluster.")
        _check_nodes_fit(resources, cluster)
        return
    (here,) = _nodes(resources, cluster)
    if gpus == "auto" and here.gpus == 0:
        raise UserError(
            "`gpus_per_trial` is auto, but no GPU is available on this machine; "
            f"use `--gpus-per-trial 0` to run on the CPU, or set {COUNT}=1 and {SIZE} to simulate a GPU."
        )
    if gpus != "auto" and gpus > here.gpus:
        raise UserError(
            f"`gpus_per_trial` is {gpus:g}, but the number of GPUs available on this machine is {here.gpus:g}; "
            "use `--gpus-per-trial 0` to run on the CPU."
        )
    if cpus > here.cpus:
        raise UserError(f"`cpus_per_trial` is {cpus:g}, but this machine has {here.cpus:g} cores.")


def _check_nodes_fit(resources: Resources, cluster: Cluster) -> None:
    if cluster.at_once or any(node.slots(resources) for node in cluster.nodes):
        return
    gpus = resources.gpus
    asked = {
        "cpus": resources.cpus_per_trial,
        "gpus": 1 if gpus == "auto" else gpus,
    }  # auto needs a whole GPU to measure on
    said = {"cpus": f"{asked['cpus']:g}", "gpus": "auto" if gpus == "auto" else f"{gpus:g}"}
    for name, what in (("gpus", "GPUs"), ("cpus", "cores")):
        if asked[name] > (most := max((getattr(node, name) for node in cluster.nodes), default=0)):
            raise UserError(
                f"`{name}_per_trial` is {said[name]}, but no node of the cluster {cluster.address} has more than "
                f"{most:g} {what}, and a trial must fit on one node."
            )
    raise UserError(
        f"`cpus_per_trial` is {said['cpus']} and `gpus_per_trial` {said['gpus']}, but no node of the cluster "
        f"{cluster.address} has both, and a trial must fit on one node."
    )
