"""Checkpoint folders in transformers' layout, either local or downloaded from the Hugging Face Hub."""

import hashlib
from pathlib import Path

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.paths import resolve
from fedsweep.models import weights_file

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENS = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SECONDS = 10.0
"""The timeout of a request to the Hugging Face Hub, in seconds."""


def is_folder(model: str) -> bool:
    """Return whether `model` is an existing folder.

    A relative path is looked up in the working directory, then in the data folder.
    """
    return resolve(model).is_dir()


def find(model: str) -> Path:
    """Return the local folder of a checkpoint; download the checkpoint from the Hugging Face Hub if necessary.

    Args:
        model: A folder, or the name of a checkpoint on the Hugging Face Hub.

    Raises:
        UserError: The folder lacks a required file, or the checkpoint can be neither found nor downloaded.
    """
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
    """Return the SHA-256 of the names and contents of all files in `folder` that determine the model's output."""
    weights = next(folder / name for name in WEIGHTS if (folder / name).is_file())
    found = hashlib.sha256()
    for path in (folder / CONFIG, folder / PREPROCESSOR, *(folder / name for name in TOKENS), weights):
        if path.is_file():
            found.update(f"{path.name}\0{weights_file.digest(path)}\0".encode())
    return found.hexdigest()


def _from_hub(model: str) -> Path:
    """Return a checkpoint's folder in Hugging Face's local cache; download the checkpoint if files are missing."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    wanted = [CONFIG, PREPROCESSOR, *WEIGHTS[:1], *TOKENS]
    try:
        folder = Path(snapshot_download(model, allow_patterns=wanted, local_files_only=True))
        if not _lacking(folder):
            return folder
    except HFValidationError:
        raise UserError(
            f"`backbone.model` {model} is neither a folder nor a valid name on the Hugging Face Hub."
        ) from None
    except LocalEntryNotFoundError:
        pass
    try:
        # This request fails at once without a network, whereas the download would retry for half a minute.
        get_hf_file_metadata(hf_hub_url(model, CONFIG), timeout=SECONDS)
        folder = Path(snapshot_download(model, allow_patterns=wanted))
        if (folder / WEIGHTS[0]).is_file():
            return folder
        return Path(snapshot_download(model, allow_patterns=[*wanted, *WEIGHTS]))
    except Exception as error:  # huggingface_hub raises exceptions without a common base class
        raise UserError(
            f"`backbone.model` {model} is neither a folder nor in Hugging Face's cache and cannot be downloaded "
            f"({type(error).__name__}: {one_line(error)}); load it once with network access."
        ) from error
