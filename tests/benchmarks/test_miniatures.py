"""A miniature run of every script in `benchmarks/`, so that no script stops working unnoticed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fedra_released.ours import Fedsweep
from benchmarks.fedra_released.released import COMPARISONS
from benchmarks.fedra_released.setting import DEPTHS
from fedsweep.results import Outcome, Store, SweepManifest, TrialPlan
from fedsweep.results.checkpoint import Checkpoint, save
from fedsweep.results.history import RoundRecord
from fedsweep.testing.compare import moved
from fedsweep.types import ServerState

ROOT = Path(__file__).parents[2]
LINKED = ("fedsweep", "tests", "experiments", "search_spaces", "scripts", "pyproject.toml")
SCRIPTS = {
    "brick_distillation.py": "--images 16 --epochs 1 --times 1",
    "brick_loss_terms.py": "--rounds 1 --settings 1",
    "clip_features.py": "--turns 1 --digits",
    "data_loading.py": "--count 84 --size 32 --repeats 1",
    "frozen_prefix.py": "--images 16 --batch 8 --turns 1",
    "honesty.py": "--repetitions 2 --residuals normal",
    "many_clients.py": "--rounds 1 --repeats 1",
    "mutation.py": "--slice 0:0",
    "other_images.py": "--repetitions 4 --seeds 3 --images 100",
    "pairing.py": "small --store store",
    "pruning.py": "--problems 1",
    "pruning_window.py": "--repetitions 2",
    "recorded_seeds.py": "small --store store --orders 3",
    "recording.py": "--trials 3 --rounds 1",
    "shared_variances.py": "--repetitions 10",
    "simultaneous.py": "--repetitions 10",
    "thousand_trials.py": "--trials 3 --rounds 1",
    "bytes": "--methods fedra",
    "cache": "--only LFFT --trials 2 --rounds 1",
    "counted": "",
    "engine": "--cohorts 2 --rounds 1 --turns 1",
    "hot_paths": "",
    "paper_times": "--train 1000 --test 400",
    "optimism": "--searches 1 --samples 2 --rounds 1 --seeds 2",
    "sequential": "--repetitions 4 --adastop 0 --cells 3",
    "sweep": "--trials 2 --rounds 1",
    "gpu": "agreement throughput sharing --device cpu --quick",
    "faults.changes_before_resume": "--changes code",
    "faults.clock_jumps": "",
    "faults.mlflow_outage": "--away 2 --rounds 5",
    "faults.node_lost": "--rounds 2",
    "faults.read_only_database": "--only before",
    "faults.signals": "--signals SIGTERM --victims worker",
    "faults.ui_exposed": "",
}
"""The options of a short run of each script. Names with `.py` are run as files, and other names as modules."""
LEFT_OUT = {
    "common_factors": "trains at least 8 models; its parts have a test of their own",
    "faults.out_of_memory": "fills 10 GB of main memory",
    "fedra_released": "needs the released code; its own side has a test below",
    "peers": "downloads the simulators",
    "streams": "trains at least 16 models; its parts have a test of their own",
}
PARTS = (
    "recorded",
    "mutation_sites",
    "mutation_tests",
    "pruning_page",
    "pruning_plays",
    "pruning_problems",
    "pruning_workers",
    "sequential_page",
    "sequential_rivals",
)
"""Modules that another script imports."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy the scripts, which write into the folder of their results, and link what they read."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def write_sweep(store: Store) -> None:
    """Write a finished sweep of two arms with three seeds, without a run."""
    manifest = SweepManifest(
        id="s", name="small", experiment="fedra_digits", created="2026-01-01", metric="accuracy/mean", mode="max",
        rounds=1, varied=("lora.rank",), seeds=(0, 1, 2), scheduler="none", search="grid", domains=("plain",),
        digests={}, baseline={"lora.rank": 4},
    )  # fmt: skip
    sweep = store.sweep(manifest.name, manifest.id)
    sweep.create(manifest, {"search_space.yaml": "", "experiment.yaml": ""})
    for number, (rank, seed) in enumerate((rank, seed) for rank in (4, 8) for seed in manifest.seeds):
        trial = sweep.trial(f"k{number}")
        trial.plan(TrialPlan(key=f"k{number}", number=number, arm={"lora.rank": rank}, seed=seed, config={}))
        record = RoundRecord(1, {"accuracy/mean": (rank + seed**2 + number) / 100}, 0.1)
        save(trial.checkpoint, Checkpoint(1, ServerState({}, (0,)), (record,)))
        trial.end(Outcome(outcome="finished", round=1))


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder), "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_every_script_is_listed():
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in PARTS}
    packages = {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
    faults = {f"faults.{path.stem}" for path in (ROOT / "benchmarks" / "faults").glob("*.py")}
    assert scripts | packages | faults == {name.removesuffix(".py") for name in (*SCRIPTS, *LEFT_OUT)}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs(folder, script):
    options = SCRIPTS[script].split()
    if script == "faults.mlflow_outage" and shutil.which("pg_ctl") is None:
        pytest.skip("needs PostgreSQL's programs")
    write_sweep(Store(folder / "store"))
    command = [f"benchmarks/{script}"] if script.endswith(".py") else ["-m", f"benchmarks.{script}"]
    run(folder, *command, *options)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARISONS)
def test_fedsweeps_side_of_the_comparison_with_released_code_runs(name):
    ours = Fedsweep(COMPARISONS[name].method, dropout=0.0, images=(8,) * len(DEPTHS))
    before = ours.state.adapter
    batches = ours.play(0, None)
    assert [sum(len(labels) for _, labels in of_client) for of_client in batches] == [8] * len(DEPTHS)
    assert moved(before, ours.state.adapter)
    ours.evaluate()


@pytest.mark.slow
def test_the_common_work_of_the_simulators_runs(folder):
    script = "import work; work.ROUNDS = 2; work.report('torch', work.cpu_seconds(work.bare), repeats=1)"
    found = json.loads(run(folder / "benchmarks" / "peers", "-c", script))
    assert {*found} == {"package", "version", "torch", "simulator", "bare"}
