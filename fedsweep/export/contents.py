"""The files of an export, in the formats that timm, transformers and PEFT load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fedsweep.common.config import flat
from fedsweep.common.files import write_atomically
from fedsweep.data.prepared.card import read_card, store_folder
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.export.card import BACKBONE, CARD, FOLDER, README, WHOLE, ExportCard, ImageCard, Origin, readme
from fedsweep.export.which_trial import Named
from fedsweep.federation.run_config import RunConfig
from fedsweep.models import ClipBackbone, DigitsClip, LayeredModel
from fedsweep.models.base import Recipe
from fedsweep.models.checkpoint_folder import CONFIG, PREPROCESSOR, TOKENS
from fedsweep.models.lora import write_adapter
from fedsweep.models.names import layer_of, names_within
from fedsweep.models.weights_file import digest
from fedsweep.results.history import RoundRecord


@dataclass(frozen=True)
class PlainTensors:
    """A run's model in parts; tensors have their names in the plain network, LoRA's with PEFT's suffix."""

    tuned: Mapping[str, Tensor]
    """The head, and LoRA in the blocks that the exported model uses."""
    network: Mapping[str, Tensor]
    """All current tensors of the backbone except LoRA."""
    cut: Mapping[str, int]
    left_out: tuple[str, ...]
    """Prefixes of trained tensors that the prediction does not use."""


def plain_tensors(model: LayeredModel, layers: Sequence[int]) -> PlainTensors:
    """Take a model with loaded adapter apart; `layers` are the blocks that its prediction uses."""
    state = {name: one for name, one in model.state_dict().items() if name.startswith("backbone.")}
    walked = set(names_within(state, layers))
    tuned = {
        model.plain_name(name): one
        for name, one in state.items()
        if name in walked and (".lora_" in name or name.startswith(model.head_prefix))
    }
    network = {
        model.plain_name(name.replace(".base_layer.", ".")): one for name, one in state.items() if ".lora_" not in name
    }
    others = {name.split(".")[0] for name in model.movable() if not name.startswith("backbone.")}
    skipped = any(layer_of(name) is not None and name not in walked for name in model.trainable())
    above = (f"blocks above the first {len(layers)}",) if skipped else ()
    return PlainTensors(tuned, network, model.cut(layers), (*sorted(others), *above))


def write(
    folder: Path,
    named: Named,
    config: RunConfig,
    model: LayeredModel,
    layers: tuple[int, ...],
    last: RoundRecord,
    client: str | None,
) -> ExportCard:
    """Write a model with loaded adapter that predicts with the blocks `layers`, its card and its README."""
    parts, recipe = plain_tensors(model, layers), config.backbone.recipe(len(model.class_names))
    whole = not config.method.needs.lora
    if not whole:
        write_adapter(folder, config.lora, parts.tuned, recipe.model if recipe.fetched else None)
    if whole or not recipe.fetched:
        recipe = _write_network(folder, config, parts.network, recipe, whole)
    card = ExportCard(
        fedsweep=metadata.version("fedsweep"),
        form="whole" if whole else "peft",
        backbone=recipe,
        cut=dict(parts.cut),
        weights=config.backbone.fingerprint(),
        images=_image_card(config, model),
        left_out=parts.left_out,
        sha256={one.relative_to(folder).as_posix(): digest(one) for one in sorted(folder.rglob("*.safetensors"))},
        **_of_the_run(named, config, model, last, client),
    )
    write_atomically(folder / CARD, card.model_dump_json(indent=2).encode())
    write_atomically(folder / README, readme(card).encode())
    return card


def _of_the_run(
    named: Named, config: RunConfig, model: LayeredModel, last: RoundRecord, client: str | None
) -> dict[str, Any]:
    plan, outcome, backbone = named.record.plan, named.record.outcome, config.backbone
    sweep = named.sweep.manifest().id if named.sweep else None
    prompts = backbone.prompts(model.class_names) if isinstance(backbone, ClipBackbone | DigitsClip) else None
    return {
        "classes": model.class_names,
        "prompts": None if prompts is None else tuple(prompts),
        "method": config.method.name,
        "seed": config.seed,
        "origin": Origin(name=named.name, sweep=sweep, key=plan.key, arm=plan.arm, client=client, chosen=named.why),
        "outcome": outcome.outcome if outcome else "running",
        "round": last.round,
        "metrics": {  # all others belong to the global model or to all clients
            name: value for name, value in last.metrics.items() if not client or name == f"accuracy/client/{client}"
        },
        "hyperparameters": flat(config),
        "digests": dict(plan.digests),
    }


def _write_network(
    folder: Path, config: RunConfig, tensors: Mapping[str, Tensor], recipe: Recipe, whole: bool
) -> Recipe:
    """Write the backbone's tensors, and return the recipe that reads them from the folder."""
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    if not isinstance(config.backbone, ClipBackbone | DigitsClip):
        save_file(own, folder / (WHOLE if whole else BACKBONE), {"format": "pt"})
        return recipe.model_copy(update={"fetched": False})
    home, source = folder if whole else folder / FOLDER, config.backbone.folder()
    home.mkdir(exist_ok=True)
    for name in (CONFIG, PREPROCESSOR, *TOKENS):
        if (source / name).is_file():
            (home / name).write_bytes((source / name).read_bytes())
    save_file(own, home / WHOLE, {"format": "pt"})
    return recipe.model_copy(update={"fetched": False, "model": "." if whole else FOLDER})


def _image_card(config: RunConfig, model: LayeredModel) -> ImageCard:
    """Return the preprocessing: size and normalisation of the model, crop and interpolation of its training images."""
    cut: dict[str, Any] = {}
    if isinstance(config.data, PreparedData):
        prepared = read_card(store_folder(config.data.set, config.data.size))
        cut = {name: getattr(prepared, name) for name in ("crop_pct", "crop_mode", "interpolation")}
    mean, std = (tuple(one.flatten().tolist()) for one in (model.mean, model.std))
    return ImageCard(size=config.backbone.image_size, mean=mean, std=std, **cut)
