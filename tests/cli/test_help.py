"""The output of `--help`, `list` and `show`, which load no heavy libraries."""

import json
import os
import shlex
import subprocess
import sys
from importlib import metadata

import pytest
import typer

from fedsweep.cli import app
from fedsweep.cli.output import page_command
from fedsweep.cli.panels import PANELS
from fedsweep.cli.tune import SPACE_OPTIONS
from tests.cli.conftest import Call

HEAVY = {"matplotlib", "mlflow", "numpy", "optuna", "pandas", "ray", "scipy", "sklearn", "timm", "torch"}
GROUP = typer.main.get_command(app).commands  # type: ignore[attr-defined]
VERBS = [
    f"{name} {below}".strip() for name, command in GROUP.items() for below in getattr(command, "commands", {"": None})
]


VARIED = {
    "axis_name": "space: {lora.rnak: {grid: [2, 8]}}",
    "axis_value": "space: {lora.rank: {grid: [2, 0]}}",
    "named_name": "named: {few: {lora.rnak: 2}, many: {lora.rank: 8}}",
    "several": "space: {lora.rnak: {grid: [2, 8]}, lora.rank: {grid: [2, 0]}}\nbaseline: {lora.rank: 4}",
    "no_arm": "space: {lora.rank: {grid: [2, 8]}}\nbaseline: {lora.rank: 4}",
    "metric": "space: {lora.rank: {grid: [2, 8]}}\nobjective: {metric: acuracy/mean}",
    "column": "space: {lora.rank: {grid: [2, 8]}}\ncolumns: [worst_domian]",
    "form": "space: {lora.rank: [2, 8], optimizer.lr: {grid: [0.1, -1]}}\nobjective: {metric: acuracy, mode: most}",
}
"""Search spaces with a mistake, by name."""
LIGHT = [
    (["--help"], [*GROUP], set()),
    (["data", "list", "--help"], ["Usage: fedsweep data"], set()),
    (["list"], ["search spaces in ablations"], set()),
    (["data", "list"], ["No data set is prepared"], {"numpy"}),
    (["tune", "ablations/lora_rank", "--experiment", "zzz"], ["there is no experiment `zzz`"], {"numpy"}),
    (["run", "zzz"], ["there is no experiment `zzz`"], {"numpy"}),
    (["run", "fedra_digits", "lora.rnak=4"], ["experiment fedra_digits: `lora.rnak` is not a hyper"], {"numpy"}),
    (["run", "fedra_digits", "lora.rank=abc"], ['`lora.rank` must be an integer, but it is "abc".'], {"numpy"}),
    (["run", "fedra_digits", "method=fedr"], ["`method.name` must be one of", "mean `fedra`"], {"numpy"}),
    (["show", "fedra_digits", "lora.dropout=2"], ["`lora.dropout` must be less than 1, but it is 2."], {"numpy"}),
    (["tune", "ablations/lora_rank", "lora.rnak=4"], ["`lora.rnak` is not a hyper", "mean `lora.rank`"], {"numpy"}),
    (["tune", "ablations/lora_rank", "local.epochs=0"], ["`local.epochs` must be greater than 0"], {"numpy"}),
    (["pretrain", "tinyimagenet_vit", "optimizer.lr=-1"], ["`optimizer.lr` must be greater than 0"], {"numpy"}),
    (["show", "ablations/lora_rank", "lora.rnak=4"], ["`lora.rnak` is not a hyper", "mean `lora.rank`"], {"numpy"}),
    (["data", "partition", "ablations/lora_rank", "lora.rnak=4"], ["`lora.rnak` is not a hyper"], {"numpy"}),
    (["data", "generate", "fedag_office_home", "lora.rnak=4"], ["`lora.rnak` is not a hyper"], {"numpy"}),
    (
        ["tune", "axis_name"],
        ["spaces/axis_name.yaml:2:9: `lora.rnak` is", "mean `lora.rank`"],
        {"numpy"},
    ),
    (
        ["tune", "axis_value"],
        ["spaces/axis_value.yaml:2:31: arm lora.rank=0: `lora.rank` must be"],
        {"numpy"},
    ),
    (["tune", "named_name"], ["spaces/named_name.yaml:2:15: arm few: `lora.rnak` is not"], {"numpy"}),
    (["tune", "several"], ["has 2 mistakes", "`lora.rnak` is not a hyper", "arm lora.rank=0: `lora.rank`"], {"numpy"}),
    (["tune", "no_arm"], ["`baseline` must be one of the arms, but {'lora.rank': 4} is not"], {"numpy"}),
    (["tune", "metric"], ["`objective.metric` acuracy/mean is not reported", "mean `accuracy/mean`"], {"numpy"}),
    (["tune", "column"], ["`columns` lists `worst_domian`, which is not a column"], {"numpy"}),
    (["tune", "form"], ["has 4 mistakes", "grid: [2, 8]", "arm optimizer.lr=-1", "objective.mode"], {"numpy"}),
    (["run", "fedra_digits", "data.domains=[plain,sketchy]"], ["but one is `sketchy`."], {"numpy"}),
    (["run", "fedra_digits", "data.held_out_domains=[foo]"], ["but one is `foo`."], {"numpy"}),
    (["run", "fedra_digits", "lora.alpha=8"], ["exactly one of `lora.alpha` and `lora.scaling`"], {"numpy"}),
    (["tune", "ablations/lora_rank", "lora.alpha=8"], ["exactly one of `lora.alpha` and `lora.sc"], {"numpy"}),
    (["tune", "ablations/lora_rank", "--exclude", "rank 5"], ["lora_rank is named `rank 5`; its arms"], {"numpy"}),
    (["data", "partition", "fedra_digits", "seeed=1"], ["`seeed` is not a hyper", "mean `seed`"], {"numpy"}),
]
"""Each command, parts of its output, and the heavy packages that this or an earlier command may load."""
PLAYED = """
import contextlib, io, json, sys
from fedsweep.cli import main

told = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["fedsweep", *words]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        with contextlib.suppress(SystemExit):
            main()
    told.append([said.getvalue(), [*sys.modules]])
print(json.dumps(told))
"""


def test_help_lists_and_mistakes_load_no_heavy_package(tmp_path):
    """All commands run in one separate process, one after the other."""
    (tmp_path / "search_spaces").mkdir()
    for name, varied in VARIED.items():
        (tmp_path / "search_spaces" / f"{name}.yaml").write_text(f"experiment: fedra_digits\n{varied}\n")
    command = [sys.executable, "-c", PLAYED, json.dumps([words for words, *_ in LIGHT])]
    env = {**os.environ, "FEDSWEEP_DATA": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    for (words, names, allowed), (said, modules) in zip(LIGHT, json.loads(done.stdout), strict=True):
        assert "typer" in modules
        assert HEAVY & {*modules} <= allowed, words
        assert [name for name in names if name not in said] == [], words


def test_all_commands_are_listed():
    verbs = ["run", "tune", "confirm", "report", "compare", "ui", "list", "show", "pretrain", "export", "predict"]
    verbs += ["doctor", "init", "status", "attach", "extend", "drop", "stop"]
    of_data = ["data prepare", "data list", "data show", "data partition", "data generate"]
    assert sorted(VERBS) == sorted([*verbs, *of_data])


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_command_has_an_example(call: Call, verb):
    answer = call(*verb.split(), "--help")
    assert (answer.code, answer.err) == (0, "")
    assert f"Example: fedsweep {verb}" in answer.out


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_without_a_command_help_is_printed(call: Call, words):
    answer = call(*words)
    assert answer.code == 0
    assert "Usage: fedsweep" in answer.out


def test_list_prints_names_with_descriptions(call: Call, tmp_path):
    (tmp_path / "search_spaces" / "mine").mkdir(parents=True)
    (tmp_path / "search_spaces" / "mine" / "first.yaml").write_text("# What is mine.\nexperiment: fedra_digits\n")
    lines = call("list").out.splitlines()
    assert any(line.split() == ["mine/first", "What", "is", "mine."] for line in lines)
    shipped = call("list", "experiments").out.splitlines()
    assert any(line.strip().startswith("fedra_digits ") for line in shipped)


def test_show_prints_a_resolved_experiment(call: Call):
    lines = [line.rstrip() for line in call("show", "fedra_digits", "lora.rank=4", "method=all_small").out.splitlines()]
    assert "lora.rank: 4" in lines
    assert 'method.name: "all_small"' in lines
    assert "seed: 0" in lines


def test_show_prints_the_arms_of_a_search_space(call: Call):
    text = call("show", "ablations/lora_rank", "federation.rounds=7").out
    assert [f"lora.rank={rank} " in text for rank in (1, 4, 8, 16)] == [True] * 4
    assert "At most 32 trials of fedra_digits with 7 rounds each (224 rounds in all), 2 in parallel." in text
    assert "Seeds: until decided, 4 to 8; search: grid; scheduler: none." in text


def test_show_prints_the_ranges_of_a_sampled_space(call: Call):
    text = call("show", "tuning/fedra").out
    assert "loguniform [0.003, 0.5]" in text
    assert "24 trials" in text


def test_the_ui_command_names_a_results_folder_other_than_the_default(monkeypatch):
    assert page_command("mlruns") == "fedsweep ui"
    assert shlex.split(page_command("my runs")) == ["fedsweep", "ui", "--store", "my runs"]
    monkeypatch.setenv("FEDSWEEP_STORE", "my runs")
    assert page_command("my runs") == "fedsweep ui"
    assert shlex.split(page_command("mlruns")) == ["fedsweep", "ui", "--store", "mlruns"]


def test_every_option_of_tune_changes_the_space_or_is_read_by_the_command():
    """Any other option would be accepted and ignored."""
    names = {parameter.name for parameter in GROUP["tune"].params}
    read = {
        "space",
        "overrides",
        "fresh",
        "resume",
        "join",
        "sweep",
        "verify",
        "dry_run",
        "detached",
        "format",
        "id_file",
        "at_once",
        "address",
        "until_decided",  # they change `seeds`
        "smallest_effect",
        "first_seed",
        "store",
        "mlflow",
    }
    assert names - {"help"} == read | SPACE_OPTIONS.keys()


def test_every_option_of_tune_has_a_panel(call: Call, monkeypatch):
    names = [parameter.name for parameter in GROUP["tune"].params if parameter.param_type_name == "option"]
    assert sorted(name for panel in PANELS.values() for name in panel) == sorted([*names, "help"])
    monkeypatch.setenv("COLUMNS", "80")
    lines = call("tune", "--help").out.splitlines()
    assert len(lines) <= 75
    assert max(map(len, lines)) <= 80
    assert [line.strip("\u256d\u256e\u2500 ") for line in lines if line[:1] == "\u256d"] == ["Arguments", *PANELS]
    options = [line.split()[1] for line in lines if line.startswith("\u2502 --")]
    flags = {parameter.name: max(parameter.opts, key=len) for parameter in GROUP["tune"].params}
    assert options == [flags.get(name, "--help") for panel in PANELS.values() for name in panel]


def test_the_version_is_that_of_the_package(call: Call):
    answer = call("--version")
    assert (answer.code, answer.out) == (0, f"fedsweep {metadata.version('fedsweep')}\n")
