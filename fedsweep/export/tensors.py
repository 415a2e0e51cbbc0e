"""Of a model as a run has it: the tensors that its own library's network needs, under their names there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedsweep.models import LayeredModel
from fedsweep.models.names import layer_of, names_within

BACKBONE = "backbone."


@dataclass(frozen=True)
class PlainTensors:
    """A run's model in parts; all by their names in the plain network, LoRA's with PEFT's ending."""

    tuned: Mapping[str, Tensor]
    """LoRA in the blocks that the global model walks, and the head."""
    network: Mapping[str, Tensor]
    """Every tensor of the backbone without LoRA, as it is now: the head tuned, and whatever else was trained."""
    cut: Mapping[str, int]
    left_out: tuple[str, ...]
    """Prefixes of what else was trained."""


def plain_tensors(model: LayeredModel, layers: Sequence[int]) -> PlainTensors:
    """Take the model apart, which holds the adapter; `layers` are the blocks that its prediction walks."""
    state = {name: one for name, one in model.state_dict().items() if name.startswith(BACKBONE)}
    walked = set(names_within(state, layers))
    tuned = {
        model.plain_name(name): one
        for name, one in state.items()
        if name in walked and (".lora_" in name or name.startswith(model.head_prefix))
    }
    network = {
        model.plain_name(name.replace(".base_layer.", ".")): one for name, one in state.items() if ".lora_" not in name
    }
    others = {name.split(".")[0] for name in model.movable() if not name.startswith(BACKBONE)}
    skipped = any(layer_of(name) is not None and name not in walked for name in model.trainable())
    above = (f"blocks above the first {len(layers)}",) if skipped else ()
    return PlainTensors(tuned, network, model.cut(layers), (*sorted(others), *above))
