"""Everything that can be wrong with a pre-training is told before it starts."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fedsweep.common.errors import UserError
from fedsweep.common.files import held
from fedsweep.common.paths import data_folder
from fedsweep.pretraining.config import PretrainConfig
from fedsweep.pretraining.images import load_images
from fedsweep.pretraining.loop import Session
from fedsweep.pretraining.network import build_network
from fedsweep.pretraining.state import Saved, check_same, read_saved


def default_out(name: str) -> Path:
    """Where the weights of a pre-training go: `<data folder>/backbones/<name>.safetensors`."""
    return data_folder() / "backbones" / f"{name}.safetensors"


def card_of(out: Path) -> Path:
    """The card of the weights `out`, beside them."""
    return out.with_suffix(".json")


def checkpoint_of(out: Path) -> Path:
    """The checkpoint while the weights `out` are in the making, beside them."""
    return out.with_suffix(".checkpoint.safetensors")


def start(
    config: PretrainConfig, out: Path, device: str = "cpu", threads: int | None = None, resume: bool = False
) -> tuple[Session, Saved | None]:
    """Check everything, and read the checkpoint to go on from.

    Without `threads`, it is the number that the checkpoint was made with, or one.

    Raises:
        UserError: data, network or checkpoint do not fit, or `out` cannot be written.
    """
    checkpoint = checkpoint_of(out)
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
def alone(out: Path) -> Iterator[None]:
    """Hold the lock of weights in the making, from before `start` to their end: two would share one checkpoint.

    Raises:
        UserError: another process holds it.
        OSError: the folder cannot be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with held(out.with_name(f".{out.name}.lock"), f"another `fedsweep pretrain` is making {out} now."):
        yield


def _check_out(out: Path, checkpoint: Path, resume: bool) -> None:
    """Refuse a place that cannot be written, and one where there is something that took hours to make."""
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
    for path in (out, card_of(out)):
        if not resume and path.exists():
            raise UserError(f"{path} is there already; delete it, or name another file with `--out`.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=out.parent)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}.") from None
    os.close(descriptor)
    os.unlink(temporary)
