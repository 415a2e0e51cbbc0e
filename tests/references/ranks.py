"""Whole runs of clients with unequal ranks, and of RoLoRA, on the functions of `whole_runs.py`.

A client of rank r is written as a client of the full rank whose rows of A and columns of B beyond r are zero: then
their gradients are zero too, so they stay zero. `masks` are 1 in the entries that a client has, and 0 elsewhere.

The mean of an entry is taken over the clients that have it. With FedDyn, an entry that no client of the cohort has
keeps its value.
"""

from collections.abc import Iterator

import torch

from tests.references.networks import Weights
from tests.references.whole_runs import Averaging, Seen, block_of, train


class Ranked(Averaging):
    """FedAvg on each client's first blocks, with a rank for each client."""

    ranks: dict[str, int]

    def held(self, round: int, cohort: list[str]) -> dict[str, list[int]]:
        return {one: list(range(self.world.clients[one].depth)) for one in cohort}

    def active(self, round: int, name: str) -> bool:
        """Return whether clients train a tensor in a round."""
        return True

    def mask(self, client: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        ones = torch.zeros_like(tensor)
        if ".lora_A." in name:
            ones[: self.ranks[client]] = 1
        elif ".lora_B." in name:
            ones[:, : self.ranks[client]] = 1
        else:
            ones += 1
        return ones

    def play(self) -> Iterator[Seen]:
        world, theta, known, h = self.world, dict(self.fresh), {}, {}
        everyone = sum(map(world.weight, world.clients))
        for round in range(1, world.rounds + 1):
            cohort = world.cohort(round)
            held, ends, masks, losses = self.held(round, cohort), {}, {}, {}
            for one in cohort:
                own = {name: self.mask(one, name, tensor) for name, tensor in theta.items()}
                start = {name: tensor * own[name] for name, tensor in theta.items()}
                mine = {name: own[name] * tensor for name, tensor in known.get(one, {}).items()}
                names = [name for name in theta if block_of(name) in (None, *held[one]) and self.active(round, name)]
                ends[one], losses[one] = train(world, round, one, start, names, self.loss(round, one, held[one]), mine)
                masks[one] = own
            after: Weights = {}
            for name, old in theta.items():
                holders = [one for one in cohort if name in ends[one]]
                total = sum((world.weight(one) * masks[one][name] for one in holders), torch.zeros_like(old))
                summed = sum((world.weight(one) * masks[one][name] * ends[one][name] for one in holders), 0 * old)
                reached = total > 0
                after[name] = torch.where(reached, summed / total.clamp(min=1e-9), old)
                if world.base != "feddyn" or not holders:
                    continue
                for one in holders:
                    step = world.strength * masks[one][name] * (ends[one][name] - old)
                    known.setdefault(one, {})[name] = known.get(one, {}).get(name, 0 * old) - step
                    h[name] = h.get(name, 0 * old) - world.weight(one) / everyone * step
                after[name] = torch.where(reached, after[name] - h[name] / world.strength, after[name])
            theta = after
            sizes = {one: len(world.clients[one].labels) for one in cohort}
            loss = sum(sizes[one] * losses[one] for one in cohort) / sum(sizes.values())
            yield Seen(dict(theta), {one: dict(mine) for one, mine in known.items()}, dict(h), loss)


class RoLoRA(Ranked):
    """RoLoRA (Chen et al., NeurIPS 2025): B is trained in odd rounds and A in even rounds, and the head in all."""

    def active(self, round: int, name: str) -> bool:
        frozen = ".lora_A." if round % 2 == 1 else ".lora_B."
        return frozen not in name
