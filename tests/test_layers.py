"""What an import may load, seen from a fresh process."""

import subprocess
import sys
import tomllib
from pathlib import Path

import fedsweep

ROOT = Path(__file__).parents[1]
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
    assert loaded("fedsweep.data.data_config as d; d.load(d.DigitsData())") == {"torch"}


def test_what_reads_and_lists_does_not_load_torch():
    package = Path(fedsweep.__file__).parent
    rooms = [path for room in ("common", "results") for path in (package / room).rglob("*.py")]
    assert len(rooms) > 20
    names = [".".join(path.relative_to(package).with_suffix("").parts) for path in [*rooms, package / "types.py"]]
    assert loaded(", ".join(f"fedsweep.{name.removesuffix('.__init__')}" for name in names)) == set()


def test_every_room_has_a_layer():
    """A room that the contract of layers leaves out would not be held to it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["name"] == "An import goes only down")
    layered = {room.strip() for layer in layers for room in layer.split("|")}
    package = ROOT / "fedsweep"
    rooms = {path.stem for path in package.glob("*.py")} - {"__init__"}
    rooms |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert layered == {f"fedsweep.{room}" for room in rooms}
    assert len(rooms) == 15
