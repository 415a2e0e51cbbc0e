"""HetLoRA (Cho et al., EMNLP 2024) in loops and double precision. A client has one pair of factors for each layer.

Weights: w_k = sqrt(sum_l ||B_kl A_kl||^2), divided by their sum over the clients that hold a layer. Averages: factors
are padded with zeros to the full rank. Pruning: c = max(least, floor(gamma r)), and the rank falls to c if the tail
norm sum_l ||B_l[:, c:]|| ||A_l[c:]|| became smaller in training.
"""

import math

import numpy as np

from tests.references.flexlora import Factors


def weight(layers: list[Factors]) -> float:
    """Return the norm of a client's products over all its layers."""
    return math.sqrt(sum(float(((b @ a) ** 2).sum()) for a, b in layers))


def padded_mean(weights: list[float], clients: list[Factors], full: int) -> Factors:
    """Return the weighted means of the factors of one layer, padded with zeros to the rank `full`."""
    mean_a, mean_b = np.zeros((full, clients[0][0].shape[1])), np.zeros((len(clients[0][1]), full))
    for one, (a, b) in zip(weights, clients, strict=True):
        for i in range(len(a)):
            mean_a[i] += one / sum(weights) * a[i]
            mean_b[:, i] += one / sum(weights) * b[:, i]
    return mean_a, mean_b


def tail(layers: list[Factors], kept: int) -> float:
    """Return the regulariser of a client without its weight, for the components after the first `kept`."""
    return sum(float(np.sqrt((b[:, kept:] ** 2).sum()) * np.sqrt((a[kept:] ** 2).sum())) for a, b in layers)


def tail_gradients(layers: list[Factors], kept: int) -> list[Factors]:
    """Return the gradients of `tail` with respect to the factors of each layer; 0 where a norm is 0."""
    found = []
    for a, b in layers:
        norm_a, norm_b = np.linalg.norm(a[kept:]), np.linalg.norm(b[:, kept:])
        of_a, of_b = np.zeros_like(a), np.zeros_like(b)
        if norm_a:
            of_a[kept:] = norm_b * a[kept:] / norm_a
        if norm_b:
            of_b[:, kept:] = norm_a * b[:, kept:] / norm_b
        found.append((of_a, of_b))
    return found
