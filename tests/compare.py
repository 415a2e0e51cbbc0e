"""Functions that compare values bit by bit, from `fedsweep.testing`."""

from fedsweep.testing.compare import (
    assert_close,
    copied,
    frozen,
    identical,
    identical_rounds,
    memory,
    moved,
    tensors_in,
    unkept,
)

__all__ = [
    "assert_close",
    "copied",
    "frozen",
    "identical",
    "identical_rounds",
    "memory",
    "moved",
    "tensors_in",
    "unkept",
]
