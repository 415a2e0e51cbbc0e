"""The wheel, installed outside the repository, and run from an empty folder."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.cli.conftest import GRID

ROOT = Path(__file__).parents[1]
MINIATURE = GRID.replace("grid: [1, 4, 8, 16]", "grid: [4, 8]").replace("seeds: [0, 1, 2]", "seeds: [0]")
FEWER = ("federation.rounds=1", "local.steps=1", "evaluation.images_per_domain=10", "evaluation.test_rounds=all")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel without a network connection, and return its path."""
    folder = tmp_path_factory.mktemp("wheel")
    command = ["uv", "build", "--quiet", "--offline", "--wheel", "--out-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def program(wheel, tmp_path_factory) -> Path:
    """Install the wheel in a new environment that shares this environment's other packages, and return the command.

    A `.pth` file adds the folder of these packages. The `.pth` files in that folder are not read, so the repository is
    not on the path.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = ["uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(python), str(wheel)]
    subprocess.run(install, check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    packages.joinpath("shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "fedsweep"


def run(program: Path, folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, and check its exit code."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env = {**kept, "COLUMNS": "120", "FEDSWEEP_CACHE": str(program.parents[1] / "cache")}
    done = subprocess.run([program, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_the_wheel_contains_every_file_that_git_tracks(wheel):
    listed = subprocess.run(
        ["git", "ls-files", "fedsweep", "experiments", "search_spaces"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    wanted = {name if name.startswith("fedsweep/") else f"fedsweep/shipped/{name}" for name in listed}
    assert len(wanted) > 400
    with zipfile.ZipFile(wheel) as archive:
        assert wanted - {*archive.namelist()} == set()


def test_the_wheel_lists_the_shipped_files_and_plans_a_sweep(program, tmp_path):
    where = "import fedsweep; print(fedsweep.__file__)"
    python = program.with_name("python")
    used = subprocess.run([python, "-c", where], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert Path(used).is_relative_to(program.parents[1])
    assert "fedsweep list ablations" in run(program, tmp_path, "list").stdout
    files = json.loads(run(program, tmp_path, "list", "--format", "json").stdout)["files"]
    assert len(files) > 150
    assert {one["own"] for one in files} == {False}
    planned = run(program, tmp_path, "tune", "ablations/lora_rank", "--dry-run").stdout
    assert "At most 32 trials of fedra_digits with 10 rounds each" in planned
    assert not (tmp_path / "mlruns").exists()


def test_the_wheel_runs_a_sweep_of_a_space_of_ones_own(program, tmp_path):
    space = tmp_path / "search_spaces" / "ranks.yaml"
    space.parent.mkdir()
    space.write_text(MINIATURE)
    ran = run(program, tmp_path, "tune", "ranks", *FEWER)
    assert "baseline" in ran.stdout
    again = run(program, tmp_path, "tune", "ranks", *FEWER, "--format", "json")
    assert "baseline" in again.stderr
    found = json.loads(again.stdout)
    (sweep,) = found["sweeps"]
    assert (found["exit_code"], sweep["status"], sweep["trials"]["finished"]) == (0, "complete", 2)
    assert [one["lora.rank"] for one in sweep["table"]] == [4, 8]
    exported = run(program, tmp_path, "export", "ranks:lora.rank=4", "--to", "out", "--format", "json").stdout
    assert json.loads(exported)["round"] == 1
    planned = run(program, tmp_path, "confirm", "ranks", "--seeds", "2", "--dry-run", "--format", "json").stdout
    assert json.loads(planned)["search_space"] is None  # a dry run leaves no file
    assert json.loads(planned)["plans"][0]["trials"] == 4
    table = run(program, tmp_path, "report", "ranks", "--format", "csv").stdout.splitlines()
    assert len(table) == 1 + 2
    (page,) = tmp_path.glob(f"mlruns/sweeps/ranks/{sweep['id']}/report/report.html")
    assert "ranks" in page.read_text()


def test_the_guide_to_a_project_of_ones_own_works_in_miniature(program, tmp_path):
    """Run the commands of the guide in order, with fewer rounds and without downloaded weights."""
    page = (ROOT / "docs" / "guides" / "your_own_project.md").read_text()
    (drawing,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    subprocess.run([program.with_name("python"), "-c", drawing], cwd=tmp_path, check=True)
    start, rest, *_ = re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    shown = run(program, tmp_path, *shlex.split(start)[1:]).stdout
    _, written, *_ = re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert shown == written
    enter, *lines = rest.splitlines()
    assert shown.endswith(f"{enter} && {lines[0]}\n")
    below = tmp_path / "study" / "notes"
    below.mkdir()
    small = ["local.steps=1", "backbone.pretrained=none", "backbone.num_blocks=12", "backbone.embed_dim=24"]
    for line in lines:
        _, *words = shlex.split(line)
        words += small if words[0] in ("run", "tune") else []
        words += ["federation.rounds=1", "--seeds", "0"] if words[0] == "tune" else []
        run(program, below if words[0] in ("tune", "report") else tmp_path / "study", *words)
    assert len(lines) == 6
    assert [one.name for one in tmp_path.glob("study/mlruns/sweeps/*")] == ["lora_rank"]
    assert [one.name for one in below.iterdir()] == []
    commands = re.findall(r"^fedsweep [^#]*[^# ]", (tmp_path / "study" / "README.md").read_text(), re.MULTILINE)
    assert [one for one in commands if one in lines] == [*lines[:2], *lines[3:]]
