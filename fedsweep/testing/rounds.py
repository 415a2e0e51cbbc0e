"""A function that runs one round of a federation and returns its intermediate results."""

from fedsweep.federation.rounds import Federation
from fedsweep.types import ClientUpdate, RoundResult


def one_round(federation: Federation, round: int = 1) -> tuple[RoundResult, list[ClientUpdate]]:
    """Return the state that the server sends in a round and the clients' updates, without evaluating the model."""
    cohort, trainer = federation.cohort(round), federation.trainer.at(round)
    state = federation.method.begin_round(federation.initial_state(), federation.server, trainer)
    start = RoundResult(0, state)
    allocations = federation.allocate(start.state, cohort, round)
    return start, federation.method.local_updates(start.state, cohort, allocations, trainer)
