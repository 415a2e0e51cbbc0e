"""The arithmetic of a run's matrix products."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["float32", "tf32", "bfloat16"]


@contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Compute matrix products in the given precision until the `with` statement ends.

    Args:
        precision: `float32` rounds each product to 24 bits. `tf32` rounds the factors to 11 bits on GPUs that can
            multiply them faster, and is the same as `float32` on other devices. `bfloat16` rounds factors and products
            to 8 bits with torch's autocast. Trained tensors, losses and averages stay in float32. Autocast keeps no
            rounded copies, because they would not follow the steps of the optimizer.
        device: The device of the model.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"  # convolutions; torch's default is true
    try:
        if precision == "bfloat16":
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                yield
        else:
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
