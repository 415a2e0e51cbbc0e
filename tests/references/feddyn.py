"""FedDyn (Acar et al., ICLR 2021), Algorithm 1, on clients with quadratic losses, in loops and double precision.

L_k(x) = 1/2 (x - c_k)^T diag(q_k) (x - c_k). Each client takes plain gradient steps on
L_k(x) - <g_k, x> + alpha/2 |x - x^t|^2; then g_k <- g_k - alpha (x_k - x^t). The server keeps
h <- h - alpha sum_{k in P} p_k (x_k - x^t) and sets x^{t+1} = sum_{k in P} p_k x_k / sum_{k in P} p_k - h / alpha.
With p_k = 1/m, this is the algorithm of the paper.

A client can hold only some of the coordinates. It leaves the others as they are, and each coordinate is averaged and
corrected as if only the clients that hold it were in the cohort.
"""

import numpy as np


def feddyn(
    start: np.ndarray,
    centres: np.ndarray,
    curvatures: np.ndarray,
    shares: np.ndarray,
    cohorts: list[list[int]],
    alpha: float,
    lr: float,
    steps: int,
    held: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Return the global x after every round.

    `centres` and `curvatures` have the shape (clients, d); `cohorts` lists the clients of each round. `held` (clients,
    d) is 1 where a client holds a coordinate, and 0 elsewhere; by default, all clients hold all coordinates.
    """
    has = np.ones_like(centres) if held is None else held
    x = start.astype(np.float64)
    g = np.zeros_like(centres, dtype=np.float64)
    h = np.zeros_like(x)
    seen = []
    for cohort in cohorts:
        ends = {}
        for k in cohort:
            local = x.copy()
            for _ in range(steps):
                gradient = curvatures[k] * (local - centres[k]) - g[k] + alpha * (local - x)
                local = local - lr * has[k] * gradient
            ends[k] = local
        for k in cohort:
            g[k] = g[k] - alpha * (ends[k] - x)
            h = h - alpha * shares[k] * (ends[k] - x)
        after = x.copy()
        for j in range(len(x)):
            holders = [k for k in cohort if has[k][j]]
            total = sum(shares[k] for k in holders)
            if holders:
                after[j] = sum(shares[k] / total * ends[k][j] for k in holders) - h[j] / alpha
        x = after
        seen.append(x.copy())
    return seen


def fedprox(
    start: np.ndarray, centre: np.ndarray, curvature: np.ndarray, mu: float, lr: float, steps: int
) -> np.ndarray:
    """Return x after gradient steps on one client's L(x) + mu/2 |x - x^t|^2 (Li et al., MLSys 2020, Eq. 2)."""
    x = start.astype(np.float64)
    for _ in range(steps):
        x = x - lr * (curvature * (x - centre) + mu * (x - start))
    return x
