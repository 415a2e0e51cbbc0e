"""Names of a model's tensors: a tensor's block and kind."""

import re
from collections.abc import Iterable

STATISTICS = ("running_mean", "running_var")
_BLOCK = re.compile(r"^backbone\.blocks\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Return the block that a tensor belongs to, or None for the head and all else that clients share.

    >>> layer_of("backbone.blocks.7.attn.proj.lora_A.default.weight"), layer_of("backbone.head.weight")
    (7, None)
    """
    match = _BLOCK.match(name)
    return int(match[1]) if match else None


def moved_to(name: str, layer: int) -> str:
    """Return the name of the same tensor in block `layer`.

    >>> moved_to("backbone.blocks.7.attn.proj.lora_A.default.weight", 2)
    'backbone.blocks.2.attn.proj.lora_A.default.weight'
    """
    return _BLOCK.sub(f"backbone.blocks.{layer}.", name)


def names_within(names: Iterable[str], layers: Iterable[int], excluded_prefixes: tuple[str, ...] = ()) -> list[str]:
    """Return the names that belong to the given blocks, or to no block and begin with none of `excluded_prefixes`."""
    kept = set(layers)

    def belongs(name: str) -> bool:
        layer = layer_of(name)
        return layer in kept if layer is not None else not name.startswith(excluded_prefixes)

    return [name for name in names if belongs(name)]


def is_statistic(name: str) -> bool:
    """Return whether a tensor is a running mean or variance, which is averaged but has no gradient.

    >>> is_statistic("gate.adapter.1.running_var"), is_statistic("gate.adapter.1.weight")
    (True, False)
    """
    return name.endswith(STATISTICS)
