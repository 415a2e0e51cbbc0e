"""Attention over the features of CLIP's frozen image encoder, in FedCLIP and FedAG."""

import torch
from torch import Tensor, nn

from fedsweep.models.layered import draw_linears


class FeatureAdapter(nn.Sequential):
    """A(I) * I with A(I) = softmax(MLP1(tanh(MLP2(I)))): (n, width) to the same (FedAG, Eq. 4).

    Source: Lu et al., FedCLIP (2023), from which FedAG takes it. `hidden` is the width between the two MLPs, by default
    that of the features. Each tensor is drawn from a stream of the key.
    """

    def __init__(self, width: int, hidden: int | None, device: torch.device, seed: int, *key: str) -> None:
        hidden = hidden or width
        with torch.device("meta"):  # constructors draw values that are overwritten at once
            super().__init__(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width), nn.Softmax(dim=-1))
        self.to_empty(device=device)
        draw_linears(self, seed, *key)

    def forward(self, features: Tensor) -> Tensor:
        """Return the weighted features."""
        weights = features
        for layer in self:
            weights = layer(weights)
        return weights * features
