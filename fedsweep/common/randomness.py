"""Random streams derived from (seed, purpose, key), the only source of randomness.

An arm is never part of a key (``stream(seed, "batches", round, client)``), so that arms with the same seed have the
same split, cohort, batch order and initial adapter (common random numbers).
"""

import hashlib

import numpy as np


def derived_seed(seed: int, purpose: str, *key: int | str) -> int:
    """Return a 63-bit seed that depends on every argument, the same on every machine and Python version."""
    text = "\x1f".join([str(seed), purpose, *(f"{type(part).__name__}:{part}" for part in key)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def stream(seed: int, purpose: str, *key: int | str) -> np.random.Generator:
    """Return an independent NumPy generator.

    >>> stream(0, "cohort", 3).integers(1000, size=3).tolist()
    [745, 622, 895]
    """
    return np.random.Generator(np.random.PCG64(derived_seed(seed, purpose, *key)))
