"""Execution of a run: divide its data, build its model and play its rounds durably."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fedsweep.common.errors import UserError
from fedsweep.common.files import write_atomically
from fedsweep.common.paths import activation_bytes
from fedsweep.common.process_usage import forget_peak, resident_peak
from fedsweep.data.data_config import load
from fedsweep.data.partition import Split
from fedsweep.federation.rounds import Federation, federate
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods import Server
from fedsweep.methods.base import synthetic_of
from fedsweep.methods.capabilities import OwnWeights
from fedsweep.models import build_model
from fedsweep.models.activation_cache import FrozenRows
from fedsweep.models.base import Reader
from fedsweep.results.checkpoint import Checkpoint
from fedsweep.results.checkpoint import load as load_checkpoint
from fedsweep.results.checkpoint import save as save_checkpoint
from fedsweep.results.history import RoundRecord
from fedsweep.results.tsne_files import files
from fedsweep.training.local_training import CohortTrainer
from fedsweep.training.tsne import draw
from fedsweep.types import FederatedData, ImageSet, RoundResult

Device = Literal["cpu", "cuda"]


def split(config: RunConfig) -> tuple[FederatedData, Split]:
    """Return a run's data and clients, which do not depend on the method; raise UserError if that is impossible."""
    data = load(config.data)
    parts = config.partition.split(data, config.capacities(), config.seed)
    if not config.trains_on_synthetic:
        return data, parts
    return data, config.partition.joined(parts, config.synthetic.make(data, parts.proxy, config.seed))


def content_digests(config: RunConfig) -> dict[str, str]:
    """Return the digests of the files that a configuration only names: images with labels, and weights."""
    weights = [config.backbone.fingerprint(), OwnWeights.of_method(config.method).fingerprint()]
    data = load(config.data)
    images = [data.digest, _of_synthetic(config, data)]
    return {"data": " ".join(filter(None, images)), "weights": " ".join(one for one in weights if one)}


def _of_synthetic(config: RunConfig, data: FederatedData) -> str:
    """The digest of synthetic images in files; empty for none."""
    return config.synthetic.fingerprint(data) if config.trains_on_synthetic else ""


def check_digests(config: RunConfig, planned: Mapping[str, str]) -> None:
    """Raise UserError if images or weights changed since the plan: they are part of a trial's identity."""
    for name, digest in content_digests(config).items():
        if digest != planned[name]:
            raise UserError(f"the {name} of this trial changed since its sweep began; start a new sweep.")


def check_content(config: RunConfig) -> None:
    """Raise UserError unless the run can load and divide its data, load its weights and draw its t-SNE's images."""
    data, _ = split(config)
    config.backbone.check_weights(len(data.class_names), data.class_names)
    OwnWeights.of_method(config.method).check_weights(config.backbone, data.class_names)
    activation_bytes()
    if (classes := config.evaluation.tsne_classes) is not None:
        draw(data.domains, data.class_names, classes, config.evaluation.tsne_images, config.seed)


def build(config: RunConfig, device: Device = "cpu") -> Federation:
    """Return a run's data, clients, model and trainer; the model on the device, the images where they are."""
    data, parts = split(config)
    method, clients = config.method, list(parts.clients)
    if method.needs.synthetic:
        clients = [replace(one, synthetic=synthetic_of(one.domain, parts.synthetic)) for one in clients]
    freeze_a, lora = config.aggregation.lora == "freeze_a", config.lora if method.needs.lora else None
    model = build_model(config.backbone, lora, len(data.class_names), config.seed, data.class_names, freeze_a)
    method.prepare(model, config.depths(), set(config.client_domains().values()), config.seed)
    model.to(device)
    depths = tuple(sorted(config.depths()))
    kept = FrozenRows.of(sources(data, parts.synthetic, _of_synthetic(config, data)))
    return Federation(
        method=method,
        model=model,
        fresh=model.adapter(),
        clients=clients,
        domains=data.domains,
        held_out=data.held_out,
        class_names=data.class_names,
        server=Server(model.num_layers, config.aggregation, depths, parts.proxy, parts.synthetic),
        trainer=CohortTrainer(
            model,
            config.optimizer,
            config.base_optimizer,
            config.local,
            config.seed,
            rounds=config.federation.rounds,
            fewest=min(len(client.train) for client in clients),
            reader=Reader(model, _identity(config), kept, config.evaluation.batch_size),
        ),
        config=config.federation,
        evaluation=config.evaluation,
        seed=config.seed,
    )


def _identity(config: RunConfig) -> str:
    """The key of the frozen part of a run's model. The names of the classes do not influence an image's features."""
    content = config.backbone.fingerprint()
    lora = f"{config.lora.model_dump_json()} {config.aggregation.lora}" if config.method.needs.lora else ""
    drawn = content == "none" or (config.method.needs.lora and config.aggregation.lora == "freeze_a")
    return f"{config.backbone.identity(content)} {lora} {config.seed if drawn else ''}".strip()


def sources(data: FederatedData, synthetic: Mapping[str, ImageSet] | None = None, digest: str = "") -> dict[int, str]:
    """Return the content of each tensor of images, by its address; `digest` is that of synthetic images in files."""
    found = {}
    for one in (*data.domains, *data.held_out):
        for split, images in (("train", one.train), ("test", one.test)):
            for place, part in enumerate(images.parts):
                # A domain that is held out is tested on both its splits, one after the other.
                name = ("train", "test")[place] if len(images.parts) > 1 else split
                found[part.data_ptr()] = f"{data.digest}/{one.name}/{name}"
    for name, images in (synthetic or {}).items():
        for place, part in enumerate(images.parts):
            content = f"{digest}/{name}/{place}" if digest else hashlib.sha256(part.numpy().data).hexdigest()
            found.setdefault(part.data_ptr(), f"synthetic {content}")
    return found


def run(config: RunConfig, device: Device = "cpu") -> Iterator[RoundResult]:
    """Play a run round by round."""
    yield from federate(build(config, device))


def run_resumably(
    config: RunConfig,
    checkpoint: Path,
    device: Device = "cpu",
    until: int | None = None,
    measure: Callable[[], Mapping[str, float]] = dict,
) -> Iterator[RoundRecord]:
    """Play a run with every round on disk before it is yielded; yield the rounds found there first.

    With `until` it ends after that round, and a later call continues. `measure` returns the usage of the machine in
    each round; no metric depends on it. A run that was stopped at any moment continues as if it had not been. The t-SNE
    is written before the last round's checkpoint, so that a complete run has one.
    """
    forget_peak()
    federation = build(config, device)
    history: list[RoundRecord] = []
    start: RoundResult | None = None
    if checkpoint.exists():
        found = load_checkpoint(checkpoint, federation.initial_state(), device)
        start = RoundResult(found.round, found.state)
        history = list(found.history)
        yield from history
    for result in federate(federation, start):
        measured = RoundRecord(result.round, dict(result.metrics), result.seconds, resident_peak(), measure())
        history.append(measured)
        if result.round == config.federation.rounds and (embedding := federation.embed(result.state)):
            for name, content in files(embedding).items():
                write_atomically(checkpoint.with_name(name), content)
        save_checkpoint(checkpoint, Checkpoint(result.round, result.state, tuple(history)))
        yield measured
        if result.round == until:
            return
