"""Functions that find, hash, read and load files with the weights of backbones."""

import hashlib
import importlib
import json
import re
import warnings
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.paths import data_folder, home, resolve

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
LARGEST_EXPANSION = 2
"""Largest size of the tensors in a file, as a multiple of the size of the file. Names can share stored values."""
_PRETRAINED = re.compile(r"(?:.*/)?backbones/([\w.-]+)\.safetensors")


def is_path(text: str) -> bool:
    """Return whether `text`, a value of `backbone.pretrained`, looks like the path of a file or folder."""
    return text.endswith(SUFFIXES) or "/" in text


def find(name: str, field: str = "backbone.pretrained") -> Path:
    """Return the path of the weights file `name`, or of `model.safetensors` in the folder `name`.

    Args:
        name: A path, absolute or relative to the working directory or the data folder.
        field: The name of the hyperparameter in error messages.

    Raises:
        UserError: The file does not exist, or its suffix is unknown.
    """
    try:
        path = resolve(name)
    except OSError as error:
        raise UserError(f"`{field}` {name} cannot be opened: {error.strerror}.") from None
    if path.is_dir():
        path = path / "model.safetensors"
        if not path.is_file():
            raise UserError(f"`{field}` {name} is a folder without a {path.name} ({path}).")
    if not path.is_file():
        bare = Path(name).expanduser()
        looked = " and ".join(str(one) for one in dict.fromkeys([home() / bare, data_folder() / bare]))
        made = _PRETRAINED.fullmatch(name)
        hint = f"; run `fedsweep pretrain {made[1]}` to create it" if made else ""
        raise UserError(f"`{field}` {name} does not exist (looked for {looked}){hint}.")
    if path.suffix not in SUFFIXES:
        raise UserError(f"`{field}` {name} must end in one of {', '.join(SUFFIXES)}.")
    return path


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's contents as a hexadecimal string.

    The value is cached until the size or the modification time of the file changes.
    """
    status = path.stat()
    return _digest(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _digest(path: Path, _mtime: int, _size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_card(path: Path) -> dict[str, Any]:
    """Return the contents of a weights file's JSON card, or an empty dictionary if the file has no card.

    The card of `NAME.safetensors` is `NAME.json` in the same folder.

    Raises:
        UserError: The card is malformed, or its `sha256` differs from the SHA-256 of the weights file.
    """
    beside = path.with_suffix(".json")
    if not beside.is_file():
        return {}
    try:
        said = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{beside} cannot be read as a card: {one_line(error)}.") from None
    if not isinstance(said, dict):
        raise UserError(f"{beside} must contain a JSON object, but it contains a value of type {type(said).__name__}.")
    if said.get("sha256") not in (None, digest(path)):
        raise UserError(
            f"{path} is not the file that its card {beside.name} describes: the SHA-256 of the file is {digest(path)}."
        )
    for name, least, kind in (("mean", -LARGEST, "finite numbers"), ("std", SMALLEST, "finite positive numbers")):
        values = said.get(name, [0.5])
        # JSON's NaN and true are not numbers here. A number that overflows float32 is not finite.
        are = isinstance(values, list) and all(type(one) in (int, float) and least <= one <= LARGEST for one in values)
        if not are or len(values) not in (1, 3):
            raise UserError(f"`{name}` of the card {beside} must be one or three {kind}, but it is {values}.")
    names = said.get("class_names", [])
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise UserError(f"`class_names` of the card {beside} must be a list of names, but it is {names}.")
    return said


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file, keyed by name; floats are converted to float32.

    If the file is a training checkpoint, only the tensors of the model are returned. If the checkpoint also contains a
    moving average (EMA) of the model's tensors, the moving average is returned instead.

    Raises:
        UserError: The file is broken, contains objects other than tensors, or would expand to far more bytes than it
            has. Objects other than tensors are never unpickled.
    """
    from timm.models import load_state_dict

    check_not_compressed(path)
    try:
        state = load_state_dict(str(path), weights_only=True)
        other = [name for name, value in state.items() if not isinstance(value, Tensor)]
    except (AttributeError, TypeError):  # the file contains a list or a single tensor
        raise UserError(f"{path} cannot be read as weights: it does not map names to tensors.") from None
    except Exception as error:  # safetensors, pickle, zip and timm raise different classes
        raise UserError(f"{path} cannot be read as weights: {reason(error)}.") from error
    if other:
        raise UserError(f"{path} cannot be read as weights: its `{other[0]}` is not a tensor.")
    # Before the conversion to float32, which would give memory to values that the file repeats but does not store.
    _check_size(path, sum(tensor.numel() * tensor.element_size() for tensor in state.values()), LARGEST_EXPANSION)
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def check_not_compressed(path: Path) -> None:
    """Raise UserError if a torch file declares to contain more bytes than it has, before any of it is unpacked."""
    _check_size(path, _unpacked_bytes(path), 1)


def _unpacked_bytes(path: Path) -> int:
    """Return the number of bytes that a torch file declares to contain; 0 for files that are not zip archives.

    torch stores tensors without compression, so this number is smaller than the size of the file.
    """
    if not zipfile.is_zipfile(path):
        return 0
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile):  # torch reports what is wrong with the file
        return 0


def _check_size(path: Path, declared: int, times: int) -> None:
    size = path.stat().st_size
    if declared > times * size:
        raise UserError(
            f"{path} cannot be read as weights: its tensors must take at most {'twice ' * (times > 1)}the size of the "
            f"file, {size:,} bytes, but they would take {declared:,} bytes."
        )


def load(backbone: nn.Module, path: Path, head: str, keep_head: bool) -> bool:
    """Copy the weights from a file into a timm model.

    timm's own functions fit the tensors to the model: position embeddings and patch embeddings are resampled if their
    size differs. For a model with one input channel, the weights of the three colour channels are summed.

    Args:
        backbone: The timm model, which has a new, untrained head.
        path: The weights file.
        head: The prefix of the names of the head's tensors.
        keep_head: Whether the head in the file may be used. The model keeps its untrained head if this is false, if the
            file has no head, or if the head in the file has a different number of classes.

    Returns:
        Whether the head in the file was used.

    Raises:
        UserError: A tensor is missing, unknown or of another shape.
    """
    from timm.models import adapt_input_conv

    own, found = backbone.state_dict(), read(path)
    adapt = importlib.import_module(type(backbone).__module__).checkpoint_filter_fn
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of timm's resampling of BEiT's relative positions
            state: dict[str, Tensor] = adapt(dict(found), backbone)
        stem = next(name for name in own if name.endswith("proj.weight") and own[name].ndim == 4)
        if stem in state and (state[stem].shape[1], own[stem].shape[1]) == (3, 1):
            state[stem] = adapt_input_conv(1, state[stem])
    except Exception as error:  # resampling a tensor of an unexpected shape may raise anything
        _check(found, own, path)
        raise UserError(f"{path} does not fit the model: {reason(error)}.") from error
    fresh = {name: tensor for name, tensor in own.items() if name.startswith(head)}
    heads = [name for name in fresh if name in state]
    others = any(state[name].ndim > 0 and len(state[name]) != len(fresh[name]) for name in heads)
    kept = keep_head and bool(heads) and not others
    if not kept:
        state = {name: tensor for name, tensor in state.items() if not name.startswith(head)} | fresh
    _check(state, own, path)
    backbone.load_state_dict(state)
    return kept


def load_without(network: nn.Module, path: Path, head: str) -> None:
    """Copy the weights from a file into a network without a head.

    Tensors in the file whose names begin with `head` are ignored.

    Raises:
        UserError: A tensor is missing, unknown or of another shape.
    """
    own = network.state_dict()
    state = {name: one for name, one in own.items() if name.endswith("num_batches_tracked")}  # unused counters
    state |= {name: tensor for name, tensor in read(path).items() if not name.startswith(head)}
    _check(state, own, path)
    network.load_state_dict(state)


def _check(state: Mapping[str, Tensor], own: Mapping[str, Tensor], path: Path) -> None:
    for name, expected in own.items():
        found, problem = state.get(name, expected), ""
        if expected.is_floating_point() and not found.is_floating_point():
            was, now = (str(one.dtype).removeprefix("torch.") for one in (found, expected))
            problem = f"has dtype {was} in the file, but {now}"
        elif found.shape != expected.shape:
            problem = f"has shape {tuple(found.shape)} in the file, but {tuple(expected.shape)}"
        if problem:
            raise UserError(f"{path} does not fit the model: `{name}` {problem} in the model.")
    for names, has, end in (
        (own.keys() - state.keys(), "lacks", ""),
        (state.keys() - own.keys(), "has", ", but the model does not"),
    ):
        if names:
            first, *more = sorted(names)
            rest = f" and {len(more)} more" if more else ""
            raise UserError(f"{path} does not fit the model: the file {has} `{first}`{rest}{end}.")


def reason(error: Exception) -> str:
    """Return the reason why weights could not be loaded, as one sentence for an error message.

    The sentence is usually the first sentence of the message of `error`. torch's advice on how to load the file anyway
    is left out, because users who follow it could execute malicious code in a pickled file.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UnpicklingError):
            return "it contains objects other than tensors, which fedsweep does not unpickle"
        cause = cause.__cause__ or cause.__context__
    return one_line(error).split(". ")[0]
