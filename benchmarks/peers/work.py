"""The work that all simulators do: a linear model, ten clients and one epoch of SGD per round; and the bare loop.

Each simulator's script runs in an environment of its own, in which fedsweep is not installed.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIENTS, IMAGES, WIDTH, CLASSES, BATCH, RATE = 10, 64, 20, 10, 32, 0.1
ROUNDS = int(os.environ.get("PEERS_ROUNDS", "50"))


def data() -> list[tuple[Tensor, Tensor]]:
    """Return the features (images, width) and the labels (images,) of each client."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(IMAGES, WIDTH, generator=generator), torch.randint(CLASSES, (IMAGES,), generator=generator))
        for _ in range(CLIENTS)
    ]


def model() -> nn.Linear:
    """Return the model that all clients train."""
    torch.manual_seed(0)
    return nn.Linear(WIDTH, CLASSES)


def bare(rounds: int) -> None:
    """Run federated averaging in a plain loop with one model."""
    network = model()
    parameters = list(network.parameters())
    server = [one.detach().clone() for one in parameters]
    for _ in range(rounds):
        mean = [torch.zeros_like(one) for one in server]
        for features, labels in data_of_clients:
            with torch.no_grad():
                torch._foreach_copy_(parameters, server)
            optimizer = torch.optim.SGD(parameters, RATE)
            for rows in torch.randperm(IMAGES).split(BATCH):
                loss = F.cross_entropy(network(features[rows]), labels[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            torch._foreach_add_(mean, [one.detach() for one in parameters], alpha=1 / CLIENTS)
        server = mean


def cpu_seconds(work: Callable[[int], object]) -> Callable[[int], float]:
    """Return a function that returns the CPU seconds of a number of rounds.

    They are the difference between a long and a short run, so that the start of `work` does not count.
    """

    def measure(rounds: int) -> float:
        work(2)  # the first optimizer of a process imports modules of torch
        found = []
        for more in (0, rounds):
            begun = time.process_time()
            work(2 + more)
            found.append(time.process_time() - begun)
        return found[1] - found[0]

    return measure


def report(package: str, seconds: Callable[[int], float], repeats: int = 3) -> None:
    """Time a simulator and the bare loop in turn, and print a line of JSON.

    `seconds` runs a number of rounds with the simulator and returns their seconds.
    """
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"simulator": [], "bare": []}
    for _ in range(repeats):
        for name, measure in (("simulator", seconds), ("bare", cpu_seconds(bare))):
            found[name].append(measure(ROUNDS) / ROUNDS)
    milliseconds = {name: 1000 * statistics.median(values) / CLIENTS for name, values in found.items()}
    print(json.dumps({"package": package, "version": version(package), "torch": torch.__version__, **milliseconds}))


data_of_clients = data()
