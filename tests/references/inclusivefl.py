"""InclusiveFL's momentum distillation (Liu et al., KDD 2022, Section 4.3) for clients that hold prefixes, in loops.

d_k is the update of client k. A size class is all clients of one depth, and D_c is its mean update, weighted by the
clients' sizes. From the second round on, the last block l of a class of depth d becomes
r_l + (1 - beta) d_k,l + beta mean_{j = d .. d'-1} D_{d'},j, where D is from the previous round and d' is the next
larger depth. The server then averages each block over the clients that hold it.
"""

import numpy as np


def play(
    start: np.ndarray, depths: list[int], sizes: list[float], changes: list[list[np.ndarray]], beta: float
) -> list[np.ndarray]:
    """Return the blocks (L, d) after every round; `changes[t][k]` (depth of k, d) is client k's update in round t."""
    r = start.astype(np.float64)
    memory: dict[int, np.ndarray] = {}
    seen = []
    for change in changes:
        sent = []
        for k in range(len(depths)):
            mine = change[k].astype(np.float64).copy()
            larger = [depth for depth in memory if depth > depths[k]]
            if larger:
                extra = memory[min(larger)][depths[k] : min(larger)]
                mine[depths[k] - 1] = (1 - beta) * mine[depths[k] - 1] + beta * extra.sum(axis=0) / len(extra)
            sent.append(mine)
        new = r.copy()
        for j in range(len(r)):
            holders = [k for k in range(len(depths)) if depths[k] > j]
            if holders:
                weight = sum(sizes[k] for k in holders)
                new[j] = r[j] + sum(sizes[k] * sent[k][j] for k in holders) / weight
        memory = {}
        for depth in set(depths):
            members = [k for k in range(len(depths)) if depths[k] == depth]
            weight = sum(sizes[k] for k in members)
            memory[depth] = sum(sizes[k] * change[k].astype(np.float64) for k in members) / weight
        r = new
        seen.append(r.copy())
    return seen
