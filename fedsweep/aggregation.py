"""Arithmetic on adapter states: what a server does with its clients' updates."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from fedsweep.config import Config
from fedsweep.types import AdapterState, ClientUpdate


class AggregationConfig(Config):
    """How clients are weighted in averages."""

    weights: Literal["samples", "uniform"] = Field(
        "samples",
        description="weigh a client by its number of images (the papers) or all alike (FedRA's released code)",
    )

    def weight(self, update: ClientUpdate) -> float:
        """The client's weight before normalisation."""
        return float(update.num_examples) if self.weights == "samples" else 1.0


def layerwise_mean(previous: AdapterState, updates: Sequence[ClientUpdate], config: AggregationConfig) -> AdapterState:
    """r_j = sum_i M_ij w_i r_j^i / sum_i M_ij w_i (FedRA v1, Eq. 3); a tensor that nobody trained keeps its value.

    The sum runs in the order of the clients' ids, so that the result does not depend on the order of arrival.

    Raises:
        KeyError: an update holds a tensor that the full model does not have.
    """
    ordered = sorted(updates, key=lambda update: update.client)
    for update in ordered:
        if unknown := sorted(set(update.adapter) - set(previous)):
            raise KeyError(f"client {update.client} sent unknown tensors: {', '.join(unknown)}")
    mean: AdapterState = {}
    for name, old in previous.items():
        parts = [(config.weight(update), update.adapter[name]) for update in ordered if name in update.adapter]
        total = sum(weight for weight, _ in parts)
        mean[name] = torch.stack([part * (weight / total) for weight, part in parts]).sum(0) if parts else old.clone()
    return mean
