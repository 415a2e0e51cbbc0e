"""The import contracts, each tested with an import that breaks it, and the heavy packages that modules load."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import grimp
import pytest

import fedsweep

ROOT = Path(__file__).parents[1]
HEAVY = ("mlflow", "optuna", "ray", "torch", "timm", "transformers", "torchvision", "sklearn")


def loaded(module: str) -> set[str]:
    """Return the heavy packages that a new process loads when it imports a module."""
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_modules_for_reading_and_listing_do_not_load_torch():
    package = Path(fedsweep.__file__).parent
    rooms = [path for room in ("common", "results") for path in (package / room).rglob("*.py")]
    assert len(rooms) > 20
    names = [".".join(path.relative_to(package).with_suffix("").parts) for path in [*rooms, package / "types.py"]]
    assert loaded(", ".join(f"fedsweep.{name.removesuffix('.__init__')}" for name in names)) == set()


def test_a_worker_and_the_live_table_load_torch_only_when_they_need_it():
    assert loaded("fedsweep.sweep.running.trainable") == {"ray"}
    assert loaded("fedsweep.sweep.running.display") == set()


def test_every_package_has_a_layer():
    """A package that the contract on layers does not list would be exempt from the contract."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["name"] == "An import goes only down")
    layered = {room.strip() for layer in layers for room in layer.split("|")}
    package = ROOT / "fedsweep"
    rooms = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    rooms |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert layered == {f"fedsweep.{room}" for room in rooms}
    assert len(rooms) == 17


DOWN = "An import goes only down"
RUN = "A run reaches neither Ray, Optuna nor MLflow"
PLANTED = [
    ("fedsweep.common.config", "fedsweep.results.table_columns", {DOWN}),
    ("fedsweep.report.table", "fedsweep.tracking.parent_and_child_runs", {DOWN}),  # packages in the same layer
    ("fedsweep.sweep.space.axes", "fedsweep.sweep.plan.plan", {"Within the sweep, an import goes only down"}),
    (
        "fedsweep.methods.fedra",
        "fedsweep.methods.fedag.method",
        {"Methods do not import one another; FedBRICK contains a depth method"},
    ),
    ("fedsweep.report.table", "ray", {"Ray and Optuna only in the sweep"}),
    ("fedsweep.cli.tune", "optuna", {"Ray and Optuna only in the sweep"}),
    ("fedsweep.results.table_columns", "mlflow", {"MLflow only in tracking"}),
    ("fedsweep.models.layered", "peft", {"peft only in models.lora"}),
    ("fedsweep.data.synthetic.generated", "diffusers", {"diffusers only in preparation"}),
    (
        "fedsweep.federation.build_and_run",
        "fedsweep.tracking.parent_and_child_runs",
        {DOWN, RUN},
    ),  # an exception applies to one contract only
    ("fedsweep.common.config", "torch", {"No torch below the data: help, list and report do without"}),
    (
        "fedsweep.common.files",
        "fedsweep.models.layered",
        {DOWN, "No torch below the data: help, list and report do without"},
    ),
]
"""Forbidden imports, with the importing module, the imported module and the contracts that the import breaks."""


@pytest.fixture(scope="module")
def broken() -> Callable[..., set[str]]:
    """Return a function that adds an import to the package and returns the names of the contracts that it breaks."""
    from importlinter.api import read_configuration
    from importlinter.contracts.forbidden import ForbiddenContract
    from importlinter.contracts.independence import IndependenceContract
    from importlinter.contracts.layers import LayersContract

    classes = {"forbidden": ForbiddenContract, "independence": IndependenceContract, "layers": LayersContract}
    read = read_configuration(str(ROOT / "pyproject.toml"))
    package = grimp.build_graph("fedsweep", include_external_packages=True, cache_dir=None)
    session = read["session_options"]
    contracts = [classes[one["type"]](one["name"], session, one) for one in read["contracts_options"]]

    def check(importer: str, imported: str) -> set[str]:
        graph = deepcopy(package)
        assert importer in graph.modules
        graph.add_import(importer=importer, imported=imported)
        return {one.name for one in contracts if not one.check(deepcopy(graph), verbose=False).kept}

    return check


@pytest.mark.parametrize(("importer", "imported", "contracts"), PLANTED)
def test_an_added_import_breaks_only_its_contract(broken, importer, imported, contracts):
    assert broken(importer, imported) == contracts


def test_every_contract_has_an_import_that_breaks_it():
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {name for *_, names in PLANTED for name in names} == {one["name"] for one in written}
