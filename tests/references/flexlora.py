"""FlexLoRA (Bai et al., NeurIPS 2024) in loops and double precision, on one layer.

W' = sum_i n_i B_i A_i / sum_i n_i, with A_i (r_i, in) and B_i (out, r_i). The server keeps the best approximation of W'
at its rank, and client i receives the best approximation at the rank r_i.
"""

import numpy as np

Factors = tuple[np.ndarray, np.ndarray]
"""The factors A (r, in) and B (out, r) of a client."""


def mean_product(sizes: list[float], clients: list[Factors]) -> np.ndarray:
    """Return W' (out, in), the mean of the clients' products, weighted by `sizes`."""
    out, inside = len(clients[0][1]), clients[0][0].shape[1]
    found = np.zeros((out, inside))
    for size, (a, b) in zip(sizes, clients, strict=True):
        for row in range(out):
            for column in range(inside):
                found[row, column] += size / sum(sizes) * sum(b[row, i] * a[i, column] for i in range(len(a)))
    return found


def best(product: np.ndarray, rank: int) -> np.ndarray:
    """Return the matrix of rank `rank` that is nearest to `product` in the Frobenius norm."""
    u, s, v = np.linalg.svd(product)
    return sum((s[i] * np.outer(u[:, i], v[i]) for i in range(min(rank, len(s)))), np.zeros(product.shape))


def energy_beyond(products: list[np.ndarray], rank: int) -> float:
    """Return 1 - sum_{j <= rank} sigma_j^2 / sum_j sigma_j^2, with both sums over all products."""
    energies = [np.linalg.svd(one, compute_uv=False) ** 2 for one in products]
    return sum(one[rank:].sum() for one in energies) / sum(one.sum() for one in energies)
