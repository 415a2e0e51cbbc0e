"""Functions that derive the block and the kind of a tensor from the tensor's name."""

import re
from collections.abc import Iterable
from functools import cache

STATISTICS = ("running_mean", "running_var")
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
