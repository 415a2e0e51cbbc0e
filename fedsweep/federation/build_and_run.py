"""Functions that split a run's data, build its model, and run its rounds with a checkpoint after each round."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsweep.common.errors import UserError
from fedsweep.common.files import write_atomically
from fedsweep.common.paths import activation_bytes
from fedsweep.common.process_usage import forget_peak, resident_peak
from fedsweep.common.randomness import derived_seed
from fedsweep.data.data_config import load
from fedsweep.data.partition import Split
from fedsweep.data.prepared.arrow_files import verify
from fedsweep.data.prepared.card import store_folder
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.data.synthetic.generated import Diffusers, Folder
from fedsweep.federation.rounds import Federation, federate
from fedsweep.federation.run_config import RunConfig
from fedsweep.federation.simulated_time import Clock, check_devices
from fedsweep.methods import Server
from fedsweep.methods.base import synthetic_of
from fedsweep.methods.capabilities import OwnWeights
from fedsweep.models import build_model
from fedsweep.models.activation_cache import FrozenRows
from fedsweep.models.base import Reader
from fedsweep.models.resident_images import ResidentImages
from fedsweep.results.checkpoint import Checkpoint
from fedsweep.results.checkpoint import load as load_checkpoint
from fedsweep.results.checkpoint import save as save_checkpoint
from fedsweep.results.history import RoundRecord, averaged_rounds, over_last_rounds
from fedsweep.results.records import PLUGINS, RIGHT
from fedsweep.results.right_images import RightImages, packed_bits
from fedsweep.results.tsne_files import files
from fedsweep.training.evaluation import stratified_test_images
from fedsweep.training.local_training import CohortTrainer
from fedsweep.training.tsne import draw
from fedsweep.types import FederatedData, ImageSet, RoundListener, RoundResult

Device = Literal["cpu", "cuda"]


def split(config: RunConfig) -> tuple[FederatedData, Split]:
    """Load the data of a run and split them among the clients. The split is the same for every method.

    Raises:
        UserError: The data cannot be loaded or split.
    """
    data = load(config.data)
    parts = config.partition.split(data, config.capacities(), config.streams)
    if not config.trains_on_synthetic:
        return data, parts
    return data, config.partition.joined(parts, config.synthetic.make(data, parts.proxy, config.streams))


def content_digests(config: RunConfig) -> dict[str, str]:
    """Return digests of the content of a run, keyed by name.

    `data` identifies the run's images and labels, and `weights` identifies its pre-trained weights. If the run uses
    plug-ins, `plugins` names their packages with their versions.
    """
    weights = [config.backbone.fingerprint(), OwnWeights.of_method(config.method).fingerprint()]
    data = load(config.data)
    images = [data.digest, _of_synthetic(config, data)]
    used = {PLUGINS: ", ".join(f"{name} {version}" for name, version in config.plugin_versions().items())}
    content = {"data": " ".join(filter(None, images)), "weights": " ".join(one for one in weights if one)}
    return content | (used if used[PLUGINS] else {})


def _of_synthetic(config: RunConfig, data: FederatedData) -> str:
    """Return the digest of the run's synthetic image files, or an empty string if the run reads no such files."""
    return config.synthetic.fingerprint(data) if config.trains_on_synthetic else ""


def check_digests(config: RunConfig, planned: Mapping[str, str]) -> None:
    """Raise UserError if a run's images, weights or plug-ins have changed since its trial was planned.

    `planned` is the dict that `content_digests` returned at that time.
    """
    for name, digest in content_digests(config).items():
        if digest != planned.get(name):
            raise UserError(f"the {name} of this trial changed after its sweep began; start a new sweep.")


def prepared_folders(config: RunConfig) -> list[Path]:
    """Return the folders of the prepared data sets that a run reads."""
    names = [config.data.set] if isinstance(config.data, PreparedData) else []
    if config.trains_on_synthetic and isinstance(config.synthetic, Folder):
        names.append(config.synthetic.set)
    if config.trains_on_synthetic and isinstance(config.synthetic, Diffusers):
        names.append(config.synthetic.set_name(load(config.data)))
    return [store_folder(name, config.data.size) for name in names]


def check_pixels(configs: Iterable[RunConfig]) -> None:
    """Read all pixels of the prepared data sets that the runs read, each data set once.

    Raises:
        UserError: The pixels or labels of a data set differ from those that were prepared.
    """
    for folder in dict.fromkeys(folder for config in configs for folder in prepared_folders(config)):
        verify(folder)


def check_content(config: RunConfig) -> None:
    """Raise UserError if a run's data or weights cannot be used.

    Also raise UserError if the environment variable FEDSWEEP_CACHE_GB is invalid, if the data have too few classes or
    test images for the run's t-SNE, or if the run has devices but the FLOPs of its clients cannot be counted.
    """
    data, _ = split(config)
    config.backbone.check_weights(len(data.class_names), data.class_names)
    OwnWeights.of_method(config.method).check_weights(config.backbone, data.class_names)
    activation_bytes()
    check_devices(config)
    if (classes := config.evaluation.tsne_classes) is not None:
        draw(data.domains, data.class_names, classes, config.evaluation.tsne_images, config.streams)


def build(
    config: RunConfig, device: Device = "cpu", listener: RoundListener | None = None, compared: Collection[int] = ()
) -> Federation:
    """Return the data, clients, model and trainer of a run. Only the model is moved to the device.

    Args:
        config: The configuration of the run.
        device: The device on which the model is trained.
        listener: An object that follows the progress within each round.
        compared: Rounds that are evaluated in addition to those of `federation.evaluate_every`.
    """
    data, parts = split(config)
    method, ranks = config.method, config.client_ranks()
    clients = [replace(one, rank=ranks[one.id]) for one in parts.clients]
    if method.needs.synthetic:
        clients = [replace(one, synthetic=synthetic_of(one.domain, parts.synthetic)) for one in clients]
    freeze_a, lora = config.aggregation.lora == "freeze_a", config.lora if method.needs.lora else None
    model = build_model(config.backbone, lora, len(data.class_names), config.streams, data.class_names, freeze_a)
    method.prepare(model, config.depths(), set(config.client_domains().values()), config.streams)
    model.to(device)
    depths = tuple(sorted(config.depths()))
    levels = tuple(sorted(config.ranks())) if config.federation.sets_ranks else ()
    kept = FrozenRows.of(sources(data, parts.synthetic, _of_synthetic(config, data)))
    return Federation(
        method=method,
        model=model,
        fresh=model.adapter(),
        clients=clients,
        domains=data.domains,
        held_out=data.held_out,
        class_names=data.class_names,
        server=Server(model.num_layers, config.aggregation, depths, lora, parts.proxy, parts.synthetic, levels),
        trainer=CohortTrainer(
            model,
            config.optimizer,
            config.base_optimizer,
            config.local,
            config.streams,
            rounds=config.federation.rounds,
            fewest=min(len(client.train) for client in clients),
            reader=Reader(
                model,
                _identity(config),
                kept,
                config.evaluation.batch_size,
                listener or RoundListener(),
                _plain_identity(config, data.class_names),
                ResidentImages.on(model.mean.device),
            ),
            lora=lora,
        ),
        config=config.federation,
        evaluation=config.evaluation,
        seed=config.streams,
        compared=compared,
        data_digest=data.digest,
        clock=Clock.of(config, min(len(client.train) for client in clients)),
        precision=config.precision,
    )


def _identity(config: RunConfig) -> str:
    """Return a string that identifies the frozen part of a run's model.

    The activation cache uses the string to tell models apart. The string does not contain the class names, because they
    do not affect the features of an image.
    """
    content = config.backbone.fingerprint()
    lora = f"{config.lora.model_dump_json()} {config.aggregation.lora}" if config.method.needs.lora else ""
    frozen_factors = config.method.needs.lora and config.aggregation.lora == "freeze_a"
    drawn = derived_seed(config.streams, "backbone") if content == "none" or frozen_factors else ""
    return f"{config.backbone.identity(content)} {lora} {drawn} {_rounding(config)}".strip()


def _rounding(config: RunConfig) -> str:
    return "" if config.precision == "float32" else config.precision


def _plain_identity(config: RunConfig, class_names: tuple[str, ...]) -> str:
    """Return a string that identifies the untuned model, whose logits depend on its classes but not on LoRA."""
    content = config.backbone.fingerprint()
    drawn = derived_seed(config.streams, "backbone") if content == "none" else ""
    return f"{config.backbone.model_dump_json()} {content} {class_names} {drawn} {_rounding(config)}".strip()


def sources(data: FederatedData, synthetic: Mapping[str, ImageSet] | None = None, digest: str = "") -> dict[int, str]:
    """Return a name for each image tensor, keyed by the memory address of the tensor.

    The name identifies the contents of the tensor. The activation cache stores the outputs of frozen blocks under these
    names, so that later runs can reuse the outputs.

    Args:
        data: The images of all domains.
        synthetic: The synthetic images, keyed by domain.
        digest: The digest of the files of the synthetic images; empty if the images were computed instead of read.
    """
    found = {}
    for one in (*data.domains, *data.held_out):
        for split, images in (("train", one.train), ("test", one.test)):
            for place, part in enumerate(images.parts):
                # The test images of a held-out domain are its training split followed by its test split.
                name = ("train", "test")[place] if len(images.parts) > 1 else split
                found[part.data_ptr()] = f"{data.digest}/{one.name}/{name}"
    for name, images in (synthetic or {}).items():
        for place, part in enumerate(images.parts):
            content = f"{digest}/{name}/{place}" if digest else hashlib.sha256(part.numpy().data).hexdigest()
            found.setdefault(part.data_ptr(), f"synthetic {content}")
    return found


def run(config: RunConfig, device: Device = "cpu") -> Iterator[RoundResult]:
    """Execute the run that `config` describes, and yield the result of each round.

    Round 0 evaluates the untuned model.
    """
    yield from federate(build(config, device))


def rounds_to_record(federation: Federation) -> list[int] | None:
    """Return the rounds that accuracy/last_rounds averages after the last round, but without the last round.

    For each of these rounds, a run records which of the tested images are predicted correctly. The result is None if
    the run does not have the metric.
    """
    evaluation, config = federation.evaluation, federation.config
    if evaluation.last_rounds is None:
        return None
    return averaged_rounds(config.rounds, evaluation.last_rounds, config.evaluate_every)[:-1]


def last_files(federation: Federation, result: RoundResult, earlier: Mapping[int, Tensor]) -> dict[str, bytes]:
    """Return the contents of the files that a run writes after its last round, keyed by file name.

    Args:
        federation: The parts of the run.
        result: The result of the last round.
        earlier: The `packed_bits` of earlier rounds, uint8 (bytes,), keyed by round. If a round in `rounds_to_record`
            is missing, because an older version of fedsweep ran it, the bits of no earlier round are written.
    """
    right, rounds = _on_cpu(result.right), rounds_to_record(federation)
    known = rounds is not None and earlier.keys() >= set(rounds)
    recorded = [earlier[one].cpu().numpy() for one in rounds or ()] if known else None
    held_out = {domain.name for domain in federation.held_out}
    groups = [
        None if domain.test.groups is None else domain.test.groups.numpy()
        for domain in (*federation.domains, *federation.held_out)
    ]
    sample = _sample_before_last(federation)
    of_images = RightImages.of_domains(federation.data_digest, right, held_out, groups, recorded, sample)
    embedding = federation.embed(result.state)
    return {RIGHT: of_images.content(), **({} if embedding is None else files(embedding))}


def _sample_before_last(federation: Federation) -> list[np.ndarray] | None:
    """Return for each domain which test images the rounds before the last test, bool (n,); None if they test all."""
    domains, count = (*federation.domains, *federation.held_out), federation.evaluation.images_per_domain
    if count is None or max(len(domain.test) for domain in domains) <= count:
        return None
    places = [stratified_test_images(domain, count, federation.seed) for domain in domains]
    return [np.isin(np.arange(len(one.test)), kept) for one, kept in zip(domains, places, strict=True)]


def _on_cpu(right: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: one.cpu().numpy() for name, one in right.items()}


def run_resumably(
    config: RunConfig,
    checkpoint: Path,
    device: Device = "cpu",
    until: int | None = None,
    measure: Callable[[], Mapping[str, float]] = dict,
    listener: RoundListener | None = None,
    compared: Collection[int] = (),
) -> Iterator[RoundRecord]:
    """Execute the run that `config` describes, and yield the record of each round after writing a checkpoint.

    If the checkpoint exists, the records that it contains are yielded first, and the run continues with the next round.
    Interrupting a run at any moment does not affect its metrics. The file with the correctly predicted test images and
    the files of the t-SNE, if the run draws one, are written before the last checkpoint, so no complete run lacks them.
    Until then, the checkpoint contains the correctly predicted images of the earlier rounds in `rounds_to_record`.

    Args:
        config: The configuration of the run.
        checkpoint: The path of the checkpoint file, which need not exist yet.
        device: The device on which the model is trained.
        until: The round after which this call stops; None for the last round of the run.
        measure: A function that is called after each round. It returns measurements of the CPU, the memory and the GPU,
            which are added to the record of the round.
        listener: An object that follows the progress within each round.
        compared: Rounds that are evaluated in addition to those of `federation.evaluate_every`.
    """
    forget_peak()
    federation = build(config, device, listener, compared)
    history: list[RoundRecord] = []
    start: RoundResult | None = None
    right, recorded = dict[int, Tensor](), rounds_to_record(federation) or ()
    if checkpoint.exists():
        found = load_checkpoint(checkpoint, federation.initial_state(), device)
        start = RoundResult(found.round, found.state)
        history, right = list(found.history), dict(found.right)
        yield from history
    for result in federate(federation, start):
        metrics = dict(result.metrics)
        if (rounds := config.evaluation.last_rounds) is not None:
            metrics |= over_last_rounds(history, result.round, metrics, rounds, config.federation.evaluate_every)
        measured = RoundRecord(result.round, metrics, result.seconds, resident_peak(), measure())
        history.append(measured)
        if result.round in recorded:
            right[result.round] = torch.from_numpy(packed_bits(_on_cpu(result.right).values()))
        if result.round == config.federation.rounds:
            for name, content in last_files(federation, result, right).items():
                write_atomically(checkpoint.with_name(name), content)
            right = {}
        save_checkpoint(checkpoint, Checkpoint(result.round, result.state, tuple(history), right))
        yield measured
        if result.round == until:
            return
