"""Checkpoints, which store the state and history of a run in the safetensors format.

A checkpoint contains neither the backbone nor pickled objects.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.files import write_atomically
from fedsweep.results.history import History, RoundRecord, from_json, to_json
from fedsweep.types import ServerState

FIRST_BYTES = 256 * 1024
"""Size of the first request for a remote checkpoint. It usually covers the history, so no tensor is downloaded."""

LONGEST_HEADER = 100_000_000
"""The longest header in bytes that the safetensors format allows."""


@dataclass(frozen=True)
class Checkpoint:
    """The state and history from which a run can continue after `round`."""

    round: int
    state: ServerState
    history: tuple[RoundRecord, ...]
    right: Mapping[int, Any] = field(default_factory=dict)
    """The packed bits (`packed_bits`) of the correctly predicted test images, tensors uint8 (bytes,), keyed by round.

    The rounds are the completed ones among the last rounds of the run, if `evaluation.last_rounds` is set.
    """


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically."""
    from safetensors.torch import save as to_bytes

    tensors, state = dict[str, Any](), checkpoint.state
    tree = {field.name: _pack(getattr(state, field.name), f"state/{field.name}", tensors) for field in fields(state)}
    metadata = {"round": str(checkpoint.round), "state": json.dumps(tree), "history": to_json(checkpoint.history)}
    if checkpoint.right:
        metadata["right"] = json.dumps(_pack(dict(checkpoint.right), "right", tensors))
    write_atomically(path, to_bytes(tensors, metadata))


def load(path: Path, like: ServerState, device: str = "cpu") -> Checkpoint:
    """Read a checkpoint and move its tensors to a device.

    `like` is any server state of the same method. Only its class is used: the loaded state is an object of this class.

    Raises:
        UserError: The file is damaged, for example because it is an incomplete copy.
    """
    from safetensors import safe_open

    with _readable(path), safe_open(path, framework="pt", device=device) as file:
        metadata = file.metadata()
        tree = json.loads(metadata["state"])
        state = type(like)(**{name: _unpack(node, file.get_tensor) for name, node in tree.items()})
        right = _unpack(json.loads(metadata["right"]), file.get_tensor) if "right" in metadata else {}
        return Checkpoint(int(metadata["round"]), state, tuple(from_json(metadata["history"])), right)


def load_history(path: Path) -> History:
    """Read only the history of a checkpoint, without importing torch.

    Raises:
        UserError: The file is damaged, for example because it is an incomplete copy.
    """
    from safetensors import safe_open

    with _readable(path), safe_open(path, framework="numpy") as file:
        return from_json(file.metadata()["history"])


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise UserError if the block cannot read the checkpoint, because the file or its metadata is damaged."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or an incomplete copy: {one_line(error)}.") from None
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        problem = f"its metadata are not those of a checkpoint ({type(error).__name__}: {one_line(error)})"
        raise UserError(f"{path} is damaged or an incomplete copy: {problem}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or one_line(error)}.") from None


def without_tensors(file: BinaryIO) -> bytes:
    """Return a copy of a checkpoint file that contains the complete history but no tensors.

    If the file is replaced during the call, the copy is made from either the old or the new version. Of a damaged file,
    the beginning is returned, which `load_history` rejects.
    """
    from safetensors.numpy import save as to_bytes

    size = FIRST_BYTES
    for _ in range(2):  # in a single read, because two reads may return parts of different checkpoints
        file.seek(0)
        start = file.read(size)
        header = int.from_bytes(start[:8], "little")
        if header > LONGEST_HEADER or 8 + header > len(start) < size:  # too long, or the file ends in it
            return start
        if 8 + header <= len(start):
            try:
                return to_bytes({}, json.loads(start[8 : 8 + header])["__metadata__"])
            except (KeyError, RecursionError, TypeError, ValueError):
                return start[: 8 + header]
        size = 8 + header + FIRST_BYTES  # with reserve, because the header may have grown by the next read
    raise OSError("a checkpoint changes faster than it can be read")


def _pack(node: Any, path: str, tensors: dict[str, Any]) -> Any:
    """Convert `node`, which is part of a server state, to JSON values, and copy its tensors to `tensors`.

    `path` is the path of `node` in the state. Each tensor is copied to `tensors` under the tensor's own path in the
    state.
    """
    if hasattr(node, "numel"):
        path = path if path not in tensors else f"{path}#{len(tensors)}"
        tensors[path] = node.detach().cpu().contiguous().clone()
        return {"tensor": path}
    if isinstance(node, dict) and all(isinstance(key, str | int) for key in node):
        return {"dict": [[key, _pack(value, f"{path}/{key}", tensors)] for key, value in node.items()]}
    if isinstance(node, tuple):
        return {"tuple": [_pack(value, f"{path}/{index}", tensors) for index, value in enumerate(node)]}
    if node is None or isinstance(node, bool | int | float | str):
        return {"value": node}
    kinds = "tensors, tuples, dicts with keys of type str or int, numbers, strings, booleans and None"
    raise TypeError(f"a server state may contain only {kinds}, but {path} is of type {type(node).__name__}")


def _unpack(node: dict[str, Any], fill: Callable[[str], Any]) -> Any:
    [(kind, content)] = node.items()
    if kind == "tensor":
        return fill(content)
    if kind == "dict":
        return {key: _unpack(value, fill) for key, value in content}
    if kind == "tuple":
        return tuple(_unpack(value, fill) for value in content)
    if kind == "value":
        return content
    raise ValueError(f"not a packed state: {node}")
