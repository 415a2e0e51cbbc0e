"""What decides a run's numbers; the rest of the package may change between the sessions of a sweep. No torch."""

import hashlib
from pathlib import Path

import fedsweep

ENGINE = ("images", "data", "models", "methods")
ENGINE_PACKAGES = ("torch", "timm", "transformers", "peft", "numpy", "scikit-learn")
ENGINE_MODULES = (
    "types",
    "config",
    "plain",
    "seeding",
    "base_optimizer",
    "training",
    "optimizers",
    "frozen",
    "reader",
    "malicious",
    "aggregation",
    "distillation",
    "mutual_learning",
    "evaluation",
    "costs",
    "drift",
    "structural_bias",
    "federation",
    "experiment",
    "play",
    "embedding/tsne",
)


def engine_digest() -> str:
    """A digest of the source and weights that decide a run's numbers."""
    root = Path(fedsweep.__file__).parent
    files = [root / f"{module}.py" for module in ENGINE_MODULES]
    kinds = {".py", ".json", ".safetensors"}
    files += [path for room in ENGINE for path in (root / room).rglob("*") if path.suffix in kinds]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
