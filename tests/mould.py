"""Copies of a model that are ten times faster than `copy.deepcopy`, because small objects are pickled only once."""

import io
import pickle
from typing import Any

import torch
from torch import nn


class _Pickler(pickle.Pickler):
    """A pickler that stores references to tensors instead of their content."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, torch.Tensor] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self.tensors.setdefault(id(obj), obj)
        return id(obj)


class _Unpickler(pickle.Unpickler):
    """An unpickler that copies each tensor once, so that parameters stay parameters and shared tensors stay shared."""

    def __init__(self, pickled: bytes, tensors: dict[int, torch.Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self.persistent_load = {key: one.__deepcopy__({}) for key, one in tensors.items()}.__getitem__


class Mould:
    """A snapshot of a module, from which any number of copies can be made."""

    def __init__(self, module: nn.Module) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(module)
        self._pickled, self._tensors = file.getvalue(), pickler.tensors

    def cast(self) -> Any:
        """Return a copy that shares no memory with the module or with other copies."""
        return _Unpickler(self._pickled, self._tensors).load()
