"""Imports of large packages in less time."""

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Import modules within the block without Python's garbage collector.

    PyTorch, timm and PEFT create more than 100,000 objects that exist until the process ends. The collector would look
    at them again and again, which takes a fifth of the time of the imports. After the block, it ignores all objects
    that exist by then, unless the block has imported nothing new. It never frees those that are already garbage, so the
    block should do little else.
    """
    enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
            atexit.unregister(gc.unfreeze)
            atexit.register(gc.unfreeze)  # otherwise, extension modules report leaks when the process ends
        if enabled:
            gc.enable()
