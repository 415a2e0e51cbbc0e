"""What a pre-training leaves behind: weights under timm's own names, and their card."""

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes

from fedsweep.pretraining.loop import Session, validate
from fedsweep.pretraining.network import build_network
from fedsweep.pretraining.start import card_of
from fedsweep.pretraining.state import EpochRecord, TrainingState, read_saved
from fedsweep.results.checkpoint import write_atomically


def write_result(session: Session, name: str, out: Path) -> dict[str, Any]:
    """Write the weights of the last checkpoint and `<out>.json`, then delete the checkpoint. Returns the card.

    The card comes last of the two, and its accuracy is that of the weights as they are in the file.
    """
    config, data = session.config, session.data
    network = build_network(config, len(data.class_names)).to(session.device)
    state = TrainingState.fresh(network, config)
    saved = read_saved(session.checkpoint)
    state.restore(saved.tensors)
    dtype = getattr(torch, config.weights)
    weights = {key: tensor.to(dtype) for key, tensor in state.result.backbone.state_dict().items()}
    state.result.backbone.load_state_dict({key: tensor.float() for key, tensor in weights.items()})
    accuracy, loss = validate(session, state.result, data.validation)
    content = to_bytes({key: tensor.cpu().contiguous() for key, tensor in weights.items()})
    write_atomically(out, content)
    card = {
        "what": _what(session),
        "origin": f"trained from scratch on {config.data.set} ({', '.join(config.data.domains)}) "
        f"by `fedsweep pretrain {name}`",
        "data_digest": data.digest,
        "class_names": list(data.class_names),
        "images": len(data.train),
        "validation_images": len(data.validation),
        "recipe": config.model_dump(mode="json"),
        "mean": network.mean.flatten().tolist(),
        "std": network.std.flatten().tolist(),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "validation_accuracy": round(accuracy, 4),
        "validation_loss": round(loss, 4),
        "seconds": round(_seconds(saved.history)),
        "device": session.device.type,
        "threads": session.threads,
        "versions": {package: version(package) for package in ("torch", "timm")},
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    write_atomically(card_of(out), (json.dumps(card, indent=2) + "\n").encode())
    session.checkpoint.unlink()
    return card


def _what(session: Session) -> str:
    backbone, classes = session.config.backbone, len(session.data.class_names)
    name = getattr(backbone, "model", backbone.name)
    return (
        f"{name} of {backbone.depth} blocks and width {backbone.width} at {backbone.image_size} px, {classes} classes"
    )


def _seconds(history: Sequence[EpochRecord]) -> float:
    return sum(record.seconds for record in history)
