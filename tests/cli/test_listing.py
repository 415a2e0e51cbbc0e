"""The command `fedsweep list`."""

import json
import subprocess
from pathlib import Path

import pytest

from fedsweep.cli.listing import is_running
from fedsweep.common import paths
from fedsweep.common.files import locked
from fedsweep.common.paths import available
from fedsweep.results import Outcome, Store
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import new_sweep
from tests.cli.conftest import EXPERIMENT, GRID, Call, Refused, write
from tests.plugin_packages import Install, install

__all__ = ["install"]


def files(call: Call, *words: str) -> list[dict]:
    return json.loads(call("list", *words, "--format", "json").out)["files"]


def test_the_overview_counts_shipped_files_by_folder_and_fits_a_terminal(call: Call):
    shown = call("list").out
    shipped = [*available("experiments"), *available("search_spaces"), *available("pretrain")]
    counts = [int(line.split()[0]) for line in shown.splitlines() if line.strip()[:1].isdigit()]
    assert sum(counts) == len(shipped) > 150
    assert "fedsweep list ablations" in shown
    assert "fedra_digits" not in shown
    assert len(shown.splitlines()) <= 24


def test_own_files_come_first_by_name(call: Call):
    write("search_spaces", "mine/question", GRID)
    write("experiments", "own", EXPERIMENT)
    shown = call("list").out
    assert shown.index("own") < shown.index("mine/question") < shown.index("fedsweep list ablations")
    assert [one["name"] for one in files(call)][:2] == ["own", "mine/question"]
    assert [one["name"] for one in files(call) if one["own"]] == ["own", "mine/question"]


def test_words_select_names_and_descriptions(call: Call):
    every = files(call)
    found = files(call, "Brick", "lambda")
    assert found == [one for one in every if all(w in str([*one.values()][1:3]).lower() for w in ("brick", "lambda"))]
    assert {one["kind"] for one in files(call, "experiments")} == {"experiments"}
    assert [one["name"] for one in files(call, "experiments", "fedra_pacs")] == ["fedra_pacs"]
    assert files(call, "all") == every
    for one in found:
        assert Path(one["path"]).is_file()
        assert one["name"] in call("list", "brick", "lambda").out


def test_words_without_a_match_end_with_similar_names(refused: Refused):
    assert refused("list", "lora_rnk") == (
        "nothing has `lora_rnk` in its name or description; "
        "did you mean `lora_rank` or `lora_rank_clip` or `lora_rank_tuned`?"
    )
    assert "`--format` must be terminal or json, but it is `yaml`" in refused("list", "--format", "yaml")


def test_words_without_a_match_name_what_was_searched(call: Call, refused: Refused):
    assert "no experiment has `brick_gate` in its name" in refused("list", "experiments", "brick_gate")
    assert "No sweep was found in mlruns; `--store` names another" in call("list", "sweeps").out
    assert refused("list", "sweeps", "zzz") == ("no sweep in mlruns has `zzz` in its name; see `fedsweep list sweeps`.")
    assert json.loads(call("list", "sweeps", "--format", "json").out) == {"format": 1, "command": "list", "sweeps": []}


def test_in_a_checkout_own_files_are_those_that_git_does_not_track(monkeypatch, tmp_path):
    package = tmp_path / "clone" / "fedsweep"
    for name in ("ablations/shipped", "mine/own"):
        write_to(tmp_path / "clone" / "search_spaces" / f"{name}.yaml")
    package.joinpath("common").mkdir(parents=True)
    monkeypatch.setattr(paths, "__file__", str(package / "common" / "paths.py"))
    monkeypatch.chdir(tmp_path / "clone")
    assert {path.stem for path in paths.own_files(paths.available("search_spaces").values())} == {"shipped", "own"}
    for command in (["init", "-q"], ["add", "search_spaces/ablations"]):
        subprocess.run(["git", *command], check=True)
    assert {path.stem for path in paths.own_files(paths.available("search_spaces").values())} == {"own"}


def write_to(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("# A question?\n")


@pytest.fixture
def sweep(call: Call):
    """Return a new sweep of `mine`, of which one trial has ended."""
    write("search_spaces", "mine", GRID)
    plan = Plan.read("mine", {}, {})
    sweep = new_sweep(plan, Store(Path("mlruns")))
    for number, one in enumerate(plan.grid()):
        sweep.trial(one.key).plan(one)
        if number == 0:
            sweep.trial(one.key).end(Outcome(outcome="finished", round=1))
    return sweep


def test_sweeps_are_listed_with_their_progress(call: Call, sweep):
    manifest = sweep.manifest()
    (found,) = json.loads(call("list", "sweeps", "--format", "json").out)["sweeps"]
    assert (found["name"], found["id"], found["running"]) == ("mine", manifest.id, False)
    assert (found["ended_trials"], found["planned_trials"]) == (1, manifest.trials)
    assert f"mine@{manifest.id}" in call("list", "sweeps").out
    assert f"1 of {manifest.trials}" in call("list", "sweeps", "mine").out
    assert "not running here" in call("list", "sweep").out
    assert not is_running(sweep)
    with locked(sweep.folder / ".lock", "taken"):
        assert is_running(sweep)
        assert "running" in call("list", "sweeps").out


def test_methods_are_listed_without_those_of_broken_plugins(call: Call, install: Install):
    before = json.loads(call("list", "methods", "--format", "json").out)
    assert before["broken"] == []
    install("broken = 1 / 0")
    answer = call("list", "methods")
    assert answer.code == 2
    assert "fedra " in answer.out
    assert answer.err.startswith("fedsweep: the entry point `odd` in group fedsweep.methods of the installed package")
    assert "(ZeroDivisionError: division by zero, " in answer.err
    assert answer.err.endswith("; repair it, or uninstall odd-package.\n")
    answer = call("list", "methods", "--format", "json")
    found = json.loads(answer.out)
    assert (answer.code, found["methods"]) == (2, before["methods"])
    assert [f"fedsweep: {one}\n" for one in found["broken"]] == [answer.err]
    assert call("list", "metrics").code == 0
    answer = call("list", "methods", "odd")  # the broken one is still named
    assert (answer.code, answer.out) == (2, "")
    assert "the entry point `odd`" in answer.err


def test_a_usable_plugin_is_listed_next_to_a_broken_one(call: Call, install: Install):
    install("raise RuntimeError", {"methods": {"even": "even_package:Even"}}, package="even-package")
    install()
    answer = call("list", "methods", "--format", "json")
    assert answer.code == 2
    assert [one["name"] for one in json.loads(answer.out)["methods"]][-1] == "odd"


def test_the_exact_name_of_a_method_lists_only_this_method_with_its_paper(call: Call):
    listed = json.loads(call("list", "methods", "FedRA", "--format", "json").out)["methods"]
    assert [one["name"] for one in listed] == ["fedra"]
    assert "A Random Allocation Strategy" in " ".join(call("list", "methods", "fedra").out.split())
