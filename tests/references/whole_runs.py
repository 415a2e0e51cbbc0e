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
        return self.loss_on(round, self.world.net.block, held)

    def loss_on(self, round: int, step, layers: list[int]):
        """Return the loss of a walk over `layers`; `step(w, layer, tokens)` runs the block or its replacement."""

        def whole(w, images, labels, *_):
            tokens = self.world.net.embed(w, images)
            for layer in layers:
                tokens = step(w, layer, tokens)
            return cross_entropy(self.world.net.classify(w, tokens), labels)

        return whole

    def before(self, round: int, theta: Weights) -> Weights:
        return theta

    def forgets(self, round: int) -> bool:
        """Return whether the base optimizer begins anew in this round."""
        return False

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
            if self.forgets(round):
                known, h = {}, {}
            held = self.held(round, cohort)
            done = {one: self.client(round, one, held[one], theta, known.get(one)) for one in cohort}
            ends = {one: end for one, (end, _) in done.items()}
            after = self.average(theta, ends, held)
            if world.base == "feddyn":
                alpha = world.strength
                for one in cohort:
                    known[one] = dict(known.get(one, {}))
                    for name, end in ends[one].items():
                        if "running_" in name:
                            continue
                        step = alpha * (end - theta[name])
                        known[one][name] = known[one].get(name, 0.0) - step
                        h[name] = h.get(name, 0.0) - world.weight(one) / everyone * step
                for name in {name for end in ends.values() for name in end if "running_" not in name}:
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

    def outputs(self, w: Weights, images: Tensor, step, layers: list[int]) -> list[Tensor]:
        net, tokens, out, own = self.world.net, self.world.net.embed(w, images), [], self.heads(len(layers))
        for place, layer in enumerate(layers, start=1):
            tokens = step(w, layer, tokens)
            if f"heads.{place}" in own:
                out.append(net.classify(w, tokens, f"heads.{place}"))
        return [*out, net.classify(w, tokens)] if "backbone.head" in own else out

    def loss_on(self, round, step, layers):
        weight = math.exp(-5 * (1 - min(1, (round - 1) / (self.ramp * self.world.rounds))) ** 2)

        def whole(w, images, labels, *_):
            found = self.outputs(w, images, step, layers)
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
        net = self.world.net
        found = self.outputs({**self.world.frozen, **theta}, images, net.block, list(range(net.depth)))
        return sum(found) / len(found)


class FedBRICK(Averaging):
    """BRICKs over a depth method (Zhang et al., AAAI 2026, Eqs. 17 to 24)."""

    epochs, lr, lambda_w, lambda_theta, lambda_d, norm = 2, 0.01, 0.3, 0.2, 0.7, "mean"

    def __init__(self, world: World, start: Weights, over: type[Averaging], proxy: dict[str, Tensor]) -> None:
        super().__init__(world, start)
        self.over, self.proxy = over(world, start), proxy
        self.held, self.average, self.predict = self.over.held, self.over.average, self.over.predict

    def brick(self, w: Weights, domain: str, layer: int, x: Tensor) -> Tensor:
        a1, b1, a2, b2 = (w[f"bricks.for_{domain}.{layer}.{one}"] for one in ("a1", "b1", "a2", "b2"))
        return x * (x @ a1.T @ b1.T).softmax(-1) + x @ a2.T @ b2.T + x

    def before(self, round, theta):
        world, theta = self.world, dict(theta)
        adam = {"name": "adam", "lr": self.lr, "betas": (0.9, 0.999), "eps": 1e-8}
        for domain, images in sorted(self.proxy.items()):
            w = {**world.frozen, **theta}
            passed = [world.net.embed(w, images)]
            for layer in range(world.net.depth):
                passed.append(world.net.block(w, layer, passed[-1]))
            rng = world.draw(world.seed, "distillation", round, f"for_{domain}")
            orders = [rng.permutation(len(images)).tolist() for _ in range(self.epochs)]
            for layer in range(world.net.depth):
                names, moments = [f"bricks.for_{domain}.{layer}.{one}" for one in ("a1", "b1", "a2", "b2")], {}
                for order in orders:
                    for at in range(0, len(order), world.batch):
                        rows = torch.tensor(order[at : at + world.batch])
                        leaves = {name: theta[name].clone().requires_grad_() for name in names}
                        gap = self.brick(leaves, domain, layer, passed[layer][rows]) - passed[layer + 1][rows]
                        gradients = torch.autograd.grad((gap**2).mean(), list(leaves.values()))
                        now = {name: theta[name] for name in names}
                        theta |= descend(adam, now, moments, dict(zip(names, gradients, strict=True)))
        return theta

    def client(self, round, client, held, theta, known):
        world, domain = self.world, self.world.clients[client].domain
        layers, net = list(range(world.net.depth)), world.net
        bricks = {name: int(name.split(".")[2]) for name in theta if name.startswith(f"bricks.for_{domain}.")}
        depth = range(len(held)) if not isinstance(self.over, DepthFL) else layers
        own = [name for name in self.over.trained(client, list(depth), theta) if not name.startswith("bricks.")]
        own = [name for name in own if block_of(name) is None] + [n for n in theta if block_of(n) in held]
        missing = [name for name, layer in bricks.items() if layer not in held]
        adapters = [name for name in own if ".lora_" in name]

        def in_place(w, layer, x):
            return net.block(w, layer, x) if layer in held else self.brick(w, domain, layer, x)

        first = self.over.loss_on(round, in_place, layers)

        def stage_one(w, images, labels, *_):
            w_pull = sum(((w[name] - theta[name]) ** 2).sum() for name in adapters)
            theta_pull = sum(((w[name] - theta[name]) ** 2).sum() for name in missing)
            return first(w, images, labels) + self.lambda_w * w_pull + self.lambda_theta * theta_pull

        names = [name for name in theta if name in {*own, *missing}]
        end, loss = train(world, round, client, theta, names, stage_one, known)

        def stage_two(w, images, labels, progress, rows):
            gaps, alpha = [], 1 - progress

            def blend(w, layer, x):
                stand_in = self.brick(w, domain, layer, x)
                if layer not in held:
                    return stand_in
                block = net.block(w, layer, x)
                square = (stand_in - block.detach()) ** 2
                gaps.append(square.mean() if self.norm == "mean" else square.sum() / len(images))
                return alpha * block + (1 - alpha) * stand_in

            task = self.over.loss_on(round, blend, layers)(w, images, labels)
            return task + self.lambda_d / len(held) * sum(gaps)

        kept = [name for name, layer in bricks.items() if layer in held]
        second, _ = train(world, round, client, {**theta, **end}, kept, stage_two, known, session=1)
        return {**end, **second}, loss


class FedOT(Averaging):
    """The lowest and the topmost block around an emulator of every other block (Xiao et al., 2023)."""

    def held(self, round: int, cohort: list[str]) -> dict[str, list[int]]:
        return {one: [0, 1, 3] for one in cohort}


class WithSynthetic(Averaging):
    """FedAvg whose server trains on synthetic images after each average (FedAG, Section 4.2)."""

    images: Party

    def after(self, round, theta):
        steps = math.ceil(len(self.images.labels) / self.world.batch)
        loss = self.loss(round, "server", list(self.server_layers()))
        given = {"steps": steps, "party": self.images, "base": "fedavg"}
        end, _ = train(self.world, round, "server", theta, list(theta), loss, **given)
        return {**theta, **end}


def vit_of(model, heads: int, scaling: float) -> Vit:
    """Return the functions of a model's ViT."""
    return Vit(heads, len(model.backbone.blocks), model.mean, model.std, scaling)
