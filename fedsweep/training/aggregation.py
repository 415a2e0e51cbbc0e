"""Functions that average the clients' updates on the server."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.models.lora import squared_norm
from fedsweep.training.aggregation_rules import Mean, Weighed, of_senders, scale
from fedsweep.types import AdapterState, ClientUpdate


class AggregationConfig(Config):
    """The options that set how the server aggregates the clients' updates."""

    weights: Literal["samples", "uniform"] = Field(
        "samples",
        description="`samples`: weigh clients by their number of images (as in the papers); `uniform`: weigh all "
        "clients equally (as in FedRA's released code)",
    )
    lora: Literal["factors", "freeze_a", "product_svd"] = Field(
        "factors",
        description="`factors`: average A and B separately (as in the papers); `freeze_a`: train and average only B, "
        "with one frozen A for all clients; `product_svd`: average the products B A and factor them by a truncated SVD",
    )
    rule: Mean = Field(Mean(), description="rule that combines the clients' tensors: `mean`, or a rule of a plug-in")

    def weight(self, update: ClientUpdate) -> float:
        """Return the weight of a client's update in the average, before the weights are divided by their sum."""
        return self.weight_of(update.num_examples)

    def weight_of(self, num_examples: int) -> float:
        """Return the weight of a client with `num_examples` images, before the weights are divided by their sum."""
        return float(num_examples) if self.weights == "samples" else 1.0


Weigh = Callable[[ClientUpdate], float]
"""A function that returns a client's weight before normalisation."""


def layerwise_mean(
    previous: AdapterState, updates: Sequence[ClientUpdate], config: AggregationConfig, weigh: Weigh | None = None
) -> AdapterState:
    """Combine each tensor over the clients that trained it; a tensor that no client trained keeps its value.

    By default, `aggregation.rule` is `mean`. The mean of tensor j is sum_i M_ij w_i r_j^i / sum_i M_ij w_i (FedRA v1,
    Eq. 3), where r_j^i is the tensor of client i, w_i is the client's weight, and M_ij is 1 if the client trained the
    tensor and 0 otherwise. The sums run over the clients in order of their ids, so the result does not depend on the
    order of `updates`.

    If `aggregation.lora` is `product_svd`, the products B A of the adapted layers are averaged instead of the factors,
    and the mean is factored again at the same rank.

    Args:
        previous: The tensors before the round, keyed by name.
        updates: The updates of the clients.
        config: The options that set the clients' weights, the way in which LoRA's factors are averaged, and the rule
            that replaces the mean.
        weigh: A function that returns the weight w_i of an update; None uses the weight that `config` sets.

    Raises:
        KeyError: A client sent a tensor that is not in `previous`.
    """
    for update in updates:
        if unknown := sorted(set(update.adapter) - set(previous)):
            raise KeyError(f"client {update.client} sent unknown tensors: {', '.join(unknown)}")
    ordered = _weighed(updates, weigh or config.weight)
    mean = config.rule.aggregate(previous, ordered)
    if config.lora == "product_svd":
        for a, b in _pairs(previous):
            if (sent_a := of_senders(a, ordered)) and (sent_b := of_senders(b, ordered)):
                mean[a], mean[b] = _refactored(*_stacked(*sent_a, sent_b[1]), mean[a], mean[b])
    return mean


def lora_residual(previous: AdapterState, updates: Sequence[ClientUpdate], config: AggregationConfig) -> float:
    """Return the relative error of the aggregated LoRA factors, ||mean(B A) - B' A'|| / ||mean(B A)||.

    B A is the product of a client's factors, and B' A' is the product of the aggregated factors. Changes that the
    method or the federated optimizer (such as FedDyn) makes after the aggregation are not included. The Frobenius norms
    are taken over all adapted layers that at least one client trained. The error is 0 if A is frozen. If
    `aggregation.lora` is `factors`, mean(B A) - B' A' is the weighted covariance of B and A over the clients.
    """
    ordered = _weighed(updates, config.weight)
    combined: AdapterState = {} if isinstance(config.rule, Mean) else layerwise_mean(previous, updates, config)
    missed, total, mean = 0.0, 0.0, Mean().combine
    for a, b in _pairs(previous):
        sent_a, sent_b = of_senders(a, ordered), of_senders(b, ordered)
        if not (sent_a and sent_b):
            continue
        left, right = _stacked(*sent_a, sent_b[1])
        mean_a, mean_b = (combined[a], combined[b]) if combined else (mean(*sent_a), mean(*sent_b))
        if config.lora == "product_svd":
            mean_a, mean_b = _refactored(left, right, mean_a, mean_b)
        total += squared_norm(left, right)
        minus = torch.cat([left, -mean_b.flatten(1).double()], dim=1)
        missed += squared_norm(minus, torch.cat([right, mean_a.flatten(1).double()]))
    return (missed / total) ** 0.5 if total else 0.0


def _weighed(updates: Sequence[ClientUpdate], weigh: Weigh) -> list[Weighed]:
    """Return the weight and the tensors of each client, ordered by client id."""
    return [(weigh(update), update.adapter) for update in sorted(updates, key=lambda update: update.client)]


def _pairs(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of LoRA's factors A and B for every adapted layer with a trainable A."""
    return ((name, name.replace(".lora_A.", ".lora_B.")) for name in names if ".lora_A." in name)


def _stacked(shares: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two matrices whose product is the weighted mean of the clients' products B A, in double precision.

    Args:
        shares: The weight of each client divided by the sum of all weights, (K,).
        a: The clients' factors A, (K, r, ...). A convolution is treated as a matrix.
        b: The clients' factors B in the same order, (K, out, r, ...).

    Returns:
        Matrices of shapes (out, K r) and (K r, in) for K clients and rank r.
    """
    left = scale(shares, 3) * b.flatten(2)
    return left.transpose(0, 1).flatten(1), a.flatten(2).flatten(0, 1).double()


def _refactored(left: Tensor, right: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return new factors (A', B') whose product B' A' best approximates `left @ right` at the rank of `a`.

    For the truncated singular value decomposition U S V^T of `left @ right`, A' is c R V^T and B' is U S R^T / c. The
    product is the same for every rotation R and scale c, but the SGD steps of the next round depend on R and c.
    Therefore, R and c are chosen so that A' has the norm and, as far as possible, the direction of `a`, the mean of the
    clients' factors A. Otherwise, the decomposition would change the effective learning rate. `b` is the mean of the
    clients' factors B, and may be zero.
    """
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, s, v = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)  # at most K r by K r, and at most W's size
    old = a.flatten(1).double()
    rank = min(len(a), len(s))
    rows = v[:rank] @ q_right.T
    turn_left, _, turn_right = torch.linalg.svd(old @ rows.T, full_matrices=False)
    turn = turn_left @ turn_right  # (r, rank), by orthogonal Procrustes
    scale = (old.square().sum() / rank).sqrt()
    new_a = scale * turn @ rows
    new_b = (q_left @ u[:, :rank] * s[:rank]) @ turn.T / scale
    return new_a.to(a.dtype).view_as(a), new_b.to(b.dtype).view_as(b)
