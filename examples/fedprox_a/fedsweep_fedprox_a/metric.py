"""The norm of the server's update, for LoRA's factors A and B and for all trained tensors."""

from collections.abc import Mapping
from typing import ClassVar

from fedsweep.training.round_metrics import MeasuredRound, Quantity, RoundMetric


class UpdateNorm(RoundMetric):
    """The Euclidean norm of the difference between the server's tensors after and before a round."""

    name: ClassVar[str] = "update_norm"
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "update_norm/lora_a": Quantity("Update of LoRA's A", "norm"),
        "update_norm/lora_b": Quantity("Update of LoRA's B", "norm"),
        "update_norm/all": Quantity("Update of all tensors", "norm"),
    }

    def measure(self, measured: MeasuredRound) -> dict[str, float]:
        """Return the norms of a round."""
        before, after = measured.before.adapter, measured.after.adapter
        squares = {name: (after[name] - before[name]).double().square().sum().item() for name in before}
        parts = {"lora_a": ".lora_A.", "lora_b": ".lora_B.", "all": ""}
        return {
            f"{self.name}/{part}": sum(one for name, one in squares.items() if within in name) ** 0.5
            for part, within in parts.items()
        }
