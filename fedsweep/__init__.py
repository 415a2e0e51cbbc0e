"""fedsweep: hyperparameter tuning and ablations for federated fine-tuning of foundation models."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["load_experiment", "load_report", "run", "tune"]


def __getattr__(name: str) -> Any:
    """Import the Python interface on first use, because it loads large packages. The types are in `__init__.pyi`."""
    if name not in __all__:
        raise AttributeError(f"module `fedsweep` has no attribute `{name}`")
    return getattr(import_module("fedsweep.api"), name)
