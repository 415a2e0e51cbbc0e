"""A meter of the memory and the FLOPs of a step on torch's meta device, where tensors have shapes but no values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class StepMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts FLOPs, and the bytes of all tensors on the meta device that operations created and that exist.

    Views and changes in place take no memory of their own. Tensors that existed before the mode began are not counted.
    Memory that a single operation allocates and frees again, such as the work space of a matrix product, is not seen.
    The FLOPs are those of torch's `FlopCounterMode`, whose formulas cover matrix products, convolutions and attention.

    Attributes:
        live: The number of bytes that exist now.
        peak: The largest value of `live` since the last call of `forget_peak`.
        flops: The number of FLOPs so far; a multiplication and an addition are two FLOPs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.flops = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def forget_peak(self) -> None:
        """Set the peak to the number of bytes that exist now."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count its FLOPs and the tensors that it returns."""
        for tensor in _meta_tensors((args, kwargs)):
            self._count(tensor, created=False)
        result = _result(func, args, kwargs or {})
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        for tensor in _meta_tensors(result):
            self._count(tensor, created=True)
        return result

    def _count(self, tensor: Tensor, created: bool) -> None:
        """Count the memory of a tensor once; count no bytes if the tensor existed before the mode began."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes() if created else 0
        if key in self._known:
            return

        def freed(_: object) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]
_RESULTS: dict[Any, list[Shape] | Shape | None] = {}
"""The shapes, strides and types of the results of operations on the meta device, keyed by operation and arguments.

The blocks of a model are alike, and torch takes longer to derive the shapes of a result than to create the result.
"""


def _result(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation; its shapes are derived only once for equal arguments."""
    if not _creates(func):
        return func(*args, **kwargs)
    try:
        key = func, _described(args), _described(tuple(kwargs.items()))
        known = _RESULTS.get(key)
    except TypeError:  # an argument cannot be part of a key
        return func(*args, **kwargs)
    if known is not None:
        return [_created(one) for one in known] if isinstance(known, list) else _created(known)
    result = func(*args, **kwargs)
    single = isinstance(result, Tensor)
    tensors = [result] if single else result
    if all(isinstance(one, Tensor) and one.is_meta for one in tensors):
        shapes: list[Shape] = [(one.shape, one.stride(), one.dtype) for one in tensors]
        sizes = [_created(one).untyped_storage().nbytes() for one in shapes]
        if sizes == [one.untyped_storage().nbytes() for one in tensors]:
            _RESULTS[key] = shapes[0] if single else shapes
    return result


@cache
def _creates(func: Any) -> bool:
    """Return whether an operation returns only new tensors: neither views nor its changed arguments."""
    schema = func._schema
    return bool(schema.returns) and all(one.alias_info is None for one in (*schema.arguments, *schema.returns))


def _created(shape: Shape) -> Tensor:
    size, stride, dtype = shape
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _described(value: Any) -> Any:
    """Return a hashable description of an argument, in which a tensor is described by its shape."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return (type(value), *map(_described, value)) if isinstance(value, list | tuple) else (type(value), value)


def _meta_tensors(values: Any) -> Iterator[Tensor]:
    """Yield all tensors on the meta device in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        if values.is_meta:
            yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _meta_tensors(value)
    elif isinstance(values, dict):
        yield from _meta_tensors(tuple(values.values()))


class FusedAttention(TorchFunctionMode):
    """A mode in which attention on the meta device uses the same kind of kernel as on a CPU or a GPU.

    Such a kernel keeps no matrix of attention weights; its backward pass computes the weights again. Without this mode,
    torch would select the kernel of last resort, which keeps the matrix. That kernel remains in use if attention has
    dropout or a trained mask, as on a CPU.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, or the fused kernel if `func` is `scaled_dot_product_attention`."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attention(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    trained_mask = attn_mask is not None and attn_mask.requires_grad
    if query.ndim != 4 or dropout_p or trained_mask or enable_gqa or not query.is_meta:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return result
