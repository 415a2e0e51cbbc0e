"""The training on FedAG's server, in which domain adapters and copies of the clients' models learn from each other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsweep.common.config import Config
from fedsweep.common.errors import DivergenceError
from fedsweep.methods.fedag.domain_adapters import DomainAdapters
from fedsweep.models.layered import LayeredModel, copy_into
from fedsweep.training.optimizers import plain_adam
from fedsweep.types import AdapterState, ImageSet


class ServerConfig(Config):
    """The settings for training FedAG's server on synthetic images (Section 3.4)."""

    warmup_epochs: int = Field(
        5, ge=0, description="number of epochs before the first round in which only the adapters are trained"
    )
    epochs: int = Field(3, ge=0, description="number of epochs of mutual learning in each round")
    batch_size: int = Field(32, gt=0, description="number of synthetic images per domain and step")
    lr: float = Field(1e-4, gt=0, description="learning rate of the server's Adam")
    update: Literal["joint", "alternating"] = Field(
        "joint",
        description="`joint`: minimise one loss over all domains (Eq. 10); `alternating`: in each epoch, train each "
        "domain separately, and then the adapters and their attention across domains",
    )


@dataclass(frozen=True)
class Lesson:
    """The server's training data for one domain: n synthetic images with their features and weights.

    Attributes:
        place: The index of the domain's adapter.
        rng: The generator that draws the order of the images.
        images: The synthetic images.
        features: CLIP's features (n, width) of the images.
        quality: The weights (n,) of the images, which are quality scores divided by their mean.
    """

    place: int
    rng: np.random.Generator
    images: ImageSet
    features: Tensor
    quality: Tensor


def mutual_divergence(client: Tensor, server: Tensor, weights: Tensor) -> Tensor:
    """Return the loss J of a batch, which penalises differences between the predictions of two models (Eq. 6).

    One model is the server's copy of the client model for a domain, which predicts the class probabilities theta. The
    other model is the adapter of this domain, which predicts the class probabilities phi. For an image with the weight
    w, the loss is w / 2 * (KL(theta || phi) + KL(phi || theta)). J is the mean over all images of the batch.

    Args:
        client: The logits (n, classes) of the copy, whose softmax is theta.
        server: The logits (n, classes) of the adapter, whose softmax is phi.
        weights: The weights w (n,) of the images, scaled so that their mean over all images of the domain is one.
    """
    theta, phi = F.log_softmax(client, dim=1), F.log_softmax(server, dim=1)
    symmetric = ((theta.exp() - phi.exp()) * (theta - phi)).sum(1)  # KL(a || b) + KL(b || a)
    return (weights * symmetric).mean() / 2


def margin(beta: Tensor, own: int, delta: float) -> Tensor:
    """Return the regulariser R, which directs the attention to the adapter of the images' own domain n (Eq. 9).

    R is the mean over the images of max(0, delta + max_{k != n} beta_k - beta_n), or 0 if there is only one domain.

    Args:
        beta: The attention weights (domains, images) of all adapters.
        own: The index n of the images' own domain.
        delta: The margin by which beta_n should exceed the other weights.
    """
    others = torch.cat([beta[:own], beta[own + 1 :]])
    if not len(others):
        return beta.new_zeros(())
    return (delta + others.amax(0) - beta[own]).clamp(min=0).mean()


def normalised(quality: Tensor) -> Tensor:
    """Return the quality scores (n,) divided by their mean, or a tensor of ones if no score is above zero."""
    total = quality.sum()
    return quality * len(quality) / total if total > 0 else torch.ones_like(quality)


def warm_up(config: ServerConfig, adapters: DomainAdapters, lessons: Sequence[Lesson]) -> None:
    """Train each domain's adapter in place to classify the domain's synthetic images.

    Raises:
        DivergenceError: A weight of an adapter becomes infinite or NaN.
    """
    for lesson in lessons:
        parameters = list(adapters.adapters[lesson.place].parameters())
        adam = plain_adam(config.lr, parameters)
        labels = lesson.images.labels.to(adapters.text.device)
        for _ in range(config.warmup_epochs):
            for rows in torch.split(_shuffled(lesson), config.batch_size):
                loss = F.cross_entropy(adapters.logits_of(lesson.place, lesson.features[rows]), labels[rows])
                adam.step(torch.autograd.grad(loss, parameters))
        _check_finite(parameters)


@dataclass
class MutualLearning:
    """The server's training in one round, which minimises the loss of Eq. 10.

    The training changes the server's adapters and the copies of the clients' models in place. To compute the loss of a
    copy, it loads the copy into `model`. After the training, `model` therefore contains one of the copies.

    Attributes:
        config: The settings of the training, such as the number of epochs.
        cross: Whether the loss includes the cross-domain terms, which train all adapters and the attention over them.
        strength: The weight lambda of the regulariser R.
        delta: The margin of the regulariser R.
        model: The clients' model, with the server's adapters as the module `server`.
        copies: The copies of the clients' models, one for each lesson.
        lessons: The training data, one lesson for each domain.
    """

    config: ServerConfig
    cross: bool
    strength: float
    delta: float
    model: LayeredModel
    copies: Sequence[AdapterState]
    lessons: Sequence[Lesson]

    def __post_init__(self) -> None:
        self.adapters, movable = cast(DomainAdapters, self.model.server), self.model.movable()
        self.trained = {name: movable[name] for name in self.copies[0]}
        self.shared = [*self.adapters.adapters.parameters(), *self.adapters.attention.parameters()]
        self.own = [list(self.adapters.adapters[lesson.place].parameters()) for lesson in self.lessons]
        self.of_copies = [plain_adam(self.config.lr, copy.values()) for copy in self.copies]
        self.of_shared = plain_adam(self.config.lr, self.shared)
        self.of_own = [plain_adam(self.config.lr, part) for part in self.own]

    def learn(self) -> None:
        """Train for the number of epochs in `config`.

        Raises:
            DivergenceError: A trained tensor becomes infinite or NaN.
        """
        size = self.config.batch_size
        steps = math.ceil(max(len(lesson.images) for lesson in self.lessons) / size)
        for _ in range(self.config.epochs):
            order = [_shuffled(lesson) for lesson in self.lessons]
            # Each domain is split into as many batches as the largest domain has, so that no domain ends early.
            together = list(zip(*(torch.tensor_split(rows, steps) for rows in order), strict=True))
            if self.config.update == "joint":
                for batches in together:
                    self.joint_step(batches)
                continue
            for number, own in enumerate(order):
                for rows in torch.split(own, size):
                    self.in_domain_step(number, rows)
            for batches in together if self.cross else ():
                self.cross_domain_step(batches)
        _check_finite([*self.shared, *(one for copy in self.copies for one in copy.values())])

    def in_domain_step(self, number: int, rows: Tensor) -> None:
        """Train the adapter and the client-model copy of one domain on a batch of the domain's synthetic images.

        The loss is the in-domain part of Eq. 10: the divergence between the predictions of the adapter and the copy,
        plus the cross-entropy of the adapter.

        Args:
            number: The index of the domain in `lessons`.
            rows: The indices (batch,) of the images among the domain's synthetic images.
        """
        own = self.own[number]
        gradients = torch.autograd.grad(self._in_domain(number, rows), [*own, *self.trained.values()])
        self.of_own[number].step(gradients[: len(own)])
        self.of_copies[number].step(gradients[len(own) :])

    def cross_domain_step(self, batches: Sequence[Tensor]) -> None:
        """Train all adapters and the attention over the adapters on one batch of synthetic images for each domain.

        The loss is the cross-domain part of Eq. 10.

        Args:
            batches: For each domain in `lessons`, the indices of a batch of its images; a batch may be empty.
        """
        losses = [self._cross_domain(number, rows) for number, rows in enumerate(batches) if len(rows)]
        self.of_shared.step(torch.autograd.grad(torch.stack(losses).sum() / len(self.lessons), self.shared))

    def joint_step(self, batches: Sequence[Tensor]) -> None:
        """Train all adapters, the attention over them, and all copies of the client model (Eq. 10).

        The training step uses one batch of synthetic images for each domain.

        Args:
            batches: For each domain in `lessons`, the indices of a batch of its images; a batch may be empty.
        """
        total = [torch.zeros_like(one) for one in self.shared]
        for number, rows in enumerate(batches):
            if not len(rows):
                continue
            loss = self._in_domain(number, rows)
            if self.cross:
                loss = loss + self._cross_domain(number, rows)
            inputs = [*self.shared, *self.trained.values()]
            gradients = torch.autograd.grad(loss / len(self.lessons), inputs, materialize_grads=True)
            torch._foreach_add_(total, list(gradients[: len(self.shared)]))
            self.of_copies[number].step(gradients[len(self.shared) :])
        self.of_shared.step(total)

    def _in_domain(self, number: int, rows: Tensor) -> Tensor:
        lesson = self.lessons[number]
        copy_into(self.trained, self.copies[number])
        pixels, labels = lesson.images.take(rows)
        phi = self.adapters.logits_of(lesson.place, lesson.features[rows])
        divergence = mutual_divergence(self.model(pixels), phi, lesson.quality[rows])
        return divergence + F.cross_entropy(phi, labels.to(phi.device))

    def _cross_domain(self, number: int, rows: Tensor) -> Tensor:
        lesson = self.lessons[number]
        labels = lesson.images.labels[rows].to(self.adapters.text.device)
        eta, beta = self.adapters.attended(self.adapters.all_logits(lesson.features[rows]))
        return F.cross_entropy(eta, labels) + self.strength * margin(beta, lesson.place, self.delta)


def _shuffled(lesson: Lesson) -> Tensor:
    return torch.from_numpy(lesson.rng.permutation(len(lesson.images)))


def _check_finite(tensors: Sequence[Tensor]) -> None:
    norms = torch.stack(torch._foreach_norm([one.detach() for one in tensors]))
    if not norms.isfinite().all():
        raise DivergenceError("a tensor of the server became infinite or NaN; try a smaller `method.server.lr`")
