"""Test accuracy and loss of the global model on each domain, and test accuracy of the clients' own models."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import pstdev
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.common.randomness import stream
from fedsweep.data.image_sets import pool
from fedsweep.models.layered import LayeredModel, Walk
from fedsweep.results.history import LAST_ROUNDS, LAST_ROUNDS_LOSS, TESTED, on_validation, validation_names
from fedsweep.types import ClientId, Domain, ImageSet

OF_CLIENTS, OF_WORST, OF_CLIENT = "accuracy/clients/mean", "accuracy/clients/worst", "accuracy/client"
OF_BOTTOM = "accuracy/clients/bottom_10"
"""The mean accuracy of the worst tenth of the clients, but of at least one client (as in q-FFL)."""
DOMAIN_SPREAD = "accuracy/domain_spread"
"""The population standard deviation of the accuracy over domains; accuracies are between 0 and 1."""
OUT_OF_DOMAIN, OUT_OF_DOMAINS = "accuracy/out_of_domain", "accuracy/out_of_domain_mean"


class Predict(Protocol):
    """A function that returns a model's logits for an image set."""

    def __call__(self, images: ImageSet, *, domain: str | None) -> Tensor:
        """Return logits (n, classes); `domain` is the domain of the images, or None if no client has this domain."""


class EvaluationConfig(Config):
    """The options of the evaluations between rounds."""

    batch_size: int = Field(256, gt=0, description="number of images per forward pass; it does not change the results")
    images_per_domain: int | None = Field(
        None,
        gt=0,
        description="number of test images and of validation images of each domain in the evaluations between round 0 "
        "and the last round, with the same share of each class; `null`: all images, as in those two rounds",
    )
    test_rounds: Literal["all", "last"] = Field(
        "all",
        description="evaluated rounds that measure the test images: `all`, or `last` for round 0 and the last round; "
        "the validation images are measured in all evaluated rounds",
    )
    last_rounds: int | None = Field(
        None,
        gt=1,
        description="number of last rounds whose mean accuracy is the metric `accuracy/last_rounds` and whose mean "
        "test loss is the metric `loss/last_rounds`; they vary less from seed to seed than the values after the last "
        "round; `null`: no such metrics",
    )
    metrics: tuple[Literal["drift", "structural_bias"], ...] = Field(
        (), description="additional metrics to measure in each evaluated round: drift, structural_bias, or plug-ins'"
    )
    tsne_classes: int | None = Field(
        None,
        gt=1,
        description="number of classes in a t-SNE figure of the global model's features after the last round; `null`: "
        "no figure",
    )
    tsne_images: int = Field(
        500, ge=10, description="largest number of test images in the figure, spread evenly over domains and classes"
    )

    @field_validator("metrics")
    @classmethod
    def _different(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(metrics)) < len(metrics):
            raise ValueError(f"`evaluation.metrics` must not repeat a metric, but it is {list(metrics)}")
        return metrics


@torch.no_grad()
def evaluate(
    predict: Predict,
    domains: Sequence[Domain],
    held_out: Sequence[Domain] = (),
    right: dict[str, Tensor] | None = None,
) -> dict[str, float]:
    """Return the accuracy on each domain, the mean, minimum and spread of these accuracies, and the mean test loss.

    The spread is the standard deviation over domains. The accuracies on the `held_out` domains, whose images no client
    has, and the mean of these accuracies are separate metrics. They do not count toward the other metrics.

    Args:
        predict: The function that returns the model's logits.
        domains: The domains of the clients.
        held_out: The domains of which no client has images.
        right: If given, a tensor of each domain is added to this dict, keyed by the name of the domain: for each image,
            whether the model predicts its class, bool (n,).
    """
    found = {} if right is None else right
    accuracies: dict[str, float] = {}
    losses: list[float] = []
    for domain in domains:
        logits = predict(domain.test, domain=domain.name)
        labels = domain.test.labels.to(logits.device)
        found[domain.name] = correct(logits, labels)
        accuracies[domain.name] = _share(found[domain.name])
        losses.append(F.cross_entropy(logits, labels).item())
    for domain in held_out:
        found[domain.name] = correct(predict(domain.test, domain=None), domain.test.labels)
    others = {domain.name: _share(found[domain.name]) for domain in held_out}
    return {
        "accuracy/mean": sum(accuracies.values()) / len(accuracies),
        "accuracy/worst_domain": min(accuracies.values()),
        DOMAIN_SPREAD: pstdev(accuracies.values()),
        **{f"accuracy/domain/{name}": share for name, share in accuracies.items()},
        **({OUT_OF_DOMAINS: sum(others.values()) / len(others)} if others else {}),
        **{f"{OUT_OF_DOMAIN}/{name}": share for name, share in others.items()},
        "loss/test": sum(losses) / len(losses),
        TESTED: float(sum(len(domain.test) for domain in domains)),
    }


def validate(predict: Predict, domains: Sequence[Domain]) -> dict[str, float]:
    """Return the metrics of `evaluate` on the validation images of the domains; empty if there are none."""
    return under_validation_names(evaluate(predict, sets) if (sets := of_validation(domains)) else {})


def under_validation_names(found: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under their names on validation images, without those that have no such name."""
    return {name: value for metric, value in found.items() if (name := on_validation(metric)) is not None}


def of_validation(domains: Sequence[Domain]) -> list[Domain]:
    """Return the domains with their validation images in place of their test images; empty if there are none."""
    return [replace(domain, test=domain.validation) for domain in domains if domain.validation is not None]


def in_one_pass(predict: Predict, domains: Sequence[Domain]) -> Predict:
    """Predict the test images of all domains in one pass, and return a function that looks up the logits of a domain.

    The batches of one pass are larger than those of a pass for each domain. `predict` must not depend on the domain.
    """
    sets = [domain.test for domain in domains]
    parts = torch.split(predict(pool(sets), domain=None), [len(images) for images in sets])
    known = {id(images): logits for images, logits in zip(sets, parts, strict=True)}
    return lambda images, *, domain: known[id(images)]


def stratified(domain: Domain, count: int, seed: int) -> Domain:
    """Return the domain with at most `count` of its test images, and at most `count` of its validation images.

    Each class has the same share as before. The choice depends only on the seed and the name of the domain.
    """
    test, validation = _kept(domain.test, stratified_test_images(domain, count, seed)), domain.validation
    if validation is not None:
        rng = stream(seed, "evaluation", "validation", domain.name)
        validation = _kept(validation, _stratified(validation, count, rng))
    return replace(domain, test=test, validation=validation)


def stratified_test_images(domain: Domain, count: int, seed: int) -> np.ndarray:
    """Return the positions of the test images that `stratified` keeps, in ascending order, int64 (at most count,)."""
    return _stratified(domain.test, count, stream(seed, "evaluation", domain.name))


def _kept(images: ImageSet, places: np.ndarray) -> ImageSet:
    return images if len(places) == len(images) else images.select(torch.from_numpy(places))


def _stratified(images: ImageSet, count: int, rng: np.random.Generator) -> np.ndarray:
    labels = images.labels.numpy()
    if len(labels) <= count:
        return np.arange(len(labels))
    order = rng.permutation(len(labels))
    _, kinds, sizes = np.unique(labels[order], return_inverse=True, return_counts=True)
    by_class = np.argsort(kinds, kind="stable")
    places = np.empty(len(order))
    places[by_class] = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    return np.sort(order[np.argsort(places, kind="stable")[:count]])


def features(model: LayeredModel, walk: Walk, images: ImageSet, batch_size: int) -> Tensor:
    """Run the steps in `walk` on n images, and return the inputs of the head (n, width).

    A step is a block or a module that replaces a block.
    """
    return torch.cat([model.features(model.walk(pixels, walk)) for pixels, _ in images.batches(batch_size)])


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the share of correct predictions, given logits (n, classes) and labels (n,)."""
    return _share(correct(logits, labels))


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return for each image whether its largest logit is that of its label, bool (n,), given logits (n, classes)."""
    return logits.argmax(1) == labels.to(logits.device)


def _share(right: Tensor) -> float:
    return int(right.sum()) / len(right) if len(right) else math.nan  # the mean on a GPU may differ in the last bit


def client_scores(accuracies: Mapping[ClientId, float], left_out: Collection[ClientId]) -> dict[str, float]:
    """Return the metrics of the clients' own models, given the accuracy of each client on its own test images.

    The clients in `left_out` do not count toward the mean, the minimum, or the mean of the worst tenth.

    >>> client_scores({"a": 0.5, "b": 1.0, "c": 0.0}, left_out={"c"})["accuracy/clients/mean"]
    0.75
    """
    counted = [score for client, score in sorted(accuracies.items()) if client not in left_out]
    each = {f"{OF_CLIENT}/{client}": score for client, score in sorted(accuracies.items())}
    bottom = sorted(counted)[: -(-len(counted) // 10)]
    of_all = {OF_CLIENTS: sum(counted) / len(counted), OF_WORST: min(counted), OF_BOTTOM: sum(bottom) / len(bottom)}
    return {**of_all, **each}


def client_metric_names(clients: Collection[ClientId]) -> list[str]:
    """Return the names of the metrics that `client_scores` returns."""
    return [OF_CLIENTS, OF_WORST, OF_BOTTOM, *(f"{OF_CLIENT}/{client}" for client in sorted(clients))]


def metric_names(
    domains: Sequence[str], held_out: Sequence[str] = (), validated: bool = False, averaged: bool = False
) -> list[str]:
    """Return the names of the metrics that `evaluate` returns and, if `averaged` is true, of the means over rounds.

    If `validated` is true, the names of the same metrics of validation images follow.
    """
    others = [*([OUT_OF_DOMAINS] if held_out else []), *(f"{OUT_OF_DOMAIN}/{name}" for name in held_out)]
    own = [f"accuracy/domain/{name}" for name in domains]
    means = ["accuracy/mean", "accuracy/worst_domain", DOMAIN_SPREAD, *([LAST_ROUNDS] if averaged else []), *own]
    names = [*means, *others, "loss/test", *([LAST_ROUNDS_LOSS] if averaged else []), TESTED]
    return [*names, *(validation_names(names) if validated else ())]
