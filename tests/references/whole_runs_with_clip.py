"""Runs of several rounds of the methods on CLIP, in double precision; see `whole_runs` for the loop over rounds."""

from functools import partial

import torch
from torch import Tensor

from tests.references.networks import Clip, Weights, adapted, cross_entropy, linear, unit
from tests.references.whole_runs import Averaging, Party, World, block_of, descend, train


class Frozen(Averaging):
    """FedCLIP and PromptFL: both encoders are frozen, and the tensors outside the blocks are averaged."""

    def trained(self, client, held, theta):
        return list(theta)

    def loss(self, round, client, held):
        return lambda w, images, labels, *_: cross_entropy(self.world.net.logits(w, images), labels)


class ZeroShot(Frozen):
    """CLIP without training; the loss is that of all training images."""

    def client(self, round, client, held, theta, known):
        party = self.world.clients[client]
        return {}, cross_entropy(self.predict(theta, party.images), party.labels).item()


class FedMS(Averaging):
    """A global expert, and then local experts with gates (Wu et al., IEEE TMC, Sections 3.1 to 3.3)."""

    global_rounds, queue, threshold, by_loss = 1, 1, 0.9, True

    def __init__(self, world: World, start: Weights, trunk, held_out: dict[str, Party]) -> None:
        super().__init__(world, start)
        self.trunk, self.held_out, self.losses, self.round = trunk, held_out, {}, 0
        self.experts, self.queues = {}, {client: [] for client in world.clients}
        self.active = dict.fromkeys(world.clients, 1)

    def before(self, round, theta):
        self.round = round
        return theta

    def forgets(self, round):
        return round == self.global_rounds + 1

    def average(self, theta, ends, held):
        if self.round <= self.global_rounds or not self.by_loss:
            return super().average(theta, ends, held)
        total = sum(self.losses[one] for one in ends)
        names = next(iter(ends.values()))
        return theta | {name: sum(self.losses[one] / total * ends[one][name] for one in ends) for name in names}

    def gate(self, w: Weights, x: Tensor, statistics: Weights | None = None) -> Tensor:
        """Return lambda (n,) from the trunk's features; in training, update the running statistics."""
        for place in (0, 2):
            x = linear(w, f"gate.adapter.{place}", x, 0)
            name = f"gate.adapter.{place + 1}"
            mean, var = w[f"{name}.running_mean"], w[f"{name}.running_var"]
            if statistics is not None and len(x) > 1:
                mean, var, count = x.mean(0), ((x - x.mean(0)) ** 2).mean(0), len(x)
                for one, now in (("running_mean", mean), ("running_var", var * count / (count - 1))):
                    statistics[f"{name}.{one}"] = 0.9 * statistics[f"{name}.{one}"] + 0.1 * now.detach()
            x = (x - mean) / (var + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]
        return torch.sigmoid(x[:, 0])

    def mixed(self, w, images, theta, statistics=None):
        mix = self.gate(w, self.trunk(images), statistics)[:, None]
        whole = self.world.net.logits({**self.world.frozen, **theta}, images).detach()
        return mix * whole + (1 - mix) * self.world.net.logits(w, images)

    def client(self, round, client, held, theta, known):
        net = self.world.net
        if round <= self.global_rounds:
            names = [name for name in theta if not name.startswith("gate.")]
            return train(self.world, round, client, theta, names, Frozen.loss(self, round, client, held), known)
        statistics = {name: one.clone() for name, one in theta.items() if "running_" in name}
        lowest, start = net.depth - self.active[client], {**theta, **self.experts.get(client, {})}
        names = [name for name in theta if name not in statistics]
        names = [name for name in names if name.startswith("gate.") or block_of(name) >= lowest]

        def loss(w, images, labels, *_):
            return cross_entropy(self.mixed(w, images, theta, statistics), labels)

        end, self.losses[client] = train(self.world, round, client, start, names, loss, known)
        own = {name: one for name, one in end.items() if not name.startswith("gate.")}
        self.experts[client] = {**self.experts.get(client, {}), **own}
        w = {**self.world.frozen, **start, **end, **statistics}
        images, labels = self.held_out[client].images, self.held_out[client].labels
        accuracy = float((self.mixed(w, images, theta).argmax(1) == labels).double().mean())
        queue = self.queues[client]
        stuck = len(queue) == self.queue and accuracy - sum(queue) / self.queue < self.threshold
        self.active[client] = min(self.active[client] + stuck, net.depth)
        self.queues[client] = [*queue, accuracy][-self.queue :]
        sent = {name: one for name, one in end.items() if name.startswith("gate.")}
        return {**sent, **statistics}, self.losses[client]

    def predict(self, theta, images):
        return self.world.net.logits({**self.world.frozen, **theta}, images)

    def own_accuracy(self, theta, client, party) -> float:
        """Return the accuracy of a client's mixture after stage two has begun."""
        w = {**self.world.frozen, **theta, **self.experts.get(client, {})}
        return float((self.mixed(w, party.images, theta).argmax(1) == party.labels).double().mean())


class FedAG(Averaging):
    """Small models on clients and CLIP with adapters on the server (Wang et al., Eqs. 1 to 10)."""

    gamma, strength, delta, lr, warm, epochs, size, joint = 0.1, 0.1, 0.001, 0.01, 2, 2, 8, True

    def __init__(self, world: World, start: Weights, clip: Clip, synthetic: dict[str, Party]) -> None:
        super().__init__(world, start)
        self.clip, self.synthetic = clip, synthetic
        self.domains = sorted({party.domain for party in world.clients.values()})
        self.copies, self.own, self.scores = {}, {}, {}
        self.text, self.scale = clip.texts(world.frozen), world.frozen["server.clip.backbone.logit_scale"].exp()
        self.seen = {name: clip.projected(world.frozen, party.images) for name, party in synthetic.items()}

    def phi(self, w: Weights, place: int, seen: Tensor) -> Tensor:
        return unit(adapted(w, f"server.adapters.{place}", seen)) @ self.text.T * self.scale

    def orders(self, purpose: str, round: int, domain: str, epochs: int) -> list[list[int]]:
        rng = self.world.draw(self.world.seed, purpose, round, domain)
        return [rng.permutation(len(self.synthetic[domain].labels)).tolist() for _ in range(epochs)]

    def adam(self, theta: Weights, names, moments: dict, loss) -> Weights:
        leaves = {name: theta[name].clone().requires_grad_() for name in names}
        gradients = torch.autograd.grad(
            loss({**self.world.frozen, **theta, **leaves}), list(leaves.values()), materialize_grads=True
        )
        options = {"name": "adam", "lr": self.lr, "betas": (0.9, 0.999), "eps": 1e-8}
        now = {name: theta[name] for name in names}
        return theta | descend(options, now, moments, dict(zip(names, gradients, strict=True)))

    def before(self, round, theta):
        if round > 1:
            return theta
        for place, domain in enumerate(self.domains):
            names, moments = [name for name in theta if name.startswith(f"server.adapters.{place}.")], {}
            for order in self.orders("adapter warm-up", round, domain, self.warm):
                for at in range(0, len(order), self.size):
                    rows = torch.tensor(order[at : at + self.size])
                    theta = self.adam(theta, names, moments, partial(self.of_adapter, domain=domain, rows=rows))
        return theta

    def of_adapter(self, w: Weights, domain: str, rows: Tensor) -> Tensor:
        """Return the cross-entropy of a domain's adapter on the domain's synthetic images."""
        phi = self.phi(w, self.domains.index(domain), self.seen[domain][rows])
        return cross_entropy(phi, self.synthetic[domain].labels[rows])

    def client(self, round, client, held, theta, known):
        net, party = self.world.net, self.world.clients[client]
        start = theta | self.copies.get(party.domain, {})
        if client in self.own:
            start |= {n: self.gamma * one + (1 - self.gamma) * start[n] for n, one in self.own[client].items()}
        names = [name for name in theta if not name.startswith("server.")]
        end, loss = train(self.world, round, client, start, names, self.loss(round, client, held), known)
        self.own[client], images = end, self.synthetic[party.domain]

        def features(pixels):
            tokens = net.embed({**self.world.frozen, **end}, pixels)
            for layer in held:
                tokens = net.block({**self.world.frozen, **end}, layer, tokens)
            return net.features({**self.world.frozen, **end}, tokens)

        mine, theirs = features(party.images), features(images.images)
        means = {label: mine[party.labels == label].mean(0) for label in set(party.labels.tolist())}
        cosines = [
            max(0.0, float(unit(one) @ unit(means[label]))) if label in means else 0.0
            for one, label in zip(theirs, images.labels.tolist(), strict=True)
        ]
        self.scores[party.domain] = torch.tensor(cosines, dtype=torch.float64)
        return end, loss

    def average(self, theta, ends, held):
        for client, end in ends.items():  # one client per domain
            self.copies[self.world.clients[client].domain] = dict(end)
        return dict(theta)

    def after(self, round, theta):
        present = sorted(self.copies)
        self.weights = {one: self.scores[one] / self.scores[one].mean() for one in present}
        orders = {one: self.orders("mutual learning", round, one, self.epochs) for one in present}
        steps = -(-max(len(self.synthetic[one].labels) for one in present) // self.size)
        joined = dict(theta)
        for one in present:
            joined |= {f"{one}/{name}": tensor for name, tensor in self.copies[one].items()}
        shared = [name for name in theta if name.startswith(("server.adapters", "server.attention"))]
        everything, moments = [*shared, *(name for name in joined if name not in theta)], {}
        of_copies, of_adapters = {one: {} for one in present}, {one: {} for one in present}
        for epoch in range(self.epochs):
            parts = {one: torch.tensor_split(torch.tensor(orders[one][epoch]), steps) for one in present}
            together = [{one: parts[one][at] for one in present if len(parts[one][at])} for at in range(steps)]
            for rows in together if self.joint else ():
                joined = self.adam(joined, everything, moments, partial(self.whole, rows=rows, count=len(present)))
            for one in () if self.joint else present:
                adapter = [name for name in shared if name.startswith(f"server.adapters.{self.domains.index(one)}.")]
                copy = [name for name in joined if name.startswith(f"{one}/")]
                for rows in torch.split(torch.tensor(orders[one][epoch]), self.size):
                    loss = partial(self.inside, domain=one, rows=rows)
                    taught = self.adam(joined, adapter, of_adapters[one], loss)
                    learned = self.adam(joined, copy, of_copies[one], loss)
                    joined = taught | {name: learned[name] for name in copy}
            for rows in () if self.joint else together:
                loss = partial(self.whole, rows=rows, count=len(present), inside=False)
                joined = self.adam(joined, shared, moments, loss)
        for one in present:
            self.copies[one] = {name: joined[f"{one}/{name}"] for name in self.copies[one]}
        return {name: joined[name] for name in theta}

    def whole(self, w: Weights, rows: dict[str, Tensor], count: int, inside: bool = True) -> Tensor:
        """Return the mean over domains of the loss of Eq. 10, or of its part across domains."""
        across = sum(self.across(w, one, places) for one, places in rows.items())
        within = sum(self.inside(w, one, places) for one, places in rows.items()) if inside else 0.0
        return (across + within) / count

    def inside(self, w, domain, rows):
        """Return J plus the cross-entropy of the domain's adapter (Eqs. 6 and 10)."""
        party, place = self.synthetic[domain], self.domains.index(domain)
        model = {name.partition("/")[2]: one for name, one in w.items() if name.startswith(f"{domain}/")}
        layers = range(self.world.net.depth)
        theta = self.world.net.logits(model, party.images[rows], layers).softmax(1)
        phi = self.phi(w, place, self.seen[domain][rows])
        p = phi.softmax(1)
        gap = (theta * (theta.log() - p.log()) + p * (p.log() - theta.log())).sum(1)
        return (self.weights[domain][rows] * gap).mean() / 2 + cross_entropy(phi, party.labels[rows])

    def across(self, w, domain, rows):
        """Return the cross-entropy of the attention plus the regulariser (Eqs. 8 to 10)."""
        eta, beta = self.eta(w, self.seen[domain][rows])
        place = self.domains.index(domain)
        others = torch.stack([one for n, one in enumerate(beta) if n != place])
        margin = (self.delta + others.max(0).values - beta[place]).clamp(min=0).mean()
        return cross_entropy(eta, self.synthetic[domain].labels[rows]) + self.strength * margin

    def eta(self, w, seen):
        phis = torch.stack([self.phi(w, place, seen) for place in range(len(self.domains))])
        hidden = linear(w, "server.attention.0", phis, 0).clamp(min=0)
        beta = linear(w, "server.attention.2", hidden, 0)[..., 0].softmax(0)
        return (beta[..., None] * phis).sum(0), beta

    def predict(self, theta, images, domain=None):
        w, seen = {**self.world.frozen, **theta}, self.clip.projected(self.world.frozen, images)
        return self.eta(w, seen)[0] if domain is None else self.phi(w, self.domains.index(domain), seen)
