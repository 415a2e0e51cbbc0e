"""What an import may load, seen from a fresh process."""

import subprocess
import sys

import pytest

HEAVY = ("mlflow", "optuna", "ray", "torch")


def loaded(module: str) -> set[str]:
    """The heavy packages that importing a module loads."""
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_engine_loads_neither_ray_nor_mlflow_nor_optuna():
    code = "fedsweep.experiment, fedsweep.federation, fedsweep.checkpoint"
    assert loaded(code) == {"torch"}


@pytest.mark.parametrize("module", ["config", "errors", "history", "seeding", "store", "types"])
def test_what_reads_and_lists_does_not_load_torch(module):
    assert loaded(f"fedsweep.{module}") == set()
