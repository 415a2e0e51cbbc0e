"""Malicious clients, which send reversed updates to the server (FedMS, Section 4.2.2)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from fedsweep.common.randomness import stream
from fedsweep.models.client_rank import cut
from fedsweep.models.names import is_statistic
from fedsweep.types import AdapterState, ClientId, ClientUpdate

Attack = Literal["reversed_update", "reversed_weights"]


def malicious_clients(clients: Iterable[ClientId], share: float, seed: int) -> frozenset[ClientId]:
    """Draw the malicious clients at random; their number is `share` times the number of all clients, rounded.

    The draw depends only on `clients`, `share` and `seed`.

    >>> sorted(malicious_clients([f"client-{number}" for number in range(10)], 0.2, seed=0))
    ['client-2', 'client-6']
    """
    ordered = sorted(clients)
    chosen = stream(seed, "malicious").permutation(len(ordered))[: int(share * len(ordered) + 0.5)]
    return frozenset(ordered[place] for place in chosen)


def attacked(
    sent: Mapping[ClientId, AdapterState], updates: Sequence[ClientUpdate], attack: Attack
) -> list[ClientUpdate]:
    """Return the updates that the server receives, in which the updates of malicious clients are reversed.

    Let theta^t be the tensors that the server sent to client i, and theta_i the tensors that the client has trained.
    With `reversed_update`, a malicious client sends theta^t - (theta_i - theta^t), a step of the same size in the
    opposite direction. With `reversed_weights`, it sends -theta_i, as the FedMS paper literally says.
    Running statistics, and tensors that a client does not send, are not reversed.

    Args:
        sent: For each malicious client, the tensors theta^t that the server sent to it.
        updates: The updates of all clients of the cohort.
        attack: The kind of attack.
    """

    def reverse(update: ClientUpdate) -> ClientUpdate:
        given = cut(sent[update.client], update.allocation.rank)
        own = {
            name: one if is_statistic(name) else (2 * given[name] - one if attack == "reversed_update" else -one)
            for name, one in update.adapter.items()
        }
        return replace(update, adapter=own)

    return [reverse(update) if update.client in sent else update for update in updates]
