"""Identity of the code and packages that decide a run's numbers; a sweep can be resumed after any other change."""

import hashlib
from pathlib import Path

import fedsweep

ENGINE = ("common", "data", "models", "training", "methods", "federation")
"""Rooms that decide a run's numbers, together with `types.py`."""
ENGINE_PACKAGES = ("torch", "timm", "transformers", "peft", "numpy", "scikit-learn")


def engine_digest() -> str:
    """Return the SHA-256 of the source and the shipped weights that decide a run's numbers, as hex digits."""
    root = Path(fedsweep.__file__).parent
    kinds = {".py", ".json", ".safetensors"}
    files = [path for room in ENGINE for path in (root / room).rglob("*") if path.suffix in kinds]
    digest = hashlib.sha256()
    for path in sorted([root / "types.py", *files]):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
