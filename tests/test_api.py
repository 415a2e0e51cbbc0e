"""The Python interface, which does the same as the commands."""

import json
import subprocess
import sys
import tempfile

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch

import fedsweep
from fedsweep.common.errors import UserError
from fedsweep.results import Store
from tests.scripts import SCRIPTS, load_script
from tests.sweep.helpers import GRID, ROUNDS, SMALL, environment, play_alone, runs, write_space
from tests.sweep.helpers import fedsweep as command

NOTEBOOKS = sorted((SCRIPTS.parent / "docs" / "notebooks").glob("*.ipynb"))


def test_the_package_itself_is_light():
    code = "import sys, fedsweep; print(fedsweep.__version__, 'fedsweep.api' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [fedsweep.__version__, "False", "False"]
    with pytest.raises(AttributeError, match="module `fedsweep` has no attribute `tunes`"):
        _ = fedsweep.tunes
    assert [name for name in fedsweep.__all__ if not callable(getattr(fedsweep, name))] == []


def test_an_experiment_is_loaded_with_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = fedsweep.load_experiment("fedra_digits", {"lora.rank": 4, "method": "inclusivefl"})
    assert (config.lora.rank, config.method.name) == (4, "inclusivefl")
    for name, changes, message in (
        ("fedra_digit", {}, "there is no experiment `fedra_digit`; did you mean `fedra_digits`"),
        ("fedra_digits", {"lora.rnk": 4}, "`lora.rnk` is not a hyperparameter"),
        ("fedra_digits", {"lora.rank": 0}, "`lora.rank` must be greater than 0"),
    ):
        with pytest.raises(UserError, match=message):
            fedsweep.load_experiment(name, changes)


def test_a_run_has_the_metrics_that_the_command_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads, shown = torch.get_num_threads(), []
    result = fedsweep.run("fedra_digits", SMALL, show=shown.append)
    assert torch.get_num_threads() == threads
    assert [one.round for one in shown] == [*range(ROUNDS + 1)]
    assert tuple(shown) == result.history
    words = [f"{name}={json.dumps(value)}" for name, value in SMALL.items()]
    lines = command(tmp_path, "run", "fedra_digits", *words, "--json", "--store", "other").stdout.splitlines()
    printed = pd.DataFrame(map(json.loads, lines)).set_index("round")
    measured = [name for name in printed if not name.startswith("seconds/")]
    pd.testing.assert_frame_equal(result.frame[measured], printed[measured])
    assert result.recorder.unsynced == {}
    (run,) = Store(tmp_path / "mlruns").runs()
    assert run.folder == result.trial.folder
    again = fedsweep.run(result.config, {"seed": 1}, name="mine", store="third")
    assert [one.folder.parent.name for one in Store(tmp_path / "third").runs()] == ["mine"]
    assert not again.frame.equals(result.frame)


def test_a_report_is_a_data_frame(tmp_path, monkeypatch):
    write_space(tmp_path, "ranks", GRID)
    play_alone(tmp_path, "ranks")
    monkeypatch.chdir(tmp_path)
    report = fedsweep.load_report("ranks")
    read = pd.read_csv(report.folder / "table.csv")
    assert [*report.frame] == [*read]
    assert np.allclose(report.frame["mean"], read["mean"], rtol=0, atol=1e-12)
    rounds = report.rounds
    assert len(rounds) == 4 * (ROUNDS + 1)
    assert set(zip(rounds["lora.rank"], rounds["seed"], strict=True)) == {(1, 0), (1, 1), (4, 0), (4, 1)}
    last = rounds[rounds["round"] == ROUNDS].groupby("lora.rank")["accuracy/mean"].mean()
    assert np.allclose(last.to_numpy(), report.frame.set_index("lora.rank").loc[last.index, "mean"])
    assert report._repr_markdown_() == (report.folder / "table.md").read_text()
    assert "worst_domain" in " ".join(fedsweep.load_report("ranks", columns=["worst_domain"]).frame)
    with pytest.raises(UserError, match="worst_domian"):
        fedsweep.load_report("ranks", columns=["worst_domian"])


SWEPT = """
import json, ray
import fedsweep

shown = []
result = fedsweep.tune("ranks", options={"seeds": [0]}, show=shown.append)
assert shown == [result.report]
assert not ray.is_initialized()
print(json.dumps([result.status, dict(result.tally)["finished"], [int(n) for n in result.report.frame["n"]]]))
"""
"""A program that runs a sweep."""


@pytest.mark.slow
def test_a_sweep_ends_with_its_report_and_with_mlflow_closed(tmp_path):
    write_space(tmp_path, "ranks", GRID)
    words = [sys.executable, "-c", SWEPT]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, 2, [1, 1]]
    parents, children, _ = runs(tmp_path, "ranks")
    assert [one.info.status for one in (*parents, *children)] == ["FINISHED"] * 3


def test_a_mistake_in_a_sweep_is_raised_before_it_starts(tmp_path, monkeypatch):
    write_space(tmp_path, "ranks", GRID)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"`lora\.rnk`"):
        fedsweep.tune("ranks", {"lora.rnk": 1})
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_outputs_of_a_notebook_are_stored(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [one for cell in cells for one in cell.outputs]
    assert [one.output_type for one in outputs if one.output_type == "error" or one.get("name") == "stderr"] == []
    assert sum("image/png" in one.get("data", {}) for one in outputs) >= 2
    assert tempfile.gettempdir() not in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_can_be_executed(path):
    made = load_script("run_notebook").executed(path)
    known = nbformat.read(path, as_version=4)
    kinds = [[[one.output_type for one in cell.get("outputs", [])] for cell in each.cells] for each in (made, known)]
    assert kinds[0] == kinds[1]
