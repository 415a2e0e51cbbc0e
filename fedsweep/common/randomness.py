"""Random streams derived from a seed, a purpose and a key. All random numbers of a run come from this module.

A key, as in ``stream(seed, "batches", round, client)``, never contains the arm. Arms with the same seed therefore have
the same split, cohort, batch order and initial adapter (common random numbers).
"""

import hashlib

import numpy as np


def derived_seed(seed: int, purpose: str, *key: int | str) -> int:
    """Return a 63-bit seed derived from all arguments. The seed is the same on every machine and Python version."""
    text = "\x1f".join([str(seed), purpose, *(f"{type(part).__name__}:{part}" for part in key)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def stream(seed: int, purpose: str, *key: int | str) -> np.random.Generator:
    """Return a NumPy generator whose stream is independent of the streams for other arguments.

    >>> stream(0, "cohort", 3).integers(1000, size=3).tolist()
    [745, 622, 895]
    """
    return np.random.Generator(np.random.PCG64(derived_seed(seed, purpose, *key)))
