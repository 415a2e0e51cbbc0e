"""Checkpoints in transformers' layout: the user's folders, and the hub's cache, into which they are downloaded once."""

import hashlib
from pathlib import Path

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.paths import resolve
from fedsweep.models import weights_file

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENS = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SECONDS = 10.0
"""Timeout for an answer of the hub."""


def is_folder(model: str) -> bool:
    """Return whether `model` is an existing folder, relative to the working directory or to the data folder."""
    return resolve(model).is_dir()


def find(model: str) -> Path:
    """Return the folder with the checkpoint's files, downloaded if need be; raise UserError if it cannot be had."""
    folder = resolve(model) if is_folder(model) else _from_hub(model)
    if lacking := _lacking(folder):
        raise UserError(f"`backbone.model` {model} is a folder without {lacking} ({folder}).")
    return folder


def _lacking(folder: Path) -> str:
    for name in (CONFIG, PREPROCESSOR, *(() if (folder / "tokenizer.json").is_file() else TOKENS[:2])):
        if not (folder / name).is_file():
            return str(name)
    return "" if any((folder / name).is_file() for name in WEIGHTS) else " or ".join(WEIGHTS)


def digest(folder: Path) -> str:
    """Return the SHA-256 over the names and contents of all files that determine the model's output."""
    weights = next(folder / name for name in WEIGHTS if (folder / name).is_file())
    found = hashlib.sha256()
    for path in (folder / CONFIG, folder / PREPROCESSOR, *(folder / name for name in TOKENS), weights):
        if path.is_file():
            found.update(f"{path.name}\0{weights_file.digest(path)}\0".encode())
    return found.hexdigest()


def _from_hub(model: str) -> Path:
    """Return the cached snapshot if it is complete; else try once to download it."""
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
        if (folder / WEIGHTS[0]).is_file():
            return folder
        return Path(snapshot_download(model, allow_patterns=[*wanted, *WEIGHTS]))
    except Exception as error:  # the hub's library does not keep to one family of exceptions
        raise UserError(
            f"`backbone.model` {model} is neither a folder nor in the hub's cache and cannot be downloaded "
            f"({type(error).__name__}: {one_line(error)}); load it once where there is a network."
        ) from error
