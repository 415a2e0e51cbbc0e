"""FLoRA (Wang et al., NeurIPS 2024) and FedEx-LoRA (Singhal et al., ACL 2025), written from their formulas.

`play` runs one linear layer with NumPy. `FLoRA` and `FedExLoRA` run whole models on `tests/references/whole_runs.py`.
Weights of clients are divided by their sum, and every client has its own rank and scaling.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from tests.references.networks import Weights
from tests.references.whole_runs import Averaging, mean, train


@dataclass
class Learner:
    """A client of one linear layer: its rank, scaling and share of the images, inputs (n, in) and targets (n, out)."""

    rank: int
    scaling: float
    share: float
    x: np.ndarray
    y: np.ndarray

    def descend(
        self, weight: np.ndarray, a: np.ndarray, b: np.ndarray, steps: int = 3
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the factors after gradient steps on |(W + s B A) x - y|^2 / 2n."""
        for _ in range(steps):
            error = self.x @ (weight + self.scaling * b @ a).T - self.y
            slope = self.scaling * error.T @ self.x / len(self.x)
            a, b = a - 0.005 * b.T @ slope, b - 0.005 * slope @ a.T
        return a, b


def flora(weight: np.ndarray, drawn: list[np.ndarray], cohorts: list[list[Learner]]) -> Iterator[np.ndarray]:
    """Yield W after each round; `drawn[t]` is the factor A with which round t begins."""
    for first, cohort in zip(drawn, cohorts, strict=True):
        change = np.zeros_like(weight)
        for one in cohort:
            a, b = one.descend(weight, first[: one.rank], np.zeros((len(weight), one.rank)))
            change += one.share * one.scaling * b @ a
        weight = weight + change
        yield weight


def fedex(
    weight: np.ndarray, a: np.ndarray, b: np.ndarray, scaling: float, cohorts: list[list[Learner]]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield W, A and B after each round; the factors of the server have the full rank and the scaling `scaling`."""
    for cohort in cohorts:
        ends, products = [], np.zeros_like(weight)
        for one in cohort:
            own_a, own_b = one.descend(weight, a[: one.rank], b[:, : one.rank] * scaling / one.scaling)
            products += one.share * one.scaling * own_b @ own_a
            ends.append((one.share, own_a, own_b * one.scaling / scaling))
        a, b = a.copy(), b.copy()
        for row in range(len(a)):
            reaching = [end for end in ends if len(end[1]) > row]
            if reaching:
                total = sum(share for share, *_ in reaching)
                a[row] = sum(share * own[row] for share, own, _ in reaching) / total
                b[:, row] = sum(share * own[:, row] for share, _, own in reaching) / total
        weight = weight + products - scaling * b @ a
        yield weight, a, b


class Folding(Averaging):
    """Whole runs of clients with their own ranks and scalings, whose first blocks are trained."""

    ranks: dict[str, int]
    scalings: dict[str, float]

    def held(self, round: int, cohort: list[str]) -> dict[str, list[int]]:
        return {one: list(range(self.world.clients[one].depth)) for one in cohort}

    def frozen(self, theta: Weights) -> Weights:
        """Return the frozen tensors with the changes folded into them."""
        found = dict(self.world.frozen)
        for name in theta:
            if name.endswith(".folded"):
                weight = name.replace(".folded", ".base_layer.weight")
                found[weight] = found[weight] + theta[name]
        return found

    def trained(self, client: str, held: list[int], theta: Weights) -> list[str]:
        return [name for name in super().trained(client, held, theta) if not name.endswith(".folded")]

    def client(self, round, client, held, theta, known):
        rank, own, full = self.ranks[client], self.scalings[client], self.world.net.scaling
        inside = copy.copy(self)
        inside.world = replace(self.world, frozen=self.frozen(theta), net=replace(self.world.net, scaling=own))
        start = dict(theta)
        for name in theta:
            if ".lora_A." in name:
                start[name] = theta[name][:rank]
            if ".lora_B." in name:
                start[name] = theta[name][:, :rank] * full / own
        names = self.trained(client, held, theta)
        end, loss = train(inside.world, round, client, start, names, inside.loss(round, client, held), known)
        return {name: one * own / full if ".lora_B." in name else one for name, one in end.items()}, loss

    def predict(self, theta, images):
        return self.world.net.logits({**self.frozen(theta), **theta}, images, self.server_layers())

    def layers(self, theta: Weights, ends: dict[str, Weights]) -> Iterator[tuple[str, list]]:
        """Yield each trained layer with its clients: share, A and B in the server's scaling."""
        for a in theta:
            holders = [client for client in sorted(ends) if ".lora_A." in a and a in ends[client]]
            total = sum(self.world.weight(client) for client in holders)
            found = [
                (self.world.weight(one) / total, ends[one][a], ends[one][a.replace("lora_A", "lora_B")])
                for one in holders
            ]
            if found:
                yield a.partition(".lora_A.")[0], found

    def outside(self, theta: Weights, ends: dict[str, Weights]) -> Weights:
        """Return the tensors after a round, in which all but the factors are averaged."""
        rest = {one: {name: end for name, end in ends[one].items() if ".lora_" not in name} for one in ends}
        return mean(theta, rest, self.world.weight)


class FLoRA(Folding):
    """Stacked factors, whose product is folded, and new factors after each round."""

    fresh_a: Callable[[int, str], torch.Tensor]
    stacked: tuple[str, ...] = ()

    def before(self, round, theta):
        return theta | {name: self.fresh_a(round, name) for name in self.stacked}

    def average(self, theta, ends, held):
        after, stacked = self.outside(theta, ends), []
        for layer, clients in self.layers(theta, ends):
            left = torch.cat([share * b for share, _, b in clients], 1)
            right = torch.cat([a for _, a, _ in clients])
            after[f"{layer}.folded"] = theta[f"{layer}.folded"] + self.world.net.scaling * left @ right
            b = f"{layer}.lora_B.default.weight"
            after[b] = 0 * theta[b]
            stacked.append(f"{layer}.lora_A.default.weight")
        self.stacked = tuple(stacked)
        return after


class FedExLoRA(Folding):
    """Averaged factors, and the folded difference between the mean of the products and the product of the means."""

    def average(self, theta, ends, held):
        after = self.outside(theta, ends)
        for layer, clients in self.layers(theta, ends):
            names = [f"{layer}.lora_{one}.default.weight" for one in "AB"]
            mean_a, mean_b = (theta[name].clone() for name in names)
            products = sum(share * b @ a for share, a, b in clients)
            for row in range(max(len(a) for _, a, _ in clients)):
                own = [one for one in clients if len(one[1]) > row]
                total = sum(share for share, *_ in own)
                mean_a[row] = sum(share * a[row] for share, a, _ in own) / total
                mean_b[:, row] = sum(share * b[:, row] for share, _, b in own) / total
            residual = products - mean_b @ mean_a
            after[f"{layer}.folded"] = theta[f"{layer}.folded"] + self.world.net.scaling * residual
            after |= dict(zip(names, (mean_a, mean_b), strict=True))
        return after
