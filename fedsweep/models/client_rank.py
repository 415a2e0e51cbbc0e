"""Adapters of a smaller rank: the first rows of each factor A and the first columns of each factor B.

A client of rank r trains and sends only these parts. Its scaling s_r can differ from the scaling s of the full rank.
Then the client holds B s / s_r instead of B, so that its function s_r (B s / s_r) A is that of the server's s B A.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedsweep.models.layered import LayeredModel
from fedsweep.models.names import rank_dim
from fedsweep.types import AdapterState


def cut(state: AdapterState, rank: int | None, factor: float = 1.0) -> AdapterState:
    """Return the tensors that a client of rank `rank` receives: the factors cut to this rank, and all other tensors.

    Args:
        state: The tensors, keyed by name.
        rank: The number of rows of A and of columns of B to keep; None keeps all.
        factor: The number by which the factors B are multiplied, which is s / s_r.
    """
    if rank is None:
        return state
    return {name: cut_tensor(name, tensor, rank, factor) for name, tensor in state.items()}


def cut_tensor(name: str, tensor: Tensor, rank: int | None, factor: float = 1.0) -> Tensor:
    """Return one tensor as `cut` does; without a change, the same tensor."""
    dim = rank_dim(name)
    if dim is None or rank is None:
        return tensor
    part = tensor if tensor.shape[dim] <= rank else tensor.narrow(dim, 0, rank)
    return part if dim == 0 or factor == 1 else part * factor


def rescaled(state: AdapterState, factor: float) -> AdapterState:
    """Return tensors in which the factors B are multiplied by `factor`; for a factor of 1, the same tensors."""
    if factor == 1:
        return state
    return {name: tensor * factor if rank_dim(name) == 1 else tensor for name, tensor in state.items()}


def widened(state: AdapterState, full: AdapterState) -> AdapterState:
    """Return factors of the server's rank: those in `state`, followed by the further rows and columns in `full`.

    Args:
        state: A client's tensors, keyed by name.
        full: The server's tensors, which contain at least the names in `state`.
    """
    return {name: _extended(name, tensor, full[name]) for name, tensor in state.items()}


def padded(state: AdapterState, full: AdapterState) -> AdapterState:
    """Return factors of the server's rank: those in `state`, followed by rows and columns of zeros."""
    return {name: _extended(name, tensor, torch.zeros_like(full[name])) for name, tensor in state.items()}


def _extended(name: str, tensor: Tensor, full: Tensor) -> Tensor:
    if tensor.shape == full.shape:
        return tensor
    dim = cast(int, rank_dim(name))
    own = tensor.shape[dim]
    return torch.cat([tensor, full.narrow(dim, own, full.shape[dim] - own)], dim)


def adapted_layers(model: LayeredModel) -> dict[str, Any]:
    """Return the layers with adapters, keyed by name. Listing all modules takes as long as a small training step."""
    return {name: one for name, one in model.named_modules() if hasattr(one, "lora_A")}


@contextmanager
def holding(model: LayeredModel, rank: int | None, scaling: float | None) -> Iterator[dict[str, nn.Parameter]]:
    """Make the adapters of a model have a smaller rank until the `with` statement ends.

    The model then has factors in the shapes of a model that was built with this rank. A factor A that is not trained
    keeps its first rows; all other values must be copied into the factors. The `with` statement gets the factors that
    are trained, keyed by full name, which is none if the rank is full.

    Args:
        model: The model, whose adapters have the full rank.
        rank: The rank, or None to keep the full rank.
        scaling: The scaling of the adapters' outputs.
    """
    if rank is None or scaling is None:
        yield {}
        return
    layers = adapted_layers(model)
    kept, own = [], dict[str, nn.Parameter]()
    for name, layer in layers.items():
        for factor, part in (("lora_A", layer.lora_A["default"]), ("lora_B", layer.lora_B["default"])):
            full, key = part.weight, f"{name}.{factor}.default.weight"
            # New parameters, because a graph of the previous client may still refer to the shape of the full ones.
            part.weight = nn.Parameter(cut_tensor(key, full.detach(), rank).clone(), full.requires_grad)
            kept.append((part, full))
            if full.requires_grad:
                own[key] = part.weight
    scalings = [(layer.scaling, layer.scaling["default"]) for layer in layers.values()]
    for holder, _ in scalings:
        holder["default"] = scaling
    try:
        yield own
    finally:
        for part, full in kept:
            part.weight = full
        for holder, before in scalings:
            holder["default"] = before
