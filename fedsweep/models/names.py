"""Functions that derive the block and the kind of a tensor from the tensor's name."""

import re
from collections.abc import Iterable
from functools import cache

STATISTICS = ("running_mean", "running_var")
FOLDED = ".folded"
"""The end of the names of changes that the server folded into frozen weights (`fedsweep.models.lora.add_folds`)."""
_END = slice(-len(FOLDED), None)
_BLOCK = re.compile(r"^backbone\.blocks\.(\d+)\.")


@cache  # asked for each tensor of each client
def layer_of(name: str) -> int | None:
    """Return the number of the block to which a tensor belongs, or None for a tensor outside the blocks.

    >>> layer_of("backbone.blocks.7.attn.proj.lora_A.default.weight"), layer_of("backbone.head.weight")
    (7, None)
    """
    match = _BLOCK.match(name)
    return int(match[1]) if match else None


def moved_to(name: str, layer: int) -> str:
    """Return the name of the tensor in block `layer` that corresponds to the tensor `name` in another block.

    >>> moved_to("backbone.blocks.7.attn.proj.lora_A.default.weight", 2)
    'backbone.blocks.2.attn.proj.lora_A.default.weight'
    """
    return _BLOCK.sub(f"backbone.blocks.{layer}.", name)


def names_within(names: Iterable[str], layers: Iterable[int], excluded_prefixes: tuple[str, ...] = ()) -> list[str]:
    """Return the names of the tensors in the blocks `layers` and of the tensors outside all blocks.

    A tensor outside the blocks is left out if its name begins with one of `excluded_prefixes`.
    """
    kept = set(layers)

    def belongs(name: str) -> bool:
        layer = layer_of(name)
        return layer in kept if layer is not None else not name.startswith(excluded_prefixes)

    return [name for name in names if belongs(name)]


def is_statistic(name: str) -> bool:
    """Return whether a tensor is a running mean or variance, given its name.

    Running statistics have no gradient, but are averaged over the clients.

    >>> is_statistic("gate.adapter.1.running_var"), is_statistic("gate.adapter.1.weight")
    (True, False)
    """
    return name.endswith(STATISTICS)


def is_folded(name: str) -> bool:
    """Return whether a tensor is a change that the server folded into a frozen weight, given its name.

    Clients hold these tensors, but do not train them.
    """
    return name.endswith(FOLDED)


def not_folded(names: Iterable[str]) -> list[str]:
    """Return the names of tensors without those of changes that the server folded into frozen weights."""
    return [name for name in names if name[_END] != FOLDED]  # a slice takes less time than a call


def rank_dim(name: str) -> int | None:
    """Return the dimension of a tensor whose size is the rank of LoRA; None for a tensor that is not a LoRA factor.

    >>> rank_dim("blocks.0.attn.proj.lora_A.default.weight"), rank_dim("blocks.0.attn.proj.lora_B.default.weight")
    (0, 1)
    """
    return 0 if ".lora_A." in name else 1 if ".lora_B." in name else None


def folded_name(factor: str) -> str:
    """Return the name of the change that the server folded into the weight of an adapted layer.

    >>> folded_name("blocks.0.attn.proj.lora_A.default.weight")
    'blocks.0.attn.proj.folded'
    """
    return factor.partition(".lora_")[0] + FOLDED
