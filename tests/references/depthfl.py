"""DepthFL's loss (Kim et al., ICLR 2023, Section 3.3) in loops and double precision, temperature 1:

L = sum_i CE(z_i, y) + w / (K - 1) sum_i sum_{k != i} mean_n sum_c p_k(c) (log p_k(c) - log p_i(c)).

Here, z_i are the logits of head i of K, and p_i is their softmax.
"""

import math

import numpy as np


def loss(logits: list[np.ndarray], labels: np.ndarray, weight: float) -> float:
    """Return the loss L of K arrays of logits (n, classes)."""
    count, heads = len(labels), len(logits)
    total = 0.0
    logs = []
    for z in logits:
        table = []
        for row in z.astype(np.float64):
            norm = math.log(sum(math.exp(value - row.max()) for value in row)) + row.max()
            table.append([value - norm for value in row])
        logs.append(table)
    for i in range(heads):
        total += sum(-logs[i][n][labels[n]] for n in range(count)) / count
        for k in range(heads):
            if k != i:
                distance = sum(
                    math.exp(teacher) * (teacher - student)
                    for n in range(count)
                    for teacher, student in zip(logs[k][n], logs[i][n], strict=True)
                )
                total += weight / (heads - 1) * distance / count
    return total
