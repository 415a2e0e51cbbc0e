"""A single round, taken apart."""

from dataclasses import replace

from fedsweep.common.randomness import stream
from fedsweep.federation.rounds import Federation, federate
from fedsweep.types import ClientUpdate, RoundResult


def one_round(federation: Federation, round: int = 1) -> tuple[RoundResult, list[ClientUpdate]]:
    """The state that the server sends in a round, all but untuned, and the updates."""
    start = next(federate(federation))
    cohort, trainer = federation.cohort(round), federation.trainer.at(round)
    start = replace(start, state=federation.method.begin_round(start.state, federation.server, trainer))
    rng = stream(federation.seed, "allocation", round)
    allocations = federation.method.allocate(start.state, cohort, federation.server, rng)
    return start, federation.method.local_updates(start.state, cohort, allocations, trainer)
