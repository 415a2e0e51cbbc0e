"""Functions that average the clients' updates on the server."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.models.lora import squared_norm
from fedsweep.models.names import folded_name
from fedsweep.training.aggregation_rules import Mean, Weighed, partitions, scale
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
    previous: AdapterState,
    updates: Sequence[ClientUpdate],
    config: AggregationConfig,
    weigh: Weigh | None = None,
    ranks: Collection[int] = (),
) -> AdapterState:
    """Combine each tensor over the clients that trained it; a tensor that no client trained keeps its value.

    By default, `aggregation.rule` is `mean`. The mean of tensor j is sum_i M_ij w_i r_j^i / sum_i M_ij w_i (FedRA v1,
    Eq. 3), where r_j^i is the tensor of client i, w_i is the client's weight, and M_ij is 1 if the client trained the
    tensor and 0 otherwise. The sums run over the clients in order of their ids, so the result does not depend on the
    order of `updates`.

    If clients have unequal ranks, each row of A and each column of B is averaged over the clients whose rank reaches
    it, and keeps its value if no client reaches it.

    If `aggregation.lora` is `product_svd`, the products B A of the adapted layers are averaged instead of the factors,
    and the mean is factored again at the server's rank (see `refactored`).

    Args:
        previous: The tensors before the round, keyed by name.
        updates: The updates of the clients.
        config: The options that set the clients' weights, the way in which LoRA's factors are averaged, and the rule
            that replaces the mean.
        weigh: A function that returns the weight w_i of an update; None uses the weight that `config` sets.
        ranks: All ranks that a client of the run can have; empty if all clients have the server's rank. They are used
            only if `aggregation.lora` is `product_svd`.

    Raises:
        KeyError: A client sent a tensor that is not in `previous`.
    """
    for update in updates:
        if unknown := sorted(set(update.adapter) - set(previous)):
            raise KeyError(f"client {update.client} sent unknown tensors: {', '.join(unknown)}")
    ordered = weighed(updates, weigh or config.weight)
    mean = config.rule.aggregate(previous, ordered)
    return mean | factored_products(previous, ordered, mean, ranks) if config.lora == "product_svd" else mean


Product = Callable[[str, str, AdapterState, Sequence[Weighed]], tuple[Tensor, Tensor] | None]
"""A function such as `mean_product`, which returns two matrices whose product the server factors again."""


def factored_products(
    previous: AdapterState,
    sent: Sequence[Weighed],
    mean: AdapterState,
    ranks: Collection[int],
    product: Product | None = None,
) -> AdapterState:
    """Return the factors A and B of a product of the clients' factors, for each adapted layer that a client trained.

    Args:
        previous: The server's tensors before the round, keyed by name.
        sent: The weight and the tensors of each client, ordered by client id.
        mean: The means of the clients' factors, whose scale and direction the new factors keep (see `refactored`).
        ranks: All ranks that a client of the run can have; empty if all clients have the server's rank.
        product: The function that computes the product of a layer; None for `mean_product`.
    """
    found: AdapterState = {}
    for a, b in pairs(previous):
        if parts := (product or mean_product)(a, b, previous, sent):
            found[a], found[b] = refactored(*parts, mean[a], mean[b], ranks)
    return found


def lora_residual(
    previous: AdapterState,
    updates: Sequence[ClientUpdate],
    config: AggregationConfig,
    aggregate: Mapping[str, Tensor] | None = None,
    scaling: float = 1.0,
    ranks: Collection[int] = (),
) -> float:
    """Return the relative error of the aggregated LoRA factors, ||mean(B A) - B' A'|| / ||mean(B A)||.

    B A is the product of a client's factors, and B' A' is the product of the aggregated factors. Changes that the
    method or the federated optimizer (such as FedDyn) makes after the aggregation are not included. The Frobenius norms
    are taken over all adapted layers that at least one client trained. The error is 0 if A is frozen. If
    `aggregation.lora` is `factors`, mean(B A) - B' A' is the weighted covariance of B and A over the clients.

    Args:
        previous: The tensors before the round, keyed by name.
        updates: The updates of the clients.
        config: The options that set the clients' weights and the aggregation.
        aggregate: The tensors that a method with a rule of its own aggregated; None for `layerwise_mean`. If the method
            folds changes into frozen weights, the change of this round, divided by `scaling`, is added to B' A'.
        scaling: The server's scaling s of LoRA.
        ranks: All ranks that a client of the run can have (see `layerwise_mean`).
    """
    ordered, missed, total = weighed(updates, config.weight), 0.0, 0.0
    if aggregate is None:
        plain = isinstance(config.rule, Mean) and config.lora == "factors"
        factors = {name: previous[name] for pair in pairs(previous) for name in pair}
        aggregate = (
            Mean().aggregate(factors, ordered) if plain else layerwise_mean(previous, updates, config, ranks=ranks)
        )
    for a, b in pairs(previous):
        if (found := mean_product(a, b, previous, ordered)) is None:
            continue
        left, right = found
        total += squared_norm(left, right)
        minus = torch.cat([left, -aggregate[b].flatten(1).double()], dim=1)
        below = torch.cat([right, aggregate[a].flatten(1).double()])
        if (name := folded_name(a)) in aggregate:
            step = (aggregate[name].double() - previous[name].double()) / scaling
            missed += (minus @ below - step).square().sum().item()
        else:
            missed += squared_norm(minus, below)
    return (missed / total) ** 0.5 if total else 0.0


def weighed(updates: Sequence[ClientUpdate], weigh: Weigh) -> list[Weighed]:
    """Return the weight and the tensors of each client, ordered by client id."""
    return [(weigh(update), update.adapter) for update in sorted(updates, key=lambda update: update.client)]


def pairs(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of LoRA's factors A and B for every adapted layer with a trainable A."""
    return ((name, name.replace(".lora_A.", ".lora_B.")) for name in names if ".lora_A." in name)


def mean_product(a: str, b: str, previous: AdapterState, sent: Sequence[Weighed]) -> tuple[Tensor, Tensor] | None:
    """Return two matrices whose product is the weighted mean of the clients' products B A, in double precision.

    The mean is taken over the clients that sent at least one of the two factors. If a client sent only one, the other
    one is the server's. The ranks of the clients can differ. A convolution is treated as a matrix.

    Args:
        a: The name of a layer's factor A.
        b: The name of its factor B.
        previous: The server's tensors before the round, keyed by name.
        sent: The weight and the tensors of each client.

    Returns:
        Matrices of shapes (out, R) and (R, in), where R is the sum of the clients' ranks; None if no client sent one of
        the factors.
    """
    holders = [(weight, adapter) for weight, adapter in sent if a in adapter or b in adapter]
    if not holders:
        return None
    total = sum(weight for weight, _ in holders)
    shares = [weight / total if total else 1 / len(holders) for weight, _ in holders]
    ups = [adapter.get(a, previous[a]) for _, adapter in holders]
    downs = [adapter.get(b, previous[b]) for _, adapter in holders]
    if len({one.shape for one in ups}) == len({one.shape for one in downs}) == 1 and len(ups[0]) == downs[0].shape[1]:
        weights = torch.tensor(shares, dtype=torch.float64).to(ups[0].device)  # all clients in a few operations
        left = (scale(weights, 3) * torch.stack(downs).flatten(2)).transpose(0, 1).flatten(1)
        return left, torch.stack(ups).flatten(2).flatten(0, 1).double()
    ranks = [min(len(up), down.shape[1]) for up, down in zip(ups, downs, strict=True)]
    lefts = [share * down.flatten(1)[:, :rank].double() for share, down, rank in zip(shares, downs, ranks, strict=True)]
    return torch.cat(lefts, dim=1), torch.cat(
        [up[:rank].flatten(1).double() for up, rank in zip(ups, ranks, strict=True)]
    )


def refactored(left: Tensor, right: Tensor, a: Tensor, b: Tensor, ranks: Collection[int] = ()) -> tuple[Tensor, Tensor]:
    """Return new factors (A', B') whose product B' A' best approximates `left @ right` at the rank of `a`.

    For the truncated singular value decomposition U S V^T of `left @ right`, A' is c R V^T and B' is U S R^T / c. The
    product is the same for every rotation R and scale c, but the SGD steps of the next round depend on R and c.
    Therefore, R and c are chosen so that A' has the norm and, as far as possible, the direction of `a`, the mean of the
    clients' factors A. Otherwise, the decomposition would change the effective learning rate. `b` is the mean of the
    clients' factors B, and may be zero.

    A client of rank r receives the first r rows of A' and columns of B'. Their product must be the best approximation
    at rank r. Therefore, R rotates only singular directions between two neighbouring ranks of clients: it is block
    diagonal, with blocks that end at `ranks`. If all clients have the server's rank, R is one block. If a block has one
    row, R only decides the sign of this direction.

    If `left @ right` has fewer than r = len(a) components, A' is completed by orthogonal rows in the span of `a`, for
    which B' is zero. The next round can train them like new components. With zeros in both factors, both gradients
    would be zero for ever.
    """
    old, size = a.flatten(1).double(), len(a)
    if left.shape[1] < size:
        left, right = torch.cat([left, left.new_zeros(len(left), size)], dim=1), torch.cat([right, old])
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, s, v = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)  # at most K r by K r, and at most W's size
    rank = min(size, len(s))
    rows = v[:rank] @ q_right.T
    turn = old.new_zeros(size, rank)
    for start, end in partitions([*ranks, size]):
        turn_left, _, turn_right = torch.linalg.svd(old[start:end] @ rows[start:end].T, full_matrices=False)
        turn[start:end, start:end] = turn_left @ turn_right  # by orthogonal Procrustes
    scale = (old.square().sum() / rank).sqrt()
    new_a = scale * turn @ rows
    new_b = (q_left @ u[:, :rank] * s[:rank]) @ turn.T / scale
    return new_a.to(a.dtype).view_as(a), new_b.to(b.dtype).view_as(b)


def energy_beyond(
    rank: int, previous: Mapping[str, Tensor], aggregate: Mapping[str, Tensor], scaling: float = 1.0
) -> float:
    """Return the share of the energy of the aggregated products beyond a rank (raFLoRA's higher-rank energy ratio).

    The energy of a layer is the sum of the squared singular values of the server's product B' A'. The result is
    1 - sum_{j <= rank} sigma_j^2 / sum_j sigma_j^2, with both sums over all adapted layers; 0 if all products are zero.

    Args:
        rank: The number of singular values of each layer that do not count.
        previous: The tensors before the round, keyed by name.
        aggregate: The tensors after the aggregation, keyed by name. If the method folds changes into frozen weights,
            the change of this round, divided by `scaling`, is added to B' A'.
        scaling: The server's scaling s of LoRA.
    """
    beyond = total = 0.0
    for a, b in pairs(aggregate):
        up, down = aggregate[a].flatten(1).double(), aggregate[b].flatten(1).double()
        if (name := folded_name(a)) in aggregate:
            small = down @ up + (aggregate[name].double() - previous[name].double()) / scaling
        else:  # the singular values of the product of two triangular matrices (r, r) are those of B A
            small = torch.linalg.qr(down, mode="r").R @ torch.linalg.qr(up.T, mode="r").R.T
        energies = torch.linalg.svdvals(small).square()
        beyond += energies[rank:].sum().item()
        total += energies.sum().item()
    return beyond / total if total else 0.0
