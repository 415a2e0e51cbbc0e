"""raFLoRA (Wu et al., 2026), Eq. 8, in loops and double precision, on one layer.

The levels R_1 < ... < R_m are all ranks that clients of the run can have. Components l + 1 to h, between two levels,
are averaged over the clients k with r_k >= h: sum_k n_k B_k[:, l:h] A_k[l:h, :] / sum_k n_k. If there is no such
client, the server's previous components are used.
"""

import numpy as np

from tests.references.flexlora import Factors


def partitioned(sizes: list[float], clients: list[Factors], levels: list[int], previous: Factors) -> np.ndarray:
    """Return the server's product (out, in) before it is factored again; `previous` are the server's factors."""
    old_a, old_b = previous
    found, low = np.zeros((len(old_b), old_a.shape[1])), 0
    for high in sorted(levels):
        total = 0.0
        for size, (a, _) in zip(sizes, clients, strict=True):
            if len(a) >= high:
                total += size
        for i in range(low, high):
            for size, (a, b) in zip(sizes, clients, strict=True):
                if len(a) >= high:
                    found += size / total * np.outer(b[:, i], a[i])
            if total == 0:
                found += np.outer(old_b[:, i], old_a[i])
        low = high
    return found
