"""Runs of several rounds of the base optimizers and the depth methods, in double precision on plain dictionaries.

One round: the server draws a cohort, each client of the cohort descends its loss, the server averages each tensor over
the clients that trained it, and the base optimizer corrects the average. The random draws are inputs (`World.draw`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tests.references.networks import Vit, Weights, cross_entropy


@dataclass
class Party:
    """A client: its images, their labels, its domain, and the number of blocks that fit on it."""

    images: Tensor
    labels: Tensor
    domain: str
    depth: int


@dataclass
class World:
    """Everything that the rounds of a run share."""

    net: object
    frozen: Weights
    clients: dict[str, Party]
    draw: Callable[..., np.random.Generator]
    per_round: int
    steps: int
    batch: int
    optimizer: dict
    base: str = "fedavg"
    strength: float = 0.0
    uniform: bool = False
    rounds: int = 3
    seed: int = 0

    def cohort(self, round: int) -> list[str]:
        ids = sorted(self.clients)
        places = self.draw(self.seed, "cohort", round).choice(len(ids), size=self.per_round, replace=False)
        return [ids[place] for place in sorted(places)]

    def weight(self, client: str) -> float:
        return 1.0 if self.uniform else float(len(self.clients[client].labels))


@dataclass
class Seen:
    """The tensors after a round, with the memory of the base optimizer and the mean training loss."""

    theta: Weights
    remembered: dict[str, Weights]
    server: Weights
    loss: float
    more: dict = field(default_factory=dict)


def block_of(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith("backbone.blocks.") else None


def descend(options: dict, values: Weights, moments: dict, gradients: Weights) -> Weights:
    """Return the values after one step of SGD with momentum, or of Adam, with clipping and an L2 penalty."""
    whole = math.sqrt(sum(float((one**2).sum()) for one in gradients.values()))
    if options.get("clip_norm") is not None and whole + 1e-6 > options["clip_norm"]:  # torch's clip_grad_norm_
        gradients = {name: one * options["clip_norm"] / (whole + 1e-6) for name, one in gradients.items()}
    moments["t"] = moments.get("t", 0) + 1
    after = {}
    for name, value in values.items():
        g = gradients[name] + options.get("weight_decay", 0.0) * value
        if options["name"] == "sgd":
            old = moments.get(name)
            moments[name] = g if old is None else options["momentum"] * old + g
            after[name] = value - options["lr"] * moments[name]
            continue
        (b1, b2), (m, v) = options["betas"], moments.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        moments[name] = m, v
        first, second = m / (1 - b1 ** moments["t"]), v / (1 - b2 ** moments["t"])
        after[name] = value - options["lr"] * first / (second.sqrt() + options["eps"])
    return after


def batches(count: int, size: int, steps: int, rng: np.random.Generator) -> Iterator[Tensor]:
    """Yield the places of the images of each step; each epoch is a new permutation."""
    waiting: list[int] = []
    for _ in range(steps):
        waiting = waiting or rng.permutation(count).tolist()
        yield torch.tensor(waiting[:size])
        waiting = waiting[size:]


def train(world, round, client, start, names, loss, known=None, session=0, steps=None, party=None, base=None):
    """Return the trained tensors and the mean loss of one session of a client.

    `loss(w, images, labels, progress, rows)` is the client's loss; `known` are the gradients that it remembers.
    """
    party, steps = party or world.clients[client], steps or world.steps
    key = [round, client, *([session] if session else [])]
    values, moments, losses = {name: start[name].clone() for name in names}, {}, []
    strength = 0.0 if base == "fedavg" else world.strength
    for step, rows in enumerate(
        batches(len(party.labels), world.batch, steps, world.draw(world.seed, "batches", *key))
    ):
        leaves = {name: one.clone().requires_grad_() for name, one in values.items()}
        found = loss({**world.frozen, **start, **leaves}, party.images[rows], party.labels[rows], step / steps, rows)
        gradients = torch.autograd.grad(found, list(leaves.values()))
        steered = {
            name: one + strength * (values[name] - start[name]) - (known or {}).get(name, 0.0)
            for name, one in zip(names, gradients, strict=True)
        }
        values = descend(world.optimizer, values, moments, steered)
        losses.append(found.item())
    return values, sum(losses) / steps


def mean(before: Weights, ends: dict[str, Weights], weight: Callable[[str], float]) -> Weights:
    """Average each tensor over the clients that trained it (FedRA v1, Eq. 3)."""
    after = {}
    for name, old in before.items():
        holders = [client for client in sorted(ends) if name in ends[client]]
        total = sum(weight(client) for client in holders)
        after[name] = sum(weight(one) * ends[one][name] for one in holders) / total if holders else old
    return after


class Averaging:
    """FedAvg of the client's blocks and of all tensors outside blocks; the base class of the other methods."""

    def __init__(self, world: World, start: Weights) -> None:
        self.world, self.fresh = world, start

    def server_layers(self) -> range:
        return range(self.world.net.depth)

    def held(self, round: int, cohort: list[str]) -> dict[str, list[int]]:
        return {client: list(self.server_layers()) for client in cohort}

    def trained(self, client: str, held: list[int], theta: Weights) -> list[str]:
        return [name for name in theta if block_of(name) in (None, *held)]

    def loss(self, round: int, client: str, held: list[int]):
        return lambda w, images, labels, *_: cross_entropy(self.world.net.logits(w, images, held), labels)

    def before(self, round: int, theta: Weights) -> Weights:
        return theta

    def client(self, round, client, held, theta, known):
        names = self.trained(client, held, theta)
        return train(self.world, round, client, theta, names, self.loss(round, client, held), known)

    def average(self, theta: Weights, ends: dict[str, Weights], held: dict[str, list[int]]) -> Weights:
        return mean(theta, ends, self.world.weight)

    def after(self, round: int, theta: Weights) -> Weights:
        return theta

    def predict(self, theta: Weights, images: Tensor) -> Tensor:
        return self.world.net.logits({**self.world.frozen, **theta}, images, self.server_layers())

    def play(self) -> Iterator[Seen]:
        world, theta, known, h = self.world, dict(self.fresh), {}, {}
        everyone = sum(map(world.weight, world.clients))
        for round in range(1, world.rounds + 1):
            cohort = world.cohort(round)
            theta = self.before(round, theta)
            held = self.held(round, cohort)
            done = {one: self.client(round, one, held[one], theta, known.get(one)) for one in cohort}
            ends = {one: end for one, (end, _) in done.items()}
            after = self.average(theta, ends, held)
            if world.base == "feddyn":
                alpha = world.strength
                for one in cohort:
                    known[one] = dict(known.get(one, {}))
                    for name, end in ends[one].items():
                        step = alpha * (end - theta[name])
                        known[one][name] = known[one].get(name, 0.0) - step
                        h[name] = h.get(name, 0.0) - world.weight(one) / everyone * step
                for name in {name for end in ends.values() for name in end}:
                    after[name] = after[name] - h[name] / alpha
            theta = self.after(round, after)
            sizes = {one: len(world.clients[one].labels) for one in cohort}
            loss = sum(sizes[one] * done[one][1] for one in cohort) / sum(sizes.values())
            yield Seen(dict(theta), {one: dict(mine) for one, mine in known.items()}, dict(h), loss)


class AllSmall(Averaging):
    """The first blocks of the backbone, as many as fit on the smallest client."""

    def server_layers(self) -> range:
        return range(min(party.depth for party in self.world.clients.values()))


class FedRA(Averaging):
    """Random blocks in each round (Su et al., Section 3.5)."""

    def held(self, round: int, cohort: list[str]) -> dict[str, list[int]]:
        rng, depth = self.world.draw(self.world.seed, "allocation", round), self.world.net.depth
        sizes = {one: self.world.clients[one].depth for one in cohort}
        return {one: sorted(rng.choice(depth, size=sizes[one], replace=False).tolist()) for one in cohort}


class InclusiveFL(Averaging):
    """The first blocks, with momentum distillation into the last block of smaller models (Liu et al., KDD 2022)."""

    beta, steps = 0.2, {}

    def held(self, round: int, cohort: list[str]) -> dict[str, list[int]]:
        return {one: list(range(self.world.clients[one].depth)) for one in cohort}

    def average(self, theta, ends, held):
        mixed, steps = {}, {}
        for one, end in ends.items():
            last, mixed[one] = len(held[one]) - 1, dict(end)
            larger = sorted(depth for depth in self.steps if depth > len(held[one]))
            for name in end:
                if larger and block_of(name) == last:
                    tail = name.split(".", 3)[3]
                    extra = [
                        self.steps[larger[0]][f"backbone.blocks.{layer}.{tail}"] for layer in range(last + 1, larger[0])
                    ]
                    momentum, own = sum(extra) / len(extra), end[name] - theta[name]
                    mixed[one][name] = theta[name] + (1 - self.beta) * own + self.beta * momentum
        for depth in {len(mine) for mine in held.values()}:
            members = {one: ends[one] for one in ends if len(held[one]) == depth}
            averaged = mean(theta, members, self.world.weight)
            steps[depth] = {name: averaged[name] - theta[name] for name in theta if block_of(name) in range(depth)}
        self.steps = steps
        return mean(theta, mixed, self.world.weight)


class DepthFL(InclusiveFL):
    """The first blocks, with heads that teach each other (Kim et al., ICLR 2023, Section 3.3)."""

    beta, at, ramp = 0.0, (1, 2), 0.3
    average = Averaging.average

    def heads(self, depth: int) -> list[str]:
        """Return the names of the heads of a client, each after as many blocks as its number says."""
        if depth == self.world.net.depth:
            return [*(f"heads.{one}" for one in self.at if one <= depth), "backbone.head"]
        return [f"heads.{one}" for one in sorted({*(one for one in self.at if one <= depth), depth})]

    def trained(self, client, held, theta):
        own = self.heads(len(held))
        return [name for name in theta if block_of(name) in held or name.rpartition(".")[0] in own]

    def outputs(self, w: Weights, images: Tensor, depth: int) -> list[Tensor]:
        net, tokens, out = self.world.net, self.world.net.embed(w, images), []
        for layer in range(depth):
            tokens = net.block(w, layer, tokens)
            if f"heads.{layer + 1}" in self.heads(depth):
                out.append(net.classify(w, tokens, f"heads.{layer + 1}"))
        return [*out, net.classify(w, tokens)] if depth == net.depth else out

    def loss(self, round, client, held):
        weight = math.exp(-5 * (1 - min(1, (round - 1) / (self.ramp * self.world.rounds))) ** 2)

        def whole(w, images, labels, *_):
            found = self.outputs(w, images, len(held))
            loss = sum(cross_entropy(one, labels) for one in found)
            for i, student in enumerate(found):
                for k, teacher in enumerate(found):
                    if i != k:
                        p = teacher.detach().softmax(1)
                        gap = (p * (p.log() - student.log_softmax(1))).sum(1).mean()
                        loss = loss + weight / (len(found) - 1) * gap
            return loss

        return whole

    def predict(self, theta, images):
        found = self.outputs({**self.world.frozen, **theta}, images, self.world.net.depth)
        return sum(found) / len(found)


def vit_of(model, heads: int, scaling: float) -> Vit:
    """Return the functions of a model's ViT."""
    return Vit(heads, len(model.backbone.blocks), model.mean, model.std, scaling)
