"""The metrics of the blocks that the clients of a round hold, from Theorem 1 of the FedRA paper (second version)."""

from collections.abc import Mapping

from fedsweep.types import ClientId, LayerAllocation, ServerState

GAMMA, GAMMA_STAR, IDLE = "allocation/gamma", "allocation/gamma_star", "allocation/idle"


def coverage(state: ServerState, allocations: Mapping[ClientId, LayerAllocation]) -> dict[str, float]:
    """Return the block coverage metrics of a round: Gamma, Gamma* and the number of idle blocks.

    A block of the server's model is active if at least one client of the cohort holds it, and idle otherwise. To
    compute Gamma, count for each active block the clients that hold the block; Gamma is the smallest of these counts.
    Gamma*, from Theorem 1 of the FedRA paper (second version), is the smallest Gamma of all rounds so far.
    """
    holders = [sum(layer in row.held for row in allocations.values()) for layer in state.layers]
    fewest = min((count for count in holders if count), default=0)
    star = fewest if state.gamma_star is None else min(fewest, state.gamma_star)
    return {GAMMA: float(fewest), GAMMA_STAR: float(star), IDLE: float(holders.count(0))}
