"""FedRA (Su, Li, Xue; arXiv 2311.11227v1), Eq. 3, written out in loops and double precision:

r_j(t+1) = sum_i M_ij |D_i| r_j^i / sum_i M_ij |D_i|   if sum_i M_ij > 0,   r_j(t) otherwise.
"""

import numpy as np


def layerwise_mean(
    previous: list[np.ndarray], matrix: np.ndarray, clients: list[list[np.ndarray]], sizes: list[float]
) -> list[np.ndarray]:
    """Return r(t+1); `previous[j]` is r_j(t), `clients[i][j]` r_j^i, `sizes[i]` |D_i|, and `matrix[i, j]` M_ij."""
    result = []
    for j in range(len(previous)):
        numerator = np.zeros(previous[j].shape, dtype=np.float64)
        denominator = 0.0
        for i in range(len(clients)):
            if matrix[i, j]:
                denominator += sizes[i]
                for place in np.ndindex(previous[j].shape):
                    numerator[place] += sizes[i] * float(clients[i][j][place])
        result.append(numerator / denominator if denominator else previous[j].astype(np.float64))
    return result
