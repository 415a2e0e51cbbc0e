"""RunConfig, the table of contents of a run, and `run`, which plays it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Self, cast

from pydantic import Field, model_validator
from torch import Tensor

from fedsweep.aggregation import AggregationConfig
from fedsweep.base_optimizer import BaseOptimizerConfig, FedAvg
from fedsweep.checkpoint import Checkpoint, write_atomically
from fedsweep.checkpoint import load as load_checkpoint
from fedsweep.checkpoint import save as save_checkpoint
from fedsweep.config import Config
from fedsweep.costs import COST_METRICS
from fedsweep.data import DataConfig, PartitionConfig, load
from fedsweep.data.partition import Split
from fedsweep.drift import DRIFT_METRICS
from fedsweep.embedding.picture import files
from fedsweep.embedding.tsne import draw
from fedsweep.errors import UserError
from fedsweep.evaluation import EvaluationConfig, client_metric_names, metric_names
from fedsweep.federation import ROUND_METRICS, Federation, FederationConfig, federate
from fedsweep.frozen import FrozenRows
from fedsweep.history import RoundRecord
from fedsweep.malicious import malicious_clients
from fedsweep.methods import MethodConfig, Server
from fedsweep.models import BackboneConfig, LoraConfig, build_model
from fedsweep.optimizers import OptimizerConfig
from fedsweep.paths import activation_bytes
from fedsweep.reader import Reader
from fedsweep.structural_bias import bias_metrics
from fedsweep.training import CohortTrainer, LocalConfig
from fedsweep.types import ClientId, FederatedData, RoundResult

Device = Literal["cpu", "cuda"]


class RunConfig(Config):
    """One federated run. Every part's options live beside the code that uses them."""

    seed: int = Field(0, ge=0, description="root of all randomness of the run")
    method: MethodConfig
    backbone: BackboneConfig
    lora: LoraConfig
    data: DataConfig
    partition: PartitionConfig
    federation: FederationConfig
    local: LocalConfig
    optimizer: OptimizerConfig
    base_optimizer: BaseOptimizerConfig = FedAvg()  # what every experiment was before there was a choice
    aggregation: AggregationConfig
    evaluation: EvaluationConfig

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        layers, size = self.backbone.depth, self.federation.clients_per_round
        capacities = self.capacities()
        for depth in self.depths():
            if not 1 <= depth <= layers:
                raise ValueError(
                    f"`federation.depths` must lie between 1 and the {layers} blocks of {self.backbone.name}, "
                    f"but one is {depth}"
                )
        if self.data.size != self.backbone.image_size:
            raise ValueError(
                f"`backbone` {self.backbone.name} takes images of {self.backbone.image_size} pixels, "
                f"but those of `data` {self.data.name} have {self.data.size}"
            )
        if isinstance(size, int) and size > len(capacities):
            raise ValueError(
                f"`federation.clients_per_round` must be at most the {len(capacities)} clients, but it is {size}"
            )
        if size == "one_per_domain" and self._pooled:
            raise ValueError(
                f"`federation.clients_per_round` one_per_domain needs clients of one domain each, "
                f"but those of `partition.name` {self.partition.name} draw from all"
            )
        self._backbone_fits()
        if self.lora.rank > (most := self.backbone.largest_rank(self.lora.position)):
            raise ValueError(
                f"`lora.rank` must be at most {most}, the narrowest side of {self.backbone.name}'s adapted layers, "
                f"but it is {self.lora.rank}"
            )
        if self.base_optimizer.name == "feddyn" and self.aggregation.lora == "product_svd":
            raise ValueError(
                "`base_optimizer` feddyn remembers A and B apart and cannot be combined with `aggregation.lora` "
                "product_svd, which turns them into others"
            )
        if self.method.needs_proxy and not self.partition.proxy_share:
            raise ValueError(
                f"`method` {self.method.name} trains on images of the server and needs a `partition.proxy_share` "
                "above 0, but it is 0"
            )
        if self.method.needs_validation and not self.partition.validation_share:
            raise ValueError(
                f"`method` {self.method.name} steers clients by images that they hold out and needs a "
                "`partition.validation_share` above 0, but it is 0"
            )
        share, count = self.federation.malicious_share, len(capacities)
        attackers = len(malicious_clients(capacities, share, self.seed))
        if attackers == count or (share and not attackers):
            wanted = "leave one" if attackers else "be 0 or choose one"
            raise ValueError(
                f"`federation.malicious_share` must {wanted} of the {count} clients{' honest' if attackers else ''}, "
                f"but it is {share:g}"
            )
        self.method.check(self._smallest_cohort(capacities), layers, self.aggregation)
        return self

    def _backbone_fits(self) -> None:
        """Method, metrics and adapters have in the backbone what they need."""
        backbone = self.backbone
        if self.method.needs_text and not backbone.has_text:
            raise ValueError(
                f"`method` {self.method.name} needs a `backbone` with a text encoder, clip or digits_clip, "
                f"but it is {backbone.name}"
            )
        if self.method.needs_head and not backbone.has_head:
            raise ValueError(
                f"`method` {self.method.name} needs a `backbone` with a head, such as timm, but it is {backbone.name}"
            )
        if "drift" in self.evaluation.metrics and not backbone.has_head:
            raise ValueError(
                f"`evaluation.metrics` drift compares heads, but `backbone` {backbone.name} has prompts in their place"
            )
        if self.lora.position not in backbone.positions:
            raise ValueError(
                f"`lora.position` must be {', '.join(backbone.positions[:-1])} or {backbone.positions[-1]} of "
                f"`backbone` {backbone.name}, but it is {self.lora.position}"
            )
        if self.lora.patch_embed and backbone.has_text:
            raise ValueError(f"`lora.patch_embed` must be false of `backbone` {backbone.name}, but it is true")

    def depths(self) -> set[int]:
        """All depths that a client can have."""
        depths = self.federation.depths
        return set(range(1, self.backbone.depth + 1)) if depths == "dynamic" else set(depths)

    def capacities(self) -> dict[ClientId, int]:
        """Blocks that fit on each client: `federation.depths` by client, or by domain, or one for all.

        Where depths are dynamic, the one block that is certain.

        Raises:
            ValueError: the list has another length.
        """
        depths, domains = self.federation.depths, self.client_domains()
        if depths == "dynamic":
            return dict.fromkeys(domains, 1)
        if len(depths) == len(domains):
            return dict(zip(domains, depths, strict=True))
        if len(depths) == 1:
            return dict.fromkeys(domains, depths[0])
        if len(depths) == len(self.data.domains) and not self._pooled:
            of_domain = dict(zip(self.data.domains, depths, strict=True))
            return {client: of_domain[domain] for client, domain in domains.items()}
        several = not self._pooled and len(self.data.domains) < len(domains)
        by_domain = f", or for each of the {len(self.data.domains)} domains" if several else ""
        raise ValueError(
            f"`federation.depths` must name one depth for each of the {len(domains)} clients{by_domain}, or one for "
            f"all, but it has {len(depths)}: {list(depths)}"
        )

    @property
    def _pooled(self) -> bool:
        """Whether a client's images come from several domains."""
        return self.partition.pools and len(self.data.domains) > 1

    def client_domains(self) -> dict[ClientId, str]:
        """The domain of every client, known before any image is read."""
        return self.partition.clients_of(self.data.domains)

    def _smallest_cohort(self, capacities: Mapping[ClientId, int]) -> list[int]:
        """Capacities of the cohort with the fewest places that a round can have."""
        size = self.federation.clients_per_round
        if size == "one_per_domain":
            least: dict[str, int] = {}
            for client, domain in self.client_domains().items():
                least[domain] = min(capacities[client], least.get(domain, capacities[client]))
            return list(least.values())
        return list(capacities.values()) if size is None else sorted(capacities.values())[:size]

    def metrics(self) -> list[str]:
        """Names of the metrics that every round reports."""
        asked = self.evaluation.metrics
        drift = DRIFT_METRICS if "drift" in asked else []
        bias = bias_metrics(self.method.has_stand_ins) if "structural_bias" in asked else []
        clients = list(self.client_domains())
        of_clients = client_metric_names(clients) if self.partition.test_share else []
        scores = [*metric_names(self.data.domains), *of_clients, "loss/train"]
        return [*scores, *ROUND_METRICS, *COST_METRICS, *self.method.metrics(clients), *drift, *bias]


def split(config: RunConfig) -> tuple[FederatedData, Split]:
    """The data of a run and its clients; a function of data, partition and seed, not of the method.

    Raises:
        UserError: the data is not there, or cannot be divided as asked.
    """
    data = load(config.data)
    return data, config.partition.split(data, config.capacities(), config.seed)


def content_digests(config: RunConfig) -> dict[str, str]:
    """What pins the content of the files that a configuration only names: images with labels, and weights."""
    weights = [config.backbone.fingerprint(), config.method.fingerprint()]
    return {"data": load(config.data).digest, "weights": " ".join(one for one in weights if one)}


def check_digests(config: RunConfig, planned: Mapping[str, str]) -> None:
    """Refuse to go on with other images or weights than the plan was made for: they are part of a trial's identity.

    Raises:
        UserError: a file was replaced since.
    """
    for name, digest in content_digests(config).items():
        if digest != planned[name]:
            raise UserError(f"the {name} of this trial changed since its sweep began; start a new sweep.")


def check_content(config: RunConfig) -> None:
    """Open the data, divide it, load the weights, and draw the images of a t-SNE, as the run will.

    Raises:
        UserError: something is missing, does not fit, or cannot be divided.
    """
    data, _ = split(config)
    config.backbone.check_weights(len(data.class_names), data.class_names)
    config.method.check_weights(config.backbone, data.class_names)
    activation_bytes()
    if (classes := config.evaluation.tsne_classes) is not None:
        draw(data.domains, data.class_names, classes, config.evaluation.tsne_images, config.seed)


def build(config: RunConfig, device: Device = "cpu") -> Federation:
    """Data, clients, model and trainer of a run; the model on the device, the images where they are."""
    data, parts = split(config)
    freeze_a, lora = config.aggregation.lora == "freeze_a", config.lora if config.method.uses_lora else None
    model = build_model(config.backbone, lora, len(data.class_names), config.seed, data.class_names, freeze_a)
    config.method.prepare(model, config.depths(), set(config.client_domains().values()), config.seed)
    model.to(device)
    return Federation(
        method=config.method,
        base=config.base_optimizer,
        model=model,
        fresh=model.adapter(),
        clients=parts.clients,
        domains=data.domains,
        class_names=data.class_names,
        server=Server(model.num_layers, config.aggregation, tuple(sorted(config.depths())), parts.proxy),
        trainer=CohortTrainer(
            model,
            config.optimizer,
            config.base_optimizer,
            config.local,
            config.seed,
            rounds=config.federation.rounds,
            fewest=min(len(client.train) for client in parts.clients),
            reader=Reader(model, _identity(config), FrozenRows.of(sources(data)), config.evaluation.batch_size),
        ),
        config=config.federation,
        evaluation=config.evaluation,
        seed=config.seed,
    )


def _identity(config: RunConfig) -> str:
    """What decides the frozen part of a run's model; names of classes are no part of what an image goes through."""
    content = config.backbone.fingerprint()
    lora = f"{config.lora.model_dump_json()} {config.aggregation.lora}" if config.method.uses_lora else ""
    drawn = content == "none" or (config.method.uses_lora and config.aggregation.lora == "freeze_a")
    return f"{config.backbone.model_dump_json()} {content} {lora} {config.seed if drawn else ''}"


def sources(data: FederatedData) -> dict[int, str]:
    """The content of each tensor of images, by its address."""
    return {
        cast(Tensor, images.images).data_ptr(): f"{data.digest}/{one.name}/{split}"
        for one in data.domains
        for split, images in (("train", one.train), ("test", one.test))
    }


def run(config: RunConfig, device: Device = "cpu", resume: Checkpoint | None = None) -> Iterator[RoundResult]:
    """Play a run round by round; with `resume` (its tensors on the device), only the rounds that are left."""
    start = RoundResult(resume.round, resume.state) if resume else None
    yield from federate(build(config, device), start)


def run_durably(config: RunConfig, checkpoint: Path, device: Device = "cpu") -> Iterator[RoundRecord]:
    """Play a run with every round on disk before it is yielded; rounds found there are yielded again first.

    A t-SNE stands beside the checkpoint before that of the last round does: a run that has all rounds has its picture.
    A run that was stopped at any moment goes on as if it had not been.
    """
    federation = build(config, device)
    history: list[RoundRecord] = []
    start: RoundResult | None = None
    if checkpoint.exists():
        found = load_checkpoint(checkpoint, federation.initial_state(), device)
        start = RoundResult(found.round, found.state)
        history = list(found.history)
        yield from history
    for result in federate(federation, start):
        history.append(RoundRecord(result.round, dict(result.metrics), result.seconds))
        if result.round == config.federation.rounds and (embedding := federation.embed(result.state)):
            for name, content in files(embedding).items():
                write_atomically(checkpoint.with_name(name), content)
        save_checkpoint(checkpoint, Checkpoint(result.round, result.state, tuple(history)))
        yield history[-1]
