"""Accuracy and loss of the global model on every domain's test split."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor

from fedsweep.config import Config
from fedsweep.types import Domain

Predict = Callable[[Tensor], Tensor]
"""uint8 images (batch, 3, h, w) to logits (batch, classes)."""


class EvaluationConfig(Config):
    """How the global model is evaluated after each round."""

    batch_size: int = Field(256, gt=0, description="images per forward pass; does not change the result")
    metrics: tuple[Literal["drift", "structural_bias"], ...] = Field(
        (), description="what is measured of each round beside the costs: drift, structural_bias, both or nothing"
    )
    tsne_classes: int | None = Field(
        None,
        gt=1,
        description="classes of the t-SNE of the global model's features after the last round; null for none",
    )
    tsne_images: int = Field(
        500, ge=10, description="test images in the t-SNE, drawn evenly over the domains and these classes"
    )

    @field_validator("metrics")
    @classmethod
    def _different(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(metrics)) < len(metrics):
            raise ValueError(f"`evaluation.metrics` must not repeat one, but is {list(metrics)}")
        return metrics


@torch.inference_mode()
def evaluate(predict: Predict, domains: Sequence[Domain], config: EvaluationConfig) -> dict[str, float]:
    """Metrics `accuracy/domain/<domain>`, their mean and worst, and the mean test loss over domains."""
    accuracies: dict[str, float] = {}
    losses: list[float] = []
    for domain in domains:
        logits = torch.cat([predict(images) for images, _ in domain.test.batches(config.batch_size)])
        labels = domain.test.labels.to(logits.device)
        accuracies[domain.name] = (logits.argmax(1) == labels).double().mean().item()
        losses.append(F.cross_entropy(logits, labels).item())
    return {
        "accuracy/mean": sum(accuracies.values()) / len(accuracies),
        "accuracy/worst_domain": min(accuracies.values()),
        **{f"accuracy/domain/{name}": accuracy for name, accuracy in accuracies.items()},
        "loss/test": sum(losses) / len(losses),
    }


def metric_names(domains: Sequence[str]) -> list[str]:
    """The metrics that `evaluate` reports, known before anything runs."""
    return ["accuracy/mean", "accuracy/worst_domain", *(f"accuracy/domain/{name}" for name in domains), "loss/test"]
