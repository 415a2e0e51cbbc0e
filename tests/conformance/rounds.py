"""A single round, taken apart."""

from fedsweep.federation import Federation, federate
from fedsweep.seeding import stream
from fedsweep.types import ClientUpdate, RoundResult


def one_round(federation: Federation, round: int = 1) -> tuple[RoundResult, list[ClientUpdate]]:
    """The untuned state and the updates of the first round."""
    start = next(federate(federation))
    cohort = federation.cohort(round)
    rng = stream(federation.seed, "allocation", round)
    allocations = federation.method.allocate(start.state, cohort, federation.server, rng)
    return start, federation.method.local_updates(start.state, cohort, allocations, federation.trainer.at(round))
