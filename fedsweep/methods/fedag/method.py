"""FedAG: Scaling Vision Foundation Models with Federated Adapter Generalization.

Jiaqi Wang, Jingtao Li, Weiming Zhuang, Chen Chen, Fenglong Ma, Lingjuan Lyu. Clients train small models of their own.
The server uses synthetic images to transfer the knowledge of these models to a frozen CLIP model with an adapter for
each domain.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from numpy.random import Generator
from pydantic import Field
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.common.randomness import stream
from fedsweep.methods.base import Allocations, FederatedMethod, Needs, Server, state_as, synthetic_of
from fedsweep.methods.capabilities import (
    DomainModels,
    ExportObstacle,
    Messages,
    OwnMetrics,
    OwnWeights,
    SeparateModels,
    SideInputs,
)
from fedsweep.methods.fedag.domain_adapters import (
    AdaptersConfig,
    ClipConfig,
    DomainAdapters,
    build_domain_adapters,
    named_here,
)
from fedsweep.methods.fedag.mutual_learning import Lesson, MutualLearning, ServerConfig, normalised, warm_up
from fedsweep.models import BackboneConfig
from fedsweep.models.base import Reader
from fedsweep.models.clip.backbone import ClipBackbone
from fedsweep.models.layered import Images, LayeredModel
from fedsweep.training.aggregation import layerwise_mean
from fedsweep.training.evaluation import features
from fedsweep.training.local_training import CohortTrainer, LocalTask, cross_entropy
from fedsweep.types import AdapterState, Batch, Client, ClientId, ClientUpdate, ImageSet, LayerAllocation, ServerState

SERVER = "server."
"""Prefix of the names of tensors that only the server has."""
QUALITY, SPREAD = "synthetic/quality", "synthetic/quality_spread"


@dataclass(frozen=True)
class FedAGState(ServerState):
    """The state of FedAG's server, including the latest model of each client.

    The field `adapter` contains the server's own tensors and the clients' initial model W^0.

    Attributes:
        domains: A dict from each client to its domain.
        copies: A dict from each domain n to W^_n, the server's copy of the client model for this domain.
        own: A dict from each client that has trained to its latest model W_n.
        quality: A dict from each domain n to the quality scores alpha_n (images,) of its synthetic images.
        warm: Whether the warm-up, which trains only the adapters, has been completed.
    """

    domains: dict[ClientId, str] = field(default_factory=dict)
    copies: dict[str, AdapterState] = field(default_factory=dict)
    own: dict[ClientId, AdapterState] = field(default_factory=dict)
    quality: dict[str, Tensor] = field(default_factory=dict)
    warm: bool = False


def of(state: ServerState) -> FedAGState:
    """Return `state` if it is a state of FedAG; raise TypeError if it is the state of another method."""
    return state_as(FedAGState, state)


class FedAG(
    FederatedMethod, OwnWeights, Messages, SeparateModels, DomainModels, SideInputs, OwnMetrics, ExportObstacle
):
    """A method in which small models on the clients and a CLIP model on the server learn from each other.

    Every client trains all blocks of the small model, and the hyperparameter `federation.depths` is ignored.
    """

    name: Literal["fedag"] = "fedag"
    needs: ClassVar[Needs] = Needs(lora=False, head=True, synthetic=True)
    clip: ClipConfig = Field(  # a factory, because the check of the model's name imports transformers
        default_factory=lambda: ClipBackbone(model="openai/clip-vit-base-patch32", prompt="a photo of a {}"),
        description="CLIP model of the server: digits_clip or clip",
    )
    adapters: AdaptersConfig = Field(AdaptersConfig(), description="adapters of the server and the attention over them")
    server: ServerConfig = Field(ServerConfig(), description="training of the server on synthetic images")
    momentum: bool = Field(
        True,
        description="start a client from a mixture of its previous model and the model that the server sends (Eq. 1); "
        "`false`: start it from the server's model alone",
    )
    gamma: float = Field(0.1, ge=0, le=1, description="weight of a client's previous model in Eq. 1")
    quality: bool = Field(
        True, description="weigh synthetic images by their quality scores in Eq. 6; `false`: weigh them equally"
    )
    cross_domain: bool = Field(
        True,
        description="train an attention that combines the adapters for images of unknown domains (Eqs. 8 to 10); "
        "`false`: use the mean of all adapters' logits for such images",
    )
    regularizer: bool = Field(
        True, description="use the regulariser R in Eq. 10; `false`: train the attention only by cross-entropy"
    )
    strength: float = Field(0.1, ge=0, description="lambda of Eq. 10, the weight of the regulariser R")
    delta: float = Field(
        0.001,
        ge=0,
        le=1,
        description="margin by which the attention weight of an image's domain should exceed the others (Eq. 9)",
    )

    def fingerprint(self) -> str:
        """Return a string that identifies the weights of the server's CLIP model.

        Raises:
            UserError: The weights are missing.
        """
        with named_here():
            return self.clip.fingerprint()

    def check_weights(self, backbone: BackboneConfig, class_names: Sequence[str]) -> None:
        """Check before a run that the server's CLIP model can be loaded and has the same image size as the backbone.

        Raises:
            UserError: The weights are missing or do not fit CLIP, a prompt is too long, or the image sizes differ.
        """
        with named_here():
            self.clip.check_weights(len(class_names), tuple(class_names))
        if self.clip.image_size != backbone.image_size:
            raise UserError(
                f"`method.clip` and `backbone` must have the same image size, but `method.clip` needs images that are "
                f"{self.clip.image_size} pixels wide, and `backbone` images that are {backbone.image_size} pixels wide."
            )

    def prepare(self, model: LayeredModel, depths: Collection[int], domains: Collection[str], seed: int) -> None:
        """Make the whole backbone trainable, and add the server's model as the module `server`.

        The server's model is CLIP with an adapter for each domain and attention over the adapters.
        """
        model.backbone.requires_grad_(True)
        classes = model.class_names or cast(int, model.backbone.num_classes)
        model.add_module("server", build_domain_adapters(self.clip, self.adapters, domains, classes, seed))

    def init(self, model: LayeredModel, clients: Sequence[Client], server: Server) -> FedAGState:
        """Return the initial state, in which no model has been trained yet."""
        layers, domains = tuple(range(server.num_layers)), {one.id: one.domain for one in clients}
        return FedAGState(adapter=model.adapter(), layers=layers, domains=domains)

    def begin_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> FedAGState:
        """Train the adapters alone before the first round (the warm-up); return `state` unchanged in later rounds."""
        state = of(state)
        if state.warm:
            return state
        adapters = cast(DomainAdapters, trainer.model.server)
        trainer.model.load_adapter(state.adapter)
        lessons = [self._lesson("adapter warm-up", name, server, trainer) for name in adapters.domains]
        warm_up(self.server, adapters, lessons)
        return replace(state, adapter=state.adapter | _server_tensors(trainer.model), warm=True)

    def allocate(self, state: ServerState, cohort: Sequence[Client], server: Server, rng: Generator) -> Allocations:
        """Allocate all blocks of the small model to each client."""
        return {one.id: LayerAllocation(state.layers, state.layers, excluded_prefixes=(SERVER,)) for one in cohort}

    def received(self, state: ServerState, client: ClientId, row: LayerAllocation) -> AdapterState:
        """Return the tensors of the model that the server sends to a client of the cohort (see `sent_adapter`)."""
        sent = self.sent_adapter(state, client)
        return {name: sent[name] for name in self.received_names(state, client, row)}

    def local_updates(
        self, state: ServerState, cohort: Sequence[Client], allocations: Allocations, trainer: CohortTrainer
    ) -> list[ClientUpdate]:
        """Train the clients, and compute the quality scores of the synthetic images of each client's domain.

        A client starts from a mixture of its previous model and the model that the server sends (Eq. 1), and minimises
        the cross-entropy (Eq. 2).
        """
        state = of(state)
        tasks = [LocalTask(one, self._start(state, one.id), allocations[one.id], cross_entropy) for one in cohort]
        updates = [replace(update, local_copy=update.adapter) for update in trainer.fit(tasks)]
        if not self.quality or trainer.counts_only:
            return updates
        scored = []
        for client, update in zip(cohort, updates, strict=True):
            trainer.model.load_adapter(update.adapter)
            score = quality(trainer.model, client.train, cast(ImageSet, client.synthetic), trainer.reader.batch_size)
            metrics = {**update.metrics, QUALITY: score.mean().item(), SPREAD: score.std(correction=0).item()}
            scored.append(replace(update, extra={"quality": score}, metrics=metrics))
        return scored

    def aggregate(self, state: ServerState, updates: Sequence[ClientUpdate], server: Server) -> FedAGState:
        """Average the clients' models and quality scores within each domain, and store each client's own model."""
        state = of(state)
        copies, own, scores = dict(state.copies), dict(state.own), dict(state.quality)
        for domain in sorted({state.domains[update.client] for update in updates}):
            here = [update for update in updates if state.domains[update.client] == domain]
            names = {name: state.adapter[name] for name in here[0].adapter}
            copies[domain] = layerwise_mean(names, here, server.aggregation)
            if self.quality:
                told = [replace(update, adapter=update.extra) for update in here]
                scores[domain] = layerwise_mean(here[0].extra, told, server.aggregation)["quality"]
        for update in updates:
            own[update.client] = {name: tensor.clone() for name, tensor in update.local_copy.items()}
        adapter = {name: one.clone() for name, one in state.adapter.items()}
        return replace(state, adapter=adapter, copies=copies, own=own, quality=scores)

    def end_round(self, state: ServerState, server: Server, trainer: CohortTrainer) -> FedAGState:
        """Train the adapters, the attention and the server's copies of the clients' models together (Eq. 10).

        The server has a copy for each domain of which at least one client has already trained. The training uses the
        synthetic images of these domains.
        """
        state, model = of(state), trainer.model
        present, scores = sorted(state.copies), state.quality
        lessons = [self._lesson("mutual learning", name, server, trainer, scores.get(name)) for name in present]
        copies = [{name: one.clone() for name, one in state.copies[name].items()} for name in present]
        model.load_adapter(state.adapter)
        strength = self.strength * self.regularizer
        MutualLearning(self.server, self.cross_domain, strength, self.delta, model, copies, lessons).learn()
        learned = dict(zip(present, copies, strict=True))
        return replace(state, adapter=state.adapter | _server_tensors(model), copies=learned)

    def sent_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return the model that the server sends to a client: W^_n for the client's domain n.

        Before any client of domain n has trained, the server sends the initial model W^0.
        """
        return state.adapter | of(state).copies.get(of(state).domains[client], {})

    def client_adapter(self, state: ServerState, client: ClientId) -> AdapterState:
        """Return a client's latest model.

        If the client has not trained yet, return the model that the server sends to it.
        """
        return state.adapter | of(state).own[client] if client in of(state).own else self.sent_adapter(state, client)

    @property
    def uses_domains(self) -> bool:
        """True, because the server has an adapter for each domain."""
        return True

    def server_features(self, reader: Reader, images: ImageSet) -> Mapping[str, Tensor]:
        """Return CLIP's features (n, width) of n images as a dict with the single key `clip` (Eq. 3).

        The features are computed only once and then reused in all rounds and trials.
        """
        adapters = cast(DomainAdapters, reader.model.server)
        return {"clip": reader.kept.all(adapters.seen(), images, reader.batch_size).to(adapters.text.device)}

    def predict(
        self, state: ServerState, model: LayeredModel, images: Images, personal: bool = False, domain: str | None = None
    ) -> Tensor:
        """Return the logits of the server's CLIP model, or of a client's own model if `personal` is true (Section 3.5).

        The server uses the adapter of `domain` if there is one. Otherwise, it combines the logits of all adapters with
        attention weights, or averages the logits if the option `cross_domain` is false.
        """
        if personal:
            return super().predict(state, model, images)
        adapters, features = cast(DomainAdapters, model.server), cast(Batch, images).side_inputs["clip"]
        if domain in adapters.domains:
            return adapters.logits_of(adapters.domains.index(domain), features)
        logits = adapters.all_logits(features)
        return adapters.attended(logits)[0] if self.cross_domain else logits.mean(0)

    def export_obstacle(self, depths: Collection[int], num_layers: int, of_client: bool = False) -> str | None:
        """Return a description of the server's adapters, which cannot be exported.

        Return None if `of_client` is true, because a client's model has no such adapters.
        """
        return None if of_client else "an adapter for each domain and an attention over them, after the server's CLIP"

    def metric_names(self, clients: Iterable[ClientId]) -> list[str]:
        """Return the names of the metrics for the mean and the spread of the quality scores.

        The list is empty if the option `quality` is false.
        """
        return [QUALITY, SPREAD] if self.quality else []

    def measure(self, state: ServerState, updates: Sequence[ClientUpdate]) -> dict[str, float]:
        """Return the mean and the standard deviation of the quality scores of the synthetic images.

        Each client of the round has its own mean and standard deviation. The returned values are the averages over
        these clients.
        """
        return {name: sum(one.metrics[name] for one in updates) / len(updates) for name in self.metric_names(())}

    def _start(self, state: FedAGState, client: ClientId) -> AdapterState:
        """Return the model from which a client starts: gamma W_n^{t-1} + (1 - gamma) W^_n^{t-1} (Eq. 1).

        W_n^{t-1} is the client's model after its previous training, W^_n^{t-1} is the model that the server sends, and
        gamma is an option. If the client has not trained yet, or if the option `momentum` is false, the client starts
        from the model that the server sends.
        """
        given = self.sent_adapter(state, client)
        if not self.momentum or client not in state.own:
            return given
        return given | {name: given[name].lerp(one, self.gamma) for name, one in state.own[client].items()}

    def _lesson(
        self, purpose: str, domain: str, server: Server, trainer: CohortTrainer, scores: Tensor | None = None
    ) -> Lesson:
        """Return the server's training data for one domain.

        The images are weighted by `scores`, or equally if `scores` is None. `purpose` names the random stream that
        draws the order of the images.
        """
        images = synthetic_of(domain, server.synthetic)
        weights = torch.ones(len(images)) if scores is None else normalised(scores)
        adapters = cast(DomainAdapters, trainer.model.server)
        features = self.server_features(trainer.reader, images)["clip"]
        rng = stream(trainer.seed, purpose, trainer.round, domain)
        return Lesson(adapters.domains.index(domain), rng, images, features, weights.to(adapters.text.device))


@torch.no_grad()
def quality(model: LayeredModel, train: ImageSet, synthetic: ImageSet, batch_size: int) -> Tensor:
    """Return the quality scores (n,) of the n synthetic images of a client's domain (alpha in Section 3.3).

    The score of an image is the cosine similarity between its feature and the prototype of its class, or 0 if the
    cosine is negative. The prototype of a class is the mean feature of the client's own images of this class, which are
    in `train`. If the client has no images of the class, the score is 0.
    """
    walk = range(model.num_layers)
    seen, asked = (features(model, walk, images, batch_size) for images in (train, synthetic))
    labels, wanted = train.labels.to(seen.device), synthetic.labels.to(seen.device)
    classes = int(torch.cat([labels, wanted]).max()) + 1
    sums = F.one_hot(labels, classes).T.to(seen.dtype) @ seen  # index_add_ has no fixed order on a GPU
    counts = labels.bincount(minlength=classes).clamp(min=1)
    prototypes = sums / counts.unsqueeze(1)
    return F.cosine_similarity(asked, prototypes[wanted], dim=1).clamp(min=0)


def _server_tensors(model: LayeredModel) -> AdapterState:
    return {name: one.detach().clone() for name, one in model.movable().items() if name.startswith(SERVER)}
