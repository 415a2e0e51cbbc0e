"""Start and resumption of a pre-training, and the weights and card that it writes."""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes

from fedsweep.common.errors import UserError
from fedsweep.common.files import locked, write_atomically
from fedsweep.common.paths import data_folder
from fedsweep.pretraining.config import PretrainConfig
from fedsweep.pretraining.loop import Session, load_images, validate
from fedsweep.pretraining.network import Saved, TrainingState, build_network, check_same, read_saved


def default_out(name: str) -> Path:
    """Return the default path of a pre-training's weights: `<data folder>/backbones/<name>.safetensors`."""
    return data_folder() / "backbones" / f"{name}.safetensors"


def checkpoint_path(out: Path) -> Path:
    """Return the path of the checkpoint during the training of the weights `out`."""
    return out.with_suffix(".checkpoint.safetensors")


def start(
    config: PretrainConfig, out: Path, device: str = "cpu", threads: int | None = None, resume: bool = False
) -> tuple[Session, Saved | None]:
    """Return the session and the checkpoint to continue from, or raise UserError if they do not fit together.

    UserError is also raised if `out` cannot be written. The default of `threads` is that of the checkpoint, or 1.
    """
    checkpoint = checkpoint_path(out)
    _check_out(out, checkpoint, resume)
    data = load_images(config)
    build_network(config, len(data.class_names))
    saved = None
    if resume:
        saved = read_saved(checkpoint)
        check_same(saved, checkpoint, config, data.digest)
    threads = threads or (saved.threads if saved else 1)
    return Session(config, data, checkpoint, torch.device(device), threads), saved


@contextmanager
def exclusively(out: Path) -> Iterator[None]:
    """Hold the lock on `out` during the context, or raise UserError if another process is training these weights."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out.with_name(f".{out.name}.lock"), f"another `fedsweep pretrain` is making {out} now."):
        yield


def _check_out(out: Path, checkpoint: Path, resume: bool) -> None:
    """Raise UserError if `out` cannot be written, would replace a result, or does not fit `resume`."""
    if out.suffix != ".safetensors":
        raise UserError(f"`--out` must end in .safetensors, but it is {out}.")
    if resume and not checkpoint.exists():
        finished = f", and {out} is finished" if out.exists() else ""
        raise UserError(f"`--resume` needs {checkpoint}, which is not there{finished}.")
    if not resume and checkpoint.exists():
        saved = read_saved(checkpoint)
        raise UserError(
            f"{checkpoint} holds {len(saved.history)} of {saved.config['epochs']} epochs: "
            "`--resume` goes on with them, deleting the file starts anew."
        )
    for path in (out, out.with_suffix(".json")):
        if not resume and path.exists():
            raise UserError(f"{path} is there already; delete it, or name another file with `--out`.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}.") from None


def write_result(session: Session, name: str, out: Path) -> dict[str, Any]:
    """Write the weights of the last checkpoint, then their card `<out>.json`; delete the checkpoint, return the card.

    The card has the accuracy of the weights as stored in the file.
    """
    config, data, backbone = session.config, session.data, session.config.backbone
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
        "what": f"{getattr(backbone, 'model', backbone.name)} of {backbone.depth} blocks and width {backbone.width} "
        f"at {backbone.image_size} px, {len(data.class_names)} classes",
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
        "seconds": round(sum(record.seconds for record in saved.history)),
        "device": session.device.type,
        "threads": session.threads,
        "versions": {package: version(package) for package in ("torch", "timm")},
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    write_atomically(out.with_suffix(".json"), (json.dumps(card, indent=2) + "\n").encode())
    session.checkpoint.unlink()
    return card
