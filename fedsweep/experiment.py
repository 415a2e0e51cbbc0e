"""RunConfig, the table of contents of a run, and `run`, which plays it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from fedsweep.aggregation import AggregationConfig
from fedsweep.checkpoint import Checkpoint
from fedsweep.checkpoint import load as load_checkpoint
from fedsweep.checkpoint import save as save_checkpoint
from fedsweep.config import Config
from fedsweep.costs import COST_METRICS
from fedsweep.data import DataConfig, PartitionConfig, load
from fedsweep.evaluation import EvaluationConfig, metric_names
from fedsweep.federation import Federation, FederationConfig, federate
from fedsweep.history import RoundRecord
from fedsweep.methods import MethodConfig, Server
from fedsweep.models import BackboneConfig, LoraConfig, build_model
from fedsweep.training import CohortTrainer, LocalConfig, OptimizerConfig
from fedsweep.types import Domain, FederatedData, ImageSet, RoundResult

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
    aggregation: AggregationConfig
    evaluation: EvaluationConfig

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        depths, layers = self.federation.depths, self.backbone.depth
        clients = self.partition.num_clients(len(self.data.domains))
        if len(depths) != clients:
            raise ValueError(
                f"`federation.depths` must name one depth for each of the {clients} clients, "
                f"but it has {len(depths)}: {list(depths)}"
            )
        for depth in depths:
            if not 1 <= depth <= layers:
                raise ValueError(
                    f"`federation.depths` must lie between 1 and the {layers} blocks of {self.backbone.name}, "
                    f"but one is {depth}"
                )
        if (size := self.federation.clients_per_round) is not None and size > clients:
            raise ValueError(f"`federation.clients_per_round` must be at most the {clients} clients, but it is {size}")
        if self.lora.rank > self.backbone.width:
            raise ValueError(
                f"`lora.rank` must be at most {self.backbone.width}, the width of {self.backbone.name}'s layers, "
                f"but it is {self.lora.rank}"
            )
        self.method.check(depths if size is None else sorted(depths)[:size], layers)  # the smallest cohort
        return self

    def metrics(self) -> list[str]:
        """Names of all metrics that a round reports."""
        return [*metric_names(self.data.domains), "loss/train", *COST_METRICS]


def build(config: RunConfig, device: Device = "cpu") -> Federation:
    """Data, clients, model and trainer of a run, on the device."""
    data = _on_device(load(config.data), device)
    model = build_model(config.backbone, config.lora, len(data.class_names), config.seed)
    config.method.prepare(model)
    model.to(device)
    return Federation(
        method=config.method,
        model=model,
        fresh=model.adapter(),
        clients=config.partition.split(data, config.federation.depths),
        domains=data.domains,
        server=Server(model.num_layers, config.aggregation),
        trainer=CohortTrainer(model, config.optimizer, config.local, config.seed),
        config=config.federation,
        evaluation=config.evaluation,
        seed=config.seed,
    )


def run(config: RunConfig, device: Device = "cpu", resume: Checkpoint | None = None) -> Iterator[RoundResult]:
    """Play a run round by round; with `resume` (its tensors on the device), only the rounds that are left."""
    start = RoundResult(resume.round, resume.state) if resume else None
    yield from federate(build(config, device), start)


def run_durably(config: RunConfig, checkpoint: Path, device: Device = "cpu") -> Iterator[RoundRecord]:
    """Play a run with every round on disk before it is yielded; rounds found there are yielded again first.

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
        save_checkpoint(checkpoint, Checkpoint(result.round, result.state, tuple(history)))
        yield history[-1]


def _on_device(data: FederatedData, device: Device) -> FederatedData:
    """The same data with its tensors on the device."""
    if device == "cpu":
        return data

    def move(images: ImageSet) -> ImageSet:
        return ImageSet(images.images.to(device), images.labels.to(device))

    domains = tuple(Domain(one.name, move(one.train), move(one.test)) for one in data.domains)
    return FederatedData(data.name, data.class_names, domains, data.digest)
