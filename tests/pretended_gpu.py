"""A pretended accelerator, which checks the device placement of real computations on a machine without a GPU.

Within `PretendedGPU`, the device `meta` stands for a GPU: a tensor on it is a `DeviceTensor`, whose values are in a
tensor on the CPU. Values, random numbers and gradients are therefore those of the CPU. An operation with tensors on
both devices raises the error that CUDA would raise, and each operation for which CUDA makes the host wait is recorded.
`is_cuda` of a `DeviceTensor` is false, so code that tests it takes the path for the CPU.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("meta")
"""The only device besides the CPU for which autograd needs no driver."""
CPU = torch.device("cpu")
aten = torch.ops.aten
COPIES = (aten.copy_, aten._foreach_copy_)
INDEXING = (aten.index, aten.index_put, aten.index_put_)
READS = (
    *(aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave),
)
"""Operations whose result, or the size of whose result, the host reads from the GPU."""


class DeviceTensor(Tensor):
    """A tensor on the pretended GPU; `host` is the tensor on the CPU that holds its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> Self:
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype, "device": GPU}
        with torch.inference_mode(False):  # a view of a tensor from outside inference mode must have a version
            made: Self = torch.Tensor._make_wrapper_subclass(cls, host.size(), **layout)  # type: ignore[attr-defined]
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise an error, because only `PretendedGPU` runs operations on these tensors."""
        raise RuntimeError(f"{func} is used outside the pretended GPU")

    def tolist(self) -> Any:
        """Copy the tensor to the CPU, and return its values; torch's own function is not for subclasses."""
        return self.cpu().tolist()


class PretendedGPU(TorchDispatchMode):
    """A context in which the device `meta` computes on the CPU; `waits` lists the operations for which a host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the devices of an operation's tensors, and run the operation on the CPU."""
        kwargs = dict(kwargs or {})
        placed: dict[int, DeviceTensor] = {}
        hosts: list[Tensor] = []

        def on_host(value: Any) -> Any:
            if isinstance(value, DeviceTensor):
                placed[id(value.host)] = value
                return value.host
            if isinstance(value, Tensor):
                hosts.append(value)
            return [on_host(one) for one in value] if isinstance(value, list | tuple) else value

        packet, given = func.overloadpacket, [on_host(one) for one in args]
        options = {name: on_host(value) for name, value in kwargs.items()}
        onto = bool(placed)
        if options.get("device") is not None:
            onto, options["device"] = torch.device(options["device"]) == GPU, CPU
        if placed and hosts:
            _check(packet, args, hosts)
        if onto or placed:
            self._record(packet, args, kwargs, hosts, onto)
        out = func(*given, **options)

        def on_gpu(value: Any) -> Any:
            if isinstance(value, Tensor):
                return placed[id(value)] if id(value) in placed else DeviceTensor(value)
            return type(value)(map(on_gpu, value)) if isinstance(value, list | tuple) else value

        return on_gpu(out) if onto else out

    def _record(self, packet: Any, args: Any, kwargs: Any, hosts: Sequence[Tensor], onto: bool) -> None:
        moved = packet is aten._to_copy and onto != isinstance(args[0], DeviceTensor)
        copied = packet in COPIES and hosts
        masks = packet in INDEXING and any(one is not None and one.dtype == torch.bool for one in args[1])
        blocking = not (onto and (kwargs.get("non_blocking") or (packet in COPIES and args[2:] == (True,))))
        if packet in READS or masks or ((moved or copied) and blocking):
            self.waits.append(str(packet))


def _check(packet: Any, args: Any, hosts: Sequence[Tensor]) -> None:
    """Raise RuntimeError if an operation with tensors on the GPU may not have the tensors `hosts` on the CPU.

    As in CUDA, tensors without dimensions may be on the CPU, and so may the source or the target of a copy, and the
    indices of a tensor on the GPU.
    """
    if packet in COPIES or (packet in INDEXING and isinstance(args[0], DeviceTensor)):
        return
    if large := [tuple(one.shape) for one in hosts if one.ndim]:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {packet} got tensors of shapes {large} on the CPU"
        )
