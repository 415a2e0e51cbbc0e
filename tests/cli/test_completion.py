"""The completion of names in bash, zsh and fish."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from fedsweep.cli import app, completion
from fedsweep.cli.overview import SHORT
from fedsweep.common.paths import available
from fedsweep.results import Store
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import new_sweep
from tests.cli.conftest import GRID, Call, write


@pytest.fixture
def complete(call: Call, monkeypatch):
    """Return a function that completes the last of the given words in bash, which divides words at `=`, `:` and `@`."""

    def answer(*words: str) -> list[str]:
        monkeypatch.setenv("_FEDSWEEP_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(["fedsweep", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        said = call()
        assert (said.code, said.err) == (0, "")
        return said.out.split()

    return answer


def test_commands_and_options_are_completed(complete):
    assert complete("con") == ["confirm"]
    assert complete("data", "pre") == ["prepare"]
    assert complete("tune", "ablations/lora_rank", "--at") == ["--at-once"]


def test_names_of_files_are_completed(complete):
    write("experiments", "own", "# Mine.\nseed: 0\n")
    assert {"fedra_digits", "own"} <= {*complete("run", "")}
    assert complete("run", "ow") == ["own"]
    assert complete("tune", "ablations/lora_rank_") == ["ablations/lora_rank_clip", "ablations/lora_rank_tuned"]
    assert {*complete("show", "")} == {*available("experiments"), *available("search_spaces")}
    assert complete("pretrain", "d") == ["digits_vit"]
    assert complete("tune", "ablations/lora_rank", "--experiment", "ow") == ["own"]


def test_hyperparameters_are_those_of_the_experiment_or_of_the_experiment_of_the_space(complete):
    names = complete("run", "fedra_digits", "")
    assert {"method=", "method.missing_layers=", "lora.rank=", "seed="} <= {*names}
    assert not [name for name in names if name.endswith(".name=")]
    assert complete("tune", "ablations/lora_rank", "federation.e") == [
        "federation.evaluate_every=",
        "federation.evaluate_every=2",
    ]
    assert complete("run", "fedag_digits", "method.a") != complete("run", "fedra_digits", "method.a") == []
    assert complete("pretrain", "digits_vit", "optimizer.l") == ["optimizer.lr=", "optimizer.lr=0.001"]
    assert complete("run", "unknown", "lora") == []


def test_a_single_name_is_not_followed_by_a_space(complete):
    """A shell appends a space to the only completion, but not to the common beginning of several completions."""
    assert complete("run", "fedra_digits", "lora.ra") == ["lora.rank=", "lora.rank_scaling="]
    assert complete("run", "fedra_digits", "lora.dr") == ["lora.dropout=", "lora.dropout=0.0"]
    assert complete("run", "fedra_digits", "lora.pat") == [
        "lora.patch_embed=",
        "lora.patch_embed=true",
        "lora.patch_embed=false",
    ]


def test_values_are_completed_after_the_sign_of_equality(complete):
    assert complete("run", "fedra_digits", "method", "=", "fedr") == ["fedra"]
    assert len(complete("run", "fedra_digits", "method", "=")) >= 14
    assert complete("run", "fedra_digits", "optimizer", "=") == ["sgd", "adam"]
    assert complete("tune", "ablations/lora_rank", "lora.position", "=", "b") == ["both"]
    assert complete("run", "fedra_digits", "lora.patch_embed", "=") == ["true", "false"]
    assert complete("run", "fedra_digits", "lora.rank", "=") == ["8"]
    assert complete("run", "fedra_digits", "no.such", "=") == []


def test_columns_are_completed_after_a_comma(complete):
    assert complete("report", "x", "--columns", "worst_d") == ["worst_domain"]
    assert complete("report", "x", "--columns", "=", "worst_domain,accuracy/me") == ["worst_domain,accuracy/mean"]
    found = complete("tune", "ablations/lora_rank", "--columns", "accuracy/domain/")
    assert len(found) == 6
    assert "accuracy/domain/textured" in found


def test_sweeps_are_completed_by_search_space_and_by_id(complete):
    assert complete("report", "") == []
    write("search_spaces", "deep/mine", GRID)
    sweep = new_sweep(Plan.read("deep/mine", {}, {}), Store(Path("mlruns"))).manifest()
    for verb in ("report", "compare", "confirm", "export", "ui"):
        assert complete(verb, "") == ["deep/mine"], verb
        assert complete(verb, "deep/mine", "@") == [sweep.id], verb
    assert complete("report", "deep/mine@") == [f"deep/mine@{sweep.id}"]
    assert complete("compare", "deep/mine", "dee") == ["deep/mine"]
    assert complete("report", "deep/mine", "--sweep", "2") == [sweep.id]
    assert complete("report", "other", "--sweep", "2") == []
    assert complete("tune", "--resume", "") == ["deep/mine"]
    assert "ablations/lora_rank" in complete("tune", "")


def test_zsh_and_fish_show_descriptions(call: Call, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "fedsweep run fedra_dig")
    monkeypatch.setenv("_FEDSWEEP_COMPLETE", "complete_zsh")
    assert '"fedra_digits":"FedRA on handwritten digits' in call().out
    monkeypatch.setenv("_FEDSWEEP_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    assert "fedra_digits\tFedRA on handwritten digits" in call().out
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "fedsweep run fedra_digits method=all_s")
    assert call().out.split() == ["method=all_small"]


def test_bash_calls_the_script_that_show_completion_prints(tmp_path):
    """One process of bash and two of fedsweep, which load no heavy package and answer soon."""
    script = """
    PATH="$1:$PATH"
    eval "$(fedsweep --show-completion bash)"
    COMP_WORDS=(fedsweep run fedra_digits method = all_s) COMP_CWORD=5
    _fedsweep_completion fedsweep
    echo "${COMPREPLY[@]}"
    """
    command = ["bash", "--norc", "-c", script, "bash", str(Path(sys.executable).parent)]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (said.stdout, said.stderr) == ("all_small\n", "")


def test_a_completion_loads_no_heavy_package(tmp_path):
    played = "import sys, json\nsys.argv = ['fedsweep']\nfrom fedsweep.cli import main\ntry:\n    main()\n"
    played += "except SystemExit:\n    print(json.dumps([*sys.modules]))"
    words = "fedsweep\ntune\nablations/lora_rank\n--columns\nacc"
    env = {**os.environ, "_FEDSWEEP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "4"}
    began = time.process_time()
    command = [sys.executable, "-c", played]
    said = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "accuracy/mean" in said
    assert not {"numpy", "torch", "pandas", "mlflow", "ray"} & {*json.loads(said[-1])}
    assert time.process_time() - began < 1


def test_a_file_that_cannot_be_read_completes_nothing(complete):
    write("experiments", "broken", "{")
    assert complete("run", "broken", "lora") == []
    assert complete("run", "brok") == ["broken"]


def test_words_that_bash_has_divided_are_joined():
    assert completion.joined(["a", "b", "=", "c", "d"]) == ["a", "b=c", "d"]
    assert completion.joined(["report", "x", "@", "2", ":", "lora.rank", "=", "4"]) == ["report", "x@2:lora.rank=4"]


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_the_help_fits_into_80_columns_and_24_rows(call: Call, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    lines = call(*words).out.rstrip().splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    described = {name for names in SHORT for name in names.split(", ")}
    assert described == typer.main.get_command(app).commands.keys()  # type: ignore[attr-defined]
    for name, about in SHORT.items():
        assert [line.split() for line in lines].count([*name.split(), *about.split()]) == 1
    assert lines[-1] == "Options: --version, --install-completion, --show-completion, --help"
