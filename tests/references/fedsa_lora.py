"""FedSA-LoRA (Guo et al., ICLR 2025) over whole runs, on the functions of `whole_runs.py`.

Clients train A, B and the head. The server averages A and, if the head is shared, the head; each client keeps the rest.
A client of rank r is written as a client of the full rank whose rows of A and columns of B beyond r are zero.
"""

from collections.abc import Iterator

import torch

from tests.references.networks import Weights
from tests.references.ranks import Ranked
from tests.references.whole_runs import block_of, train


class FedSALoRA(Ranked):
    """The rounds of FedSA-LoRA without a base optimizer, and the mean logits of the clients of a domain."""

    shared_head = True

    def kept(self, name: str) -> bool:
        return ".lora_B." in name or (".lora_A." not in name and not self.shared_head)

    def rounds(self) -> Iterator[tuple[Weights, dict[str, Weights]]]:
        """Yield the server's tensors and the tensors that each client keeps, after each round."""
        world, theta, own = self.world, dict(self.fresh), {}
        for round in range(1, world.rounds + 1):
            cohort = world.cohort(round)
            held, ends = self.held(round, cohort), {}
            for one in cohort:
                full = theta | own.get(one, {})
                start = {name: tensor * self.mask(one, name, tensor) for name, tensor in full.items()}
                names = [name for name in theta if block_of(name) in (None, *held[one])]
                ends[one], _ = train(world, round, one, start, names, self.loss(round, one, held[one]))
                mine = {name: tensor for name, tensor in ends[one].items() if self.kept(name)}
                own[one] = own.get(one, {}) | mine
            after = {}
            for name, old in theta.items():
                holders = [] if self.kept(name) else [one for one in cohort if name in ends[one]]
                weights = [world.weight(one) * self.mask(one, name, old) for one in holders]
                total = sum(weights, torch.zeros_like(old))
                summed = sum((w * ends[one][name] for w, one in zip(weights, holders, strict=True)), 0 * old)
                after[name] = torch.where(total > 0, summed / total.clamp(min=1e-9), old)
            theta = after
            yield dict(theta), {one: dict(mine) for one, mine in own.items()}

    def of_domain(self, theta: Weights, own: dict[str, Weights], images: torch.Tensor, domain: str) -> torch.Tensor:
        """Return the mean of the logits of the models of all clients of a domain."""
        clients = [one for one, party in self.world.clients.items() if party.domain == domain]
        return sum(self.predict(theta | own.get(one, {}), images) for one in clients) / len(clients)
