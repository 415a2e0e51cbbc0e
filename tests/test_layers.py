"""What an import may load, seen from a fresh process."""

import subprocess
import sys
import tomllib
from pathlib import Path

from fedsweep.methods import ALL

HEAVY = ("mlflow", "optuna", "ray", "torch", "timm", "transformers", "torchvision", "sklearn")


def loaded(module: str) -> set[str]:
    """The heavy packages that importing a module loads."""
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_engine_loads_neither_ray_nor_mlflow_nor_optuna():
    code = "fedsweep.federation.run_config, fedsweep.federation.rounds, fedsweep.results.checkpoint"
    assert loaded(code) == {"torch"}


def test_the_embedded_data_are_read_without_scikit_learn():
    """Every worker reads them, and would be a second later."""
    assert loaded("fedsweep.data; fedsweep.data.load(fedsweep.data.DigitsData())") == {"torch"}


def test_what_reads_and_lists_does_not_load_torch():
    names = ("arms", "config", "errors", "history", "marks", "seeding", "store", "types")
    assert loaded(", ".join(f"fedsweep.{name}" for name in names)) == set()


def test_the_contracts_know_every_method_and_every_room():
    """A method or room that is left out of import-linter's contracts would not be held to them."""
    root = Path(__file__).parents[1]
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layered_contracts = [one for one in contracts if one["type"] == "layers"]
    methods = {one.strip() for layer in layered_contracts[1]["layers"] for one in layer.split("|")}
    assert methods == {method.__module__ for method in ALL}
    layered = {room.strip() for layer in layered_contracts[0]["layers"] for room in layer.split("|")}
    package = root / "fedsweep"
    rooms = {path.stem for path in package.glob("*.py")} - {"__init__"}
    rooms |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert layered == {f"fedsweep.{room}" for room in rooms}
    assert len(rooms) >= 23
    (peft,) = [one for one in contracts if one["name"].startswith("peft only")]
    models = {path.stem for path in (package / "models").glob("*.py")} - {"__init__", "lora"}
    assert {one for one in peft["source_modules"] if ".models." in one} == {f"fedsweep.models.{one}" for one in models}
