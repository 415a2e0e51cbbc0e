"""Client drift: the distances between the clients' models and heads after a round (FedBRICK, Fig. 4)."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsweep.models.layered import LayeredModel, Walk
from fedsweep.types import AdapterState, ClientId, ClientUpdate

REPRESENTATION, HEAD = "drift/representation", "drift/head"
DRIFT_METRICS = [REPRESENTATION, HEAD]


def drift(
    model: LayeredModel,
    before: AdapterState,
    after: AdapterState,
    updates: Sequence[ClientUpdate],
    walks: Mapping[ClientId, Walk],
    images: Tensor,
) -> dict[str, float]:
    """Cosine distances 1 - cos: between clients' representations of the same images, and from the server's head update.

    `before` is the state that the server sent, `after` the one that it made of the updates; `images` are uint8
    (n, 3, h, w). One forward pass of the images for each client.
    """
    ordered = sorted(updates, key=lambda update: update.client)
    features = [representation(model, before | one.adapter, walks[one.client], images) for one in ordered]
    heads = [head_distance(before, after, one.adapter) for one in ordered]
    return {REPRESENTATION: mean_pairwise_distance(torch.stack(features)), HEAD: sum(heads) / len(heads)}


@torch.inference_mode()
def representation(model: LayeredModel, adapter: AdapterState, walk: Walk, images: Tensor) -> Tensor:
    """Return the input of the head in a client's own model: its tokens normalised and pooled, (n, width)."""
    model.load_adapter(adapter)
    return model.features(model.walk(images, walk))


def mean_pairwise_distance(features: Tensor) -> float:
    """Return the mean of 1 - cos over all pairs of clients and all images; (clients, n, width). 0 for a single client.

    By |sum of unit vectors|^2 = K + sum over ordered pairs of their cosines.
    """
    clients = len(features)
    if clients == 1:
        return 0.0
    total = F.normalize(features.double(), dim=-1).sum(0).square().sum(-1)
    return max(0.0, 1 - ((total - clients) / (clients * (clients - 1))).mean().item())


def head_distance(before: AdapterState, after: AdapterState, update: AdapterState) -> float:
    """Return 1 - cos between a client's and the server's change of the heads that the client trains."""
    names = [name for name in update if name.startswith((LayeredModel.head_prefix, "heads."))]
    own, global_ = (
        torch.cat([(state[name] - before[name]).flatten().double() for name in names]) for state in (update, after)
    )
    return max(0.0, 1 - F.cosine_similarity(own, global_, dim=0).item())  # 0 but for rounding
