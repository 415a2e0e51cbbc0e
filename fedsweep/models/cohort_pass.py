"""One forward pass for several clients: each frozen block runs once, on the images of all clients that hold it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsweep.models.layered import Images, LayeredModel
from fedsweep.models.names import layer_of
from fedsweep.models.sessions import Segment
from fedsweep.types import Batch


@dataclass(frozen=True)
class ClientPass:
    """A client's part of a forward pass.

    Attributes:
        images: The client's images, or a batch with cached outputs of the client's first blocks.
        walk: The blocks that the client holds, in ascending order.
        segment: The client's trained tensors and dropout masks.
    """

    images: Images
    walk: Sequence[int]
    segment: Segment


def joinable(model: LayeredModel, trained: Iterable[str]) -> bool:
    """Return whether clients that train the tensors named `trained` can share a forward pass.

    They can if these tensors are the head and LoRA factors in the blocks, and if the images do not meet other tensors
    that depend on the client, such as the text prompts of CLIP.
    """
    names = set(trained)
    factors = names - set(_head_names(model))
    has_head = len(names) == len(factors) + 2
    return model.joins_clients and has_head and all(".lora_" in name and layer_of(name) is not None for name in factors)


def cohort_logits(model: LayeredModel, passes: Sequence[ClientPass]) -> list[Tensor]:
    """Return the logits (batch, classes) of each client.

    At each block, the tokens of all clients that hold the block are one batch. The adapted layers apply each client's
    factors to the client's own tokens. Clients that do not hold the block keep their tokens.
    """
    tokens, done = _begin(model, passes)
    sizes = [len(one) for one in tokens]
    walks = [set(one.walk[ahead:]) for one, ahead in zip(passes, done, strict=True)]
    members: list[int] = []
    whole = torch.empty(0)

    def gather(wanted: list[int]) -> Tensor:
        """Return the tokens of the clients `wanted`, without copying if they are those of the last block."""
        if wanted == members:
            return whole
        if members:
            for place, part in zip(members, torch.split(whole, [sizes[one] for one in members]), strict=True):
                tokens[place] = part
        return torch.cat([tokens[place] for place in wanted])

    for layer in range(model.num_layers):
        if holders := [place for place, walk in enumerate(walks) if layer in walk]:
            whole, members = gather(holders), holders
            with model.session.joined([passes[place].segment for place in holders]):
                whole = model.block(layer, whole)
    features = model.features(gather([*range(len(passes))]))
    heads = [[one.segment.tensors[name] for name in _head_names(model)] for one in passes]
    return [F.linear(part, *head) for part, head in zip(torch.split(features, sizes), heads, strict=True)]


def _begin(model: LayeredModel, passes: Sequence[ClientPass]) -> tuple[list[Tensor], list[int]]:
    """Return the tokens with which each client's forward pass starts, and the number of blocks already applied."""
    tokens: list[Tensor | None] = [None] * len(passes)
    done, raw = [0] * len(passes), dict[int, Tensor]()
    for place, one in enumerate(passes):
        if isinstance(one.images, Batch) and one.images.tokens is not None:
            tokens[place], done[place] = model.begin(one.images)
        else:
            raw[place] = one.images.images if isinstance(one.images, Batch) else one.images
    if raw:
        embedded = model.embed(model.normalize(torch.cat(list(raw.values()))))
        for place, part in zip(raw, torch.split(embedded, [len(one) for one in raw.values()]), strict=True):
            tokens[place] = part
    return [one for one in tokens if one is not None], done


def _head_names(model: LayeredModel) -> tuple[str, str]:
    return f"{model.head_prefix}.weight", f"{model.head_prefix}.bias"
