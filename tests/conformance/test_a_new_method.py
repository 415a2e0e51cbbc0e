"""A new method needs only its own file and its lines in the list of methods; the conformance tests then include it."""

import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METHOD = '''"""Every other block: a throw-away method."""

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from fedsweep.methods.base import FederatedMethod, Server
from fedsweep.training.aggregation import AggregationConfig
from fedsweep.types import Client, ClientId, LayerAllocation, ServerState


class EveryOther(FederatedMethod):
    """All clients hold every `step`-th block, another one in each round."""

    name: Literal["every_other"] = "every_other"
    step: int = Field(2, gt=0, description="distance of two blocks that are held")

    def check(self, capacities: Sequence[int], num_layers: int, aggregation: AggregationConfig) -> None:
        """Raise ValueError unless the blocks divide evenly."""
        if num_layers % self.step:
            raise ValueError(f"`method.step` must divide the {num_layers} blocks, but it is {self.step}")

    def allocate(
        self, state: ServerState, cohort: Sequence[Client], server: Server, rng: np.random.Generator
    ) -> dict[ClientId, LayerAllocation]:
        """Draw the lowest block."""
        row = LayerAllocation.of(state.layers[int(rng.integers(self.step)) :: self.step])
        return {client.id: row for client in cohort}

    def draws_blocks(self, depths: Collection[int], num_layers: int) -> bool:
        """Return whether there are several blocks to draw from."""
        return self.step > 1
'''
IMPORT, LISTED = "from fedsweep.methods.fedclip import FedCLIP\n", "    | ZeroShot\n"


def touched(before: Path, after: Path) -> set[str]:
    """Return the paths of the Python files that differ."""
    names = {path.relative_to(root).as_posix() for root in (before, after) for path in root.rglob("*.py")}
    _, different, alone = filecmp.cmpfiles(before, after, sorted(names), shallow=False)
    return {*different, *alone}


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_new_method_touches_two_files_and_passes_conformance(tmp_path):
    for folder in ("fedsweep", "tests", "experiments"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    listed = tmp_path / "fedsweep" / "methods" / "__init__.py"
    source = listed.read_text()
    assert source.count(IMPORT) == source.count(LISTED) == 1
    source = source.replace(IMPORT, f"from fedsweep.methods.every_other import EveryOther\n{IMPORT}")
    listed.write_text(source.replace(LISTED, f"{LISTED}    | EveryOther\n"))
    added = listed.with_name("every_other.py")
    added.write_text(METHOD)
    assert touched(ROOT / "fedsweep", tmp_path / "fedsweep") == {"methods/__init__.py", "methods/every_other.py"}
    assert touched(ROOT / "tests", tmp_path / "tests") == set()
    assert len(METHOD.splitlines()) <= 34
    chosen = ("-m", "not gpu", "-k", "every_other or EveryOther")
    command = (sys.executable, "-m", "pytest", "-q", "-n", "0", *chosen)
    itself = "tests/conformance/test_a_new_method.py"
    ran = run(tmp_path, *command, "tests/conformance", "fedsweep/testing", "--ignore", itself)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert int(ran.stdout.splitlines()[-1].split(" passed")[0].split()[-1]) >= 20

    lint = (Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache")
    assert run(tmp_path, *lint).returncode == 0
    added.write_text("import fedsweep.methods.fedra\n" + METHOD)
    assert "fedsweep.methods.every_other -> fedsweep.methods.fedra" in run(tmp_path, *lint).stdout
