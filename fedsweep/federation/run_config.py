"""The complete configuration of a run, including checks that involve several of its parts."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedsweep.common import plugins
from fedsweep.common.config import Config
from fedsweep.common.randomness import STREAMS, PartialSeed, StreamName
from fedsweep.data.data_config import DataConfig, PartitionConfig, SyntheticConfig
from fedsweep.data.synthetic.generated import NoSynthetic
from fedsweep.federation.budget import Size, fitted, in_words
from fedsweep.federation.client_sizes import check_ranks, of_clients
from fedsweep.federation.devices import DeviceProfile, Devices, devices_of
from fedsweep.federation.extended import AnyAggregationConfig, AnyEvaluationConfig, check_rule
from fedsweep.federation.federation_config import FederationConfig
from fedsweep.federation.rounds import ROUND_METRICS
from fedsweep.federation.run_checks import check_backbone, check_shared_model, check_streams
from fedsweep.methods import MethodConfig
from fedsweep.methods.capabilities import OwnMetrics, SeparateModels, StandIns
from fedsweep.models import BackboneConfig, LoraConfig
from fedsweep.results.history import ENERGY, SIMULATED, validation_names
from fedsweep.results.records import PLUGINS, SYNTHETIC
from fedsweep.training.attacks import malicious_clients
from fedsweep.training.base_optimizers import BaseOptimizerConfig, FedAvg
from fedsweep.training.costs import COST_METRICS
from fedsweep.training.drift_and_structural_bias import DRIFT_METRICS, bias_metrics
from fedsweep.training.evaluation import client_metric_names, metric_names
from fedsweep.training.local_training import LocalConfig
from fedsweep.training.optimizers import OptimizerConfig
from fedsweep.training.precision import Precision
from fedsweep.training.round_metrics import names_of
from fedsweep.types import ClientId

SeedStreams = Literal["all"] | Annotated[tuple[StreamName, ...], Field(min_length=1)]


class RunConfig(Config):
    """The configuration of one federated run. The options of each part are defined in the module that uses them."""

    seed: int = Field(0, ge=0, description="seed of the random numbers of the run")
    seed_streams: SeedStreams = Field(
        "all",
        description="groups of random streams that `seed` determines, for example `[allocation, batches]`; the others "
        "are those of seed 0",
    )
    method: MethodConfig
    backbone: BackboneConfig
    lora: LoraConfig
    data: DataConfig
    partition: PartitionConfig
    synthetic: SyntheticConfig = NoSynthetic()  # the default, so that experiments without this entry stay valid
    federation: FederationConfig
    devices: Devices = Field(
        "none",
        description="profiles of the clients' devices, for the metric `simulated/seconds`, listed like "
        "`federation.depths`: `phone`, `laptop`, `jetson`, or `{flops_per_second, megabytes_per_second_up, "
        "megabytes_per_second_down}`; `none`: no time is simulated",
    )
    local: LocalConfig
    optimizer: OptimizerConfig
    base_optimizer: BaseOptimizerConfig = FedAvg()  # the default, so that experiments without this entry stay valid
    aggregation: AnyAggregationConfig
    evaluation: AnyEvaluationConfig
    precision: Precision = Field(
        "float32",
        description="arithmetic of matrix products: `float32`; `tf32`, which is faster on GPUs and the same as float32 "
        "on other devices; or `bfloat16`, with torch's autocast",
    )

    @field_validator("seed_streams")
    @classmethod
    def _in_order(cls, streams: SeedStreams) -> SeedStreams:
        """Return equal values for equal streams, so that runs with the same random numbers are recognised."""
        if streams == "all":
            return streams
        if len(set(streams)) < len(streams):
            raise ValueError(f"`seed_streams` must be distinct, but they are {', '.join(streams)}")
        return "all" if len(streams) == len(STREAMS) else tuple(name for name in STREAMS if name in streams)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        layers, size = self.backbone.depth, self.federation.clients_per_round
        if self.data.size != self.backbone.image_size:
            raise ValueError(
                f"`backbone` {self.backbone.name} needs images that are {self.backbone.image_size} pixels wide, "
                f"but the images of `data` {self.data.name} are {self.data.size} pixels wide"
            )
        check_backbone(self)
        if self.lora.rank > (most := self.backbone.largest_rank(self.lora.position)):
            raise ValueError(
                f"`lora.rank` must be at most {most}, the smallest dimension of the layers that LoRA adapts in "
                f"{self.backbone.name}, but it is {self.lora.rank}"
            )
        check_ranks(self)
        capacities, _ = self.capacities(), self.client_ranks()  # a budget needs a model that fits
        for depth in self.depths():
            if not 1 <= depth <= layers:
                raise ValueError(
                    f"`federation.depths` must contain numbers from 1 to {layers}, the number of blocks of "
                    f"{self.backbone.name}, but one is {depth}"
                )
        if isinstance(size, int) and size > len(capacities):
            raise ValueError(
                f"`federation.clients_per_round` must be at most {len(capacities)}, the number of clients, "
                f"but it is {size}"
            )
        if size == "one_per_domain" and self._pooled:
            raise ValueError(
                f"`federation.clients_per_round` one_per_domain needs clients that have images of only one domain, "
                f"but the clients of `partition` {self.partition.name} have images of all domains"
            )
        self.client_devices()
        if self.base_optimizer.name == "feddyn" and self.aggregation.lora == "product_svd":
            raise ValueError(
                "`base_optimizer` feddyn stores gradients of LoRA's A and B and cannot be combined with "
                "`aggregation.lora` product_svd, which replaces A and B in every round"
            )
        check_rule(self.aggregation, self.base_optimizer)
        if self.method.needs.proxy and not self.partition.proxy_share:
            raise ValueError(
                f"`method` {self.method.name} trains on the server's images and needs a `partition.proxy_share` "
                "above 0, but it is 0"
            )
        self._synthetic_fits()
        self._validation_fits()
        self._last_rounds_fit()
        share, count = self.federation.malicious_share, len(capacities)
        attackers = len(malicious_clients(capacities, share, self.streams))
        if attackers == count or (share and not attackers):
            wanted = "leave at least one" if attackers else "be 0 or select at least one"
            rule = f"{wanted} of the {count} clients{' honest' if attackers else ''}"
            if count == 1:
                rule = "be 0 if there is only one client"
            raise ValueError(f"`federation.malicious_share` must {rule}, but it is {share:g}")
        if isinstance(self.method, SeparateModels):
            check_shared_model(self)
        smallest = self.first_cohort(sorted(capacities, key=lambda client: capacities[client]))
        self.method.check([capacities[client] for client in smallest], layers, self.aggregation)
        check_streams(self)
        return self

    def _last_rounds_fit(self) -> None:
        if (rounds := self.evaluation.last_rounds) is None:
            return
        if rounds <= (every := self.federation.evaluate_every):
            raise ValueError(
                f"`evaluation.last_rounds` must be larger than `federation.evaluate_every` {every}, so that more than "
                f"one evaluated round is averaged, but it is {rounds}"
            )
        if self.evaluation.test_rounds == "last":
            raise ValueError(
                f"`evaluation.last_rounds` {rounds} averages measurements of several rounds and needs "
                "`evaluation.test_rounds` all, but it is last"
            )

    def _validation_fits(self) -> None:
        held_out = self.data.validation_fraction or self.partition.tuning_share
        if self.evaluation.test_rounds == "last" and not held_out:
            raise ValueError(
                "`evaluation.test_rounds` last measures only the validation images between round 0 and the last round "
                "and needs a `data.validation_fraction` above 0 or `listed`, or a `partition.tuning_share` above 0, "
                "but both are 0"
            )
        if self.method.needs.validation and not self.partition.validation_share:
            raise ValueError(
                f"`method` {self.method.name} uses validation images of the clients and needs a "
                "`partition.validation_share` above 0, but it is 0"
            )

    @property
    def streams(self) -> int:
        """The seed from which the random streams of the run are derived (`derived_seed`)."""
        return self.seed if self.seed_streams == "all" else PartialSeed(self.seed, self.seed_streams)

    @property
    def trains_on_synthetic(self) -> bool:
        """True if the server or a client trains on synthetic images.

        If false, fedsweep neither loads nor generates synthetic images.
        """
        return self.method.needs.synthetic or self.partition.takes_synthetic

    def untrained_backbone(self) -> str | None:
        """Return a sentence that warns about a backbone with random weights, or None if the weights are pre-trained."""
        if self.backbone.fingerprint() != "none":
            return None
        return (
            "The backbone is untrained (`backbone.pretrained` is none), so accuracies may stay at chance; "
            "`fedsweep pretrain` trains a backbone without a network connection."
        )

    def marks(self) -> dict[str, str]:
        """Return the provenance tags of the run's results.

        One tag names the source of the synthetic images, if the run trains on any. Another tag names the plug-in
        packages that the run uses, and their versions. If clients have budgets, two more tags list their depths and
        ranks.
        """
        synthetic = {SYNTHETIC: self.synthetic.name} if self.trains_on_synthetic else {}
        used = ", ".join(f"{name} {version}" for name, version in self.plugin_versions().items())
        sizes = in_words(self._fitted().values()) if self.federation.depths is None else {}
        return {**synthetic, **({PLUGINS: used} if used else {}), **sizes}

    def plugin_versions(self) -> dict[str, str]:
        """Return the versions of the outside packages whose classes the run uses, keyed by package."""
        used: list[tuple[plugins.Kind, str]] = [("methods", self.method.name), ("data", self.data.name)]
        used += [("metrics", name) for name in self.evaluation.metrics]
        return plugins.versions([*used, ("aggregation", self.aggregation.rule.name)])

    def _synthetic_fits(self) -> None:
        self.synthetic.check(self.data)
        asked = f"`method` {self.method.name}" if self.method.needs.synthetic else f"`partition` {self.partition.name}"
        if self.trains_on_synthetic and self.synthetic.name == "none":
            raise ValueError(
                f"{asked} trains on synthetic images and needs a `synthetic` other than none, but it is none"
            )
        if self.trains_on_synthetic and self.synthetic.needs_proxy and not self.partition.proxy_share:
            raise ValueError(
                f"`synthetic` {self.synthetic.name} uses the server's images and needs a `partition.proxy_share` "
                "above 0, but it is 0"
            )

    def depths(self) -> set[int]:
        """Return all depths (numbers of blocks) that a client of this run can have."""
        depths = self.federation.depths
        if depths == "dynamic":
            return set(range(1, self.backbone.depth + 1))
        return set(self.capacities().values() if depths is None else depths)

    def capacities(self) -> dict[ClientId, int]:
        """Return the number of blocks that fit on each client, keyed by client id.

        If `federation.depths` is `dynamic`, all numbers are 1, the smallest depth that can be drawn.

        Raises:
            ValueError: The length of `federation.depths` or `federation.capacity` is neither 1 nor the number of
                clients or domains, or no depth or rank is within a budget.
        """
        depths, domains = self.federation.depths, self.client_domains()
        if depths is None:
            return {client: size.depth for client, size in self._fitted().items()}
        if depths == "dynamic":
            return dict.fromkeys(domains, 1)
        return of_clients("federation.depths", depths, domains, self._listed_domains)

    def client_ranks(self) -> dict[ClientId, int | None]:
        """Return the rank of each client's adapters, keyed by client id; None for the full rank, `lora.rank`.

        If `federation.ranks` is `dynamic`, the ranks are drawn in each round, and all are None.

        Raises:
            ValueError: As in `capacities`.
        """
        ranks, domains = self.federation.ranks, self.client_domains()
        if self.federation.depths is None:
            return {client: size.rank for client, size in self._fitted().items()}
        if ranks is None or ranks == "dynamic":
            return dict.fromkeys(domains)
        return dict(of_clients("federation.ranks", ranks, domains, self._listed_domains))

    def _fitted(self) -> Mapping[ClientId, Size]:
        capacity, domains = self.federation.capacity or (), self.client_domains()
        return fitted(self, of_clients("federation.capacity", capacity, domains, self._listed_domains))

    def client_devices(self) -> dict[ClientId, DeviceProfile]:
        """Return the device of each client, keyed by client id; empty if `devices` is `none`.

        Raises:
            ValueError: The length of `devices` is neither 1 nor the number of clients or domains.
        """
        return devices_of(self.devices, self.client_domains(), self._listed_domains)

    def ranks(self) -> set[int]:
        """Return all ranks that a client's adapters can have, as far as `federation` decides them."""
        if self.federation.ranks == "dynamic":
            return set(range(1, self.lora.rank + 1))
        return {self.lora.rank if rank is None else rank for rank in self.client_ranks().values()}

    def least_rank(self) -> int:
        """Return the smallest rank that a client's adapters can have."""
        return min(self.ranks())

    @property
    def _listed_domains(self) -> Sequence[str]:
        return () if self._pooled else self.data.training_domains

    @property
    def _pooled(self) -> bool:
        return self.partition.pools and len(self.data.training_domains) > 1

    def client_domains(self) -> dict[ClientId, str]:
        """Return the domain of each client, keyed by client id. No images are read."""
        return self.partition.clients_of(self.data.training_domains)

    def first_cohort(self, ordered: Sequence[ClientId]) -> list[ClientId]:
        """Return the cohort with the first clients of `ordered`, which lists all clients of the run.

        The cohort has as many clients as in each round, or the first one of each domain.
        """
        size, domains = self.federation.clients_per_round, self.client_domains()
        if size is None:
            return list(domains)
        if size == "one_per_domain":
            firsts = {domains[client]: client for client in reversed(ordered)}
            return [firsts[domain] for domain in dict.fromkeys(domains.values())]
        return list(ordered[:size])

    def metrics(self) -> list[str]:
        """Return the names of the metrics that every round reports."""
        asked = self.evaluation.metrics
        drift = DRIFT_METRICS if "drift" in asked else []
        bias = bias_metrics(StandIns.of_method(self.method).has_stand_ins) if "structural_bias" in asked else []
        clients = list(self.client_domains())
        names = client_metric_names(clients)
        tuned = validation_names(names) if self.partition.tuning_share else ()
        of_clients = [*(names if self.partition.test_share else ()), *tuned]
        validated = bool(self.data.validation_fraction)
        averaged = self.evaluation.last_rounds is not None
        domains = metric_names(self.data.training_domains, self.data.held_out_domains, validated, averaged)
        own = OwnMetrics.of_method(self.method).metric_names(clients)
        return [
            *domains,
            *of_clients,
            "loss/train",
            *ROUND_METRICS,
            *([ENERGY] if self.federation.sets_ranks else []),
            *COST_METRICS,
            *([] if self.devices == "none" else [SIMULATED]),
            *own,
            *drift,
            *bias,
            *names_of(asked),
        ]
