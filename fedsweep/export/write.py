"""Export of a trial's model in the formats of timm, transformers and PEFT. The export is loaded again as a check."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError, near, one_line, summarise_list
from fedsweep.common.files import write_atomically
from fedsweep.data.prepared.card import read_card, store_folder
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.export.card import BACKBONE, CARD, FOLDER, README, WHOLE, ExportCard, ImageCard, Origin, readme
from fedsweep.export.predict import load
from fedsweep.export.which_trial import Named
from fedsweep.federation.build_and_run import build, content_digests
from fedsweep.federation.rounds import Federation
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import ExportObstacle, SeparateModels, adapter_of, predicted
from fedsweep.models import ClipBackbone, DigitsClip, LayeredModel
from fedsweep.models.base import Recipe
from fedsweep.models.checkpoint_folder import CONFIG, PREPROCESSOR, TOKENS
from fedsweep.models.lora import write_adapter
from fedsweep.models.names import FOLDED, is_folded, layer_of, names_within
from fedsweep.models.weights_file import digest
from fedsweep.results.checkpoint import Checkpoint
from fedsweep.results.checkpoint import load as load_checkpoint
from fedsweep.results.history import RoundRecord, on_test
from fedsweep.results.records import TrialPlan
from fedsweep.types import ImageSet

COMPARED = 8  # number of test images whose logits are compared with those of the run
TOLERANCE = 1e-4  # allowed difference relative to the largest logit, because the order of summation differs


def export(named: Named, target: Path, client: str | None = None) -> ExportCard:
    """Write a trial's global model, or one client's model, to an empty folder; return the contents of `export.json`.

    Raises:
        UserError: The folder cannot be used, the method's model cannot be exported, the run's data or weights are
            missing or have changed, or the logits of the written model differ from those of the run.
    """
    check_target(target)
    plan = named.record.plan
    config = RunConfig.of(plan.config, f"trial {plan.key}")
    check_exportable(config, client)
    check_content(config, plan)
    federation = build(config)
    checkpoint = load_checkpoint(named.trial.checkpoint, federation.initial_state())
    if not federation.model.movable():
        raise UserError(f"`method` {config.method.name} trains nothing, so there is nothing to export.")
    test = federation.domains[0].test
    images = test.select(torch.arange(min(COMPARED, len(test))))
    expected = _logits(federation, checkpoint, images, client)
    with _as_a_whole(target) as folder:
        layers, last = checkpoint.state.layers, checkpoint.history[-1]
        card = write(folder, named, config, federation.model, layers, last, client)
        found = load(folder).logits(images.take(torch.arange(len(images)))[0])
        furthest = (found - expected).abs().max().item()
        if not furthest <= TOLERANCE * (1 + expected.abs().max().item()):
            raise UserError(
                f"trial {plan.key} cannot be exported: the logits of the exported model differ from those of the run "
                f"by up to {furthest:.3g}."
            )
    return card


def write(
    folder: Path,
    named: Named,
    config: RunConfig,
    model: LayeredModel,
    layers: tuple[int, ...],
    last: RoundRecord,
    client: str | None,
) -> ExportCard:
    """Write the tensors, `export.json` and the README of a model, and return the contents of `export.json`.

    Args:
        folder: The folder to write to.
        named: The trial.
        config: The configuration of the trial.
        model: The model. The adapter to be exported must already be loaded into it.
        layers: The blocks that the model uses for predictions.
        last: The record of the round after which the model was saved.
        client: The client whose own model is exported, or None for the global model.
    """
    recipe = _write_tensors(folder, config, model, layers)
    plan, outcome, backbone = named.record.plan, named.record.outcome, config.backbone
    sweep = named.sweep.manifest().id if named.sweep else None
    prompts = tuple(backbone.prompts(model.class_names)) if isinstance(backbone, ClipBackbone | DigitsClip) else None
    added = {name.split(".")[0] for name in model.movable()} - {"backbone"}
    skipped = any(layer_of(name) not in (None, *layers) for name in model.trainable())
    card = ExportCard(
        fedsweep=metadata.version("fedsweep"),
        form="peft" if config.method.needs.lora else "whole",
        folded=any(map(is_folded, model.movable())),
        backbone=recipe,
        cut=model.cut(layers),
        weights=backbone.fingerprint(),
        classes=model.class_names,
        prompts=prompts,
        images=_image_card(config, model),
        method=config.method.name,
        seed=config.seed,
        origin=Origin(
            name=named.name,
            sweep=sweep,
            key=plan.key,
            arm=plan.arm,
            client=client,
            chosen=named.why,
            chosen_by_test=named.by_test,
        ),
        outcome=outcome.outcome if outcome else "running",
        round=last.round,
        metrics={  # for a client's own model, without the metrics of the global model and of all clients
            name: value
            for name, value in last.metrics.items()
            if not client or on_test(name) == f"accuracy/client/{client}"
        },
        left_out=(*sorted(added), *([f"blocks above the first {len(layers)}"] if skipped else [])),
        hyperparameters=flat(config),
        digests=dict(plan.digests),
        sha256={one.relative_to(folder).as_posix(): digest(one) for one in sorted(folder.rglob("*.safetensors"))},
    )
    write_atomically(folder / CARD, card.model_dump_json(indent=2).encode())
    write_atomically(folder / README, readme(card).encode())
    return card


def _write_tensors(folder: Path, config: RunConfig, model: LayeredModel, layers: Sequence[int]) -> Recipe:
    """Write the tensors, and return the recipe for building the network from the files in `folder`.

    If the method uses LoRA, write the adapter and the head. Also write the backbone, unless timm or Hugging Face's hub
    provides the same weights. Changes that the server folded into frozen weights are added to the backbone, which no
    library provides then. If the method does not use LoRA, write all weights to one file.
    """
    state = {name: one for name, one in model.state_dict().items() if name.startswith("backbone.")}
    recipe, whole = config.backbone.recipe(len(model.class_names)), not config.method.needs.lora
    folded = {name: state.pop(name) for name in list(state) if is_folded(name)}
    if folded:
        recipe = recipe.model_copy(update={"fetched": False})
    for name, change in folded.items():
        weight = f"{name.removesuffix(FOLDED)}.base_layer.weight"
        state[weight] = state[weight] + change
    if not whole:
        walked = names_within(state, layers)
        tuned = [name for name in walked if ".lora_" in name or name.startswith(model.head_prefix)]
        base = recipe.model if recipe.fetched else None
        write_adapter(folder, config.lora, {model.plain_name(name): state[name] for name in tuned}, base)
        if recipe.fetched:
            return recipe
    network = {
        model.plain_name(name.replace(".base_layer.", ".")): tensor.detach().cpu().contiguous().clone()
        for name, tensor in state.items()
        if ".lora_" not in name
    }
    if not isinstance(config.backbone, ClipBackbone | DigitsClip):
        save_file(network, folder / (WHOLE if whole else BACKBONE), {"format": "pt"})
        return recipe.model_copy(update={"fetched": False})
    home, source = folder if whole else folder / FOLDER, config.backbone.folder()
    home.mkdir(exist_ok=True)
    for name in (CONFIG, PREPROCESSOR, *TOKENS):
        if (source / name).is_file():
            (home / name).write_bytes((source / name).read_bytes())
    save_file(network, home / WHOLE, {"format": "pt"})
    return recipe.model_copy(update={"fetched": False, "model": "." if whole else FOLDER})


def _image_card(config: RunConfig, model: LayeredModel) -> ImageCard:
    """Return the model's image size and normalisation, and the data set's crop and interpolation."""
    cut: dict[str, Any] = {}
    if isinstance(config.data, PreparedData):
        prepared = read_card(store_folder(config.data.set, config.data.size))
        cut = {name: getattr(prepared, name) for name in ("crop_pct", "crop_mode", "interpolation")}
    mean, std = (tuple(one.flatten().tolist()) for one in (model.mean, model.std))
    return ImageCard(size=config.backbone.image_size, mean=mean, std=std, **cut)


def _logits(federation: Federation, checkpoint: Checkpoint, images: ImageSet, client: str | None) -> Tensor:
    """Return the logits (n, classes) of `images`.

    The logits are those of the global model or, if `client` is given, of the client's own model.
    """
    method, state = federation.method, checkpoint.state
    federation.model.load_adapter(adapter_of(method, state, client))
    owner = next((one for one in federation.clients if one.id == client), None)
    return predicted(method, state, federation.trainer.reader, images, owner)


@contextlib.contextmanager
def _as_a_whole(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `target` on success and deleted on an error."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True
        ) as scratch:
            yield Path(scratch)
            # Temporary folders and files of safetensors are created with access for their owner only.
            for path in (Path(scratch), *Path(scratch).rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
            Path(scratch).rename(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or one_line(error)}.") from None


def check_target(target: Path) -> None:
    """Raise UserError if `target` is not empty or cannot be created."""
    if target.is_dir() and any(target.iterdir()):
        raise UserError(f"`--to` must be a new or an empty folder, but {target} is not empty.")
    if target.exists() and not target.is_dir():
        raise UserError(f"`--to` must be a new or an empty folder, but {target} is a file.")
    above = next(one for one in target.absolute().parents if one.exists())
    if not above.is_dir():
        raise UserError(f"`--to` must be a new or an empty folder, but {above}, a parent of {target}, is a file.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"`--to` {target} cannot be created: {above} is not writable.")


def check_exportable(config: RunConfig, client: str | None = None) -> None:
    """Raise UserError if the model cannot be exported.

    If `client` is given, also raise UserError if the client is unknown or has no model of its own.
    """
    method, clients = config.method, list(config.client_domains())
    if client is not None and client not in clients:
        hint = near(client, clients) or f"; the clients are {summarise_list(clients, most=6, quote='')}."
        raise UserError(f"`--client`: there is no client `{client}`{hint}")
    separate = isinstance(method, SeparateModels)
    obstacle = ExportObstacle.of_method(method).export_obstacle(
        config.depths(), config.backbone.depth, client is not None
    )
    if obstacle is not None:
        whose = "the global model" if client is None else f"client {client}"
        own = "" if client is not None or not separate else "; `--client` exports a client's own model"
        raise UserError(
            f"`method` {method.name} cannot be exported: {whose} predicts with {obstacle}, which neither PEFT nor "
            f"the backbone's library can load{own}."
        )
    if client is not None and not separate:
        raise UserError(
            f"`--client` requires a method whose clients have separate models, but the clients of `method` "
            f"{method.name} share one model."
        )


def check_content(config: RunConfig, plan: TrialPlan) -> None:
    """Raise UserError if the run's data or weights are missing or have changed since the run."""
    for name, found in content_digests(config).items():
        if plan.digests.get(name, found) != found:
            raise UserError(f"trial {plan.key} cannot be exported, because its {name} changed after it ran.")
