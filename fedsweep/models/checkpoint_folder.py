"""A checkpoint in transformers' layout: a folder of the user's, or the hub's cache, downloaded into it once."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.paths import resolve
from fedsweep.models import weights_file

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENS = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SECONDS = 10.0
"""How long to wait for an answer of the hub."""


def is_folder(model: str) -> bool:
    """Whether it names a folder of the user's, relative to the working directory or to the data folder."""
    return resolve(model).is_dir()


def find(model: str) -> Path:
    """The folder with the checkpoint's files.

    Raises:
        UserError: it is neither a folder with them, nor in the hub's cache, nor can it be downloaded.
    """
    folder = resolve(model) if is_folder(model) else _from_hub(model)
    if lacking := _lacking(folder):
        raise UserError(f"`backbone.model` {model} is a folder without {lacking} ({folder}).")
    return folder


def _lacking(folder: Path) -> str:
    """What a checkpoint's folder has not."""
    for name in (CONFIG, PREPROCESSOR, *(() if (folder / "tokenizer.json").is_file() else TOKENS[:2])):
        if not (folder / name).is_file():
            return str(name)
    return "" if any((folder / name).is_file() for name in WEIGHTS) else " or ".join(WEIGHTS)


def digest(folder: Path) -> str:
    """SHA-256 over the files that decide what the model computes, by name and content."""
    weights = next(folder / name for name in WEIGHTS if (folder / name).is_file())
    found = hashlib.sha256()
    for path in (folder / CONFIG, folder / PREPROCESSOR, *(folder / name for name in TOKENS), weights):
        if path.is_file():
            found.update(f"{path.name}\0{weights_file.digest(path)}\0".encode())
    return found.hexdigest()


def _from_hub(model: str) -> Path:
    """The snapshot in the cache, complete; else one attempt to download it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    wanted = [CONFIG, PREPROCESSOR, *WEIGHTS[:1], *TOKENS]
    try:
        folder = Path(snapshot_download(model, allow_patterns=wanted, local_files_only=True))
        if not _lacking(folder):
            return folder
    except HFValidationError:
        raise UserError(f"`backbone.model` {model} is neither a folder nor the name of a model on the hub.") from None
    except LocalEntryNotFoundError:
        pass
    try:
        # Without this question first, the download would repeat itself for half a minute where there is no network.
        get_hf_file_metadata(hf_hub_url(model, CONFIG), timeout=SECONDS)
        folder = Path(snapshot_download(model, allow_patterns=wanted))
        if not (folder / WEIGHTS[0]).is_file():
            folder = Path(snapshot_download(model, allow_patterns=[*wanted, *WEIGHTS]))
        return folder
    except Exception as error:  # the hub's library does not keep to one family of exceptions
        raise UserError(
            f"`backbone.model` {model} is neither a folder nor in the hub's cache and cannot be downloaded "
            f"({type(error).__name__}: {one_line(error)}); load it once where there is a network."
        ) from error
