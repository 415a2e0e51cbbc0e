"""The JSON documents that commands print with `--format json`."""

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import typer
import yaml

from fedsweep.cli import app, json_output, json_results, json_sweeps
from fedsweep.methods import ALL
from fedsweep.report.arm_statistics import summarise
from fedsweep.report.compare_sweeps import Pairing, Side
from fedsweep.report.holm_corrected_tests import Verdict
from fedsweep.results import Outcome, Store
from fedsweep.sweep.plan.plan import Plan
from tests.cli.conftest import GRID, Answer, Call, write
from tests.cli.test_report import ONE, OTHER, SPACE, record
from tests.preparation.helpers import write_tree
from tests.report.conftest import make_manifest
from tests.report.test_other_images import DECIDED, RANKS, WORST, draw

GROUP = typer.main.get_command(app).commands  # type: ignore[attr-defined]
VERBS = {
    f"{name} {below}".strip(): inner
    for name, command in GROUP.items()
    for below, inner in getattr(command, "commands", {"": command}).items()
}


def document(answer: Answer, command: str) -> dict:
    """Check that stdout is exactly one document of a command, whose fields are described, and return it."""
    found = json.loads(answer.out)
    assert (found.pop("format"), found.pop("command")) == (1, command)
    assert found.keys() <= json_output.FIELDS[command].keys()
    assert found
    return found


def test_every_command_that_prints_data_has_the_option():
    having = {name for name, one in VERBS.items() if any("--format" in option.opts for option in one.params)}
    assert having == json_output.FIELDS.keys() | {"run"}
    assert VERBS.keys() - having == {"ui", "init", "pretrain", "attach"}


@pytest.mark.parametrize("verb", [*json_output.FIELDS, "run"])
def test_an_error_is_one_document_and_one_sentence(call: Call, verb):
    answer = call(*verb.split(), "--no-such-option", "--format", "json")
    assert answer.code == 2
    said = json.loads(answer.out)
    assert said["format"] == 1
    assert said["exit_code"] == 2
    assert answer.err == f"fedsweep: {said['error']}\n"


def test_an_error_of_a_command_is_one_document(call: Call):
    for words in (["show", "nothing"], ["run", "fedra_digits", "lora.rnak=4"], ["report", "nothing"], ["tune", "x"]):
        answer = call(*words, "--format=json")
        assert answer.code == 2, words
        assert answer.err.endswith(f"fedsweep: {json.loads(answer.out)['error']}\n"), words
    assert json.loads(call("run", "nothing", "--json").out)["exit_code"] == 2
    assert call("show", "nothing").out == ""


def test_the_format_is_checked_by_every_command(call: Call):
    given = {"data prepare": ["x", "--root", "."], "export": ["x", "--to", "x"], "predict": ["x", "x"]}
    given |= {"extend": ["x", "--seeds", "+1"], "drop": ["x", "y"]}
    given |= {"compare": ["x", "y"], "list": [], "doctor": [], "data list": []}
    for verb in json_output.FIELDS:
        answer = call(*verb.split(), *given.get(verb, ["x"]), "--format", "yaml")
        assert answer.code == 2, verb
        assert answer.err.startswith("fedsweep: `--format` must be"), verb


def test_lists(call: Call):
    assert len(document(call("list", "--format", "json"), "list")["files"]) > 150
    assert document(call("list", "sweeps", "--format", "json"), "list") == {"sweeps": []}
    spaces = document(call("list", "spaces", "--format", "json"), "list")["files"]
    assert {one["kind"] for one in spaces} == {"search_spaces"}
    methods = document(call("list", "methods", "--format", "json"), "list")["methods"]
    assert [one["name"] for one in methods] == [one.model_fields["name"].default for one in ALL]
    by_name = {one["name"]: one for one in methods}
    assert by_name["fedra"]["needs"] == ["LoRA"]
    assert by_name["fedra"]["source"].startswith("FedRA: A Random Allocation Strategy")
    assert by_name["fedag"]["needs"] == ["head", "synthetic images"]
    assert by_name["fedms"]["description"].endswith("local expert in stage two.")
    assert all(one["description"].endswith(".") and one["source"].endswith(".") for one in methods)
    metrics = document(call("list", "metrics", "worst", "--format", "json"), "list")["metrics"]
    assert {"worst_domain", "accuracy/worst_domain"} <= {one["name"] for one in metrics}


def test_methods_and_metrics_are_listed_one_by_one(call: Call, refused):
    shown = call("list", "methods").out
    assert [name for one in ALL if (name := one.model_fields["name"].default) not in shown] == []
    assert "No One Left Behind" not in shown
    found = call("list", "method", "promptfl").out
    assert "Let Federated Participants" in found
    assert "fedra" not in found
    assert "worst_domain" in call("list", "metrics").out
    assert refused("list", "methods", "fedrx").startswith(
        "no method has `fedrx` in its name or description; did you mean"
    )


def test_plans_and_values(call: Call):
    values = document(call("show", "fedra_digits", "lora.rank=4", "--format", "json"), "show")["values"]
    assert (values["lora.rank"], values["federation.depths"]) == (4, [12, 10, 8, 6, 4, 3])
    plan = document(call("show", SPACE, "--format", "json"), "show")["plan"]
    assert plan["arms"] == [{"lora.rank": rank} for rank in (1, 4, 8, 16)]
    assert plan["labels"] == [f"lora.rank={rank}" for rank in (1, 4, 8, 16)]
    assert (plan["objective"], plan["mode"]) == ("accuracy/last_rounds", "max")
    assert plan["baseline"] == {"lora.rank": 8}
    assert (plan["trials"], plan["rounds"], plan["seeds"], plan["sampled"]) == (32, 10, None, None)
    sampled = document(call("show", "tuning/fedra", "--format", "json"), "show")["plan"]
    assert (sampled["arms"], sampled["labels"], sampled["baseline"]) == (None, None, None)
    assert sampled["sampled"]["optimizer.lr"].startswith("loguniform")
    assert plan["until_decided"] == {"at_most": 8, "at_least": 4, "smallest_effect": 2.0, "first": 0, "vary": None}
    assert plan.keys() | {"counts", "clients", "expected_seeds"} == json_output.PLAN.keys()
    (counted,) = document(call("tune", "papers/fedbrick/table3", "--format", "json"), "tune")["plans"]
    assert counted["counts"][0]["parameters"]["parameters/all"] > 0


def test_a_dry_run(call: Call, monkeypatch):
    monkeypatch.setattr("fedsweep.cli.output.estimated_time", lambda *_: (12.5, None, "from nothing"))
    write("search_spaces", "mine", GRID)
    answer = call("tune", "mine", "--dry-run", "--format", "json")
    found = document(answer, "tune")
    assert (found["seconds"], found["estimated_from"]) == (12.5, "from nothing")
    assert found["plans"][0]["seeds"] == [0, 1, 2]
    assert found["parallel"] == 2
    assert "expected_seeds" not in found["plans"][0]
    found = document(call("tune", "mine", "--smallest-effect", "2", "--dry-run", "--format", "json"), "tune")
    forecasts = found["plans"][0]["expected_seeds"]
    assert [(one["spread"], one["case"]) for one in forecasts] == [
        (spread, case) for spread in (1.0, 2.0, 4.0) for case in ("no difference", "smallest effect")
    ]
    assert all(4 <= one["seeds"] <= one["baseline"] <= 20 and 0 <= one["decided"] <= 1 for one in forecasts)


def test_a_dry_run_of_tuned_arms_lists_their_clients_and_names_unequal_budgets(call: Call, monkeypatch):
    monkeypatch.setattr("fedsweep.cli.linked.one_trial", lambda _: (2, 12.5, "from nothing"))
    budgets = {"federation.depths": None, "federation.capacity": [0.51], "data.validation_fraction": 0.2}
    space = {
        "experiment": "fedra_digits",
        "fixed": budgets,
        "space": {"method": {"grid": ["fedra", {"name": "all_small", "depth": 3}]}},
        "baseline": {"method": "fedra"},
        "tune_each": {"space": {"optimizer.lr": {"choice": [0.1, 0.2]}}, "samples": 2},
    }
    write("search_spaces", "mine", yaml.safe_dump(space))
    answer = call("tune", "mine", "--dry-run", "--format", "json")
    tuning, *others = document(answer, "tune")["plans"]
    assert [one["arm"]["optimizer.lr"] for one in tuning["clients"]] == [0.1, 0.2, 0.1, 0.2]
    assert [[one["arm"]["method"] for one in plan["clients"]] for plan in others] == [
        space["space"]["method"]["grid"]
    ] * 2
    assert answer.err.count("in their budgeted cost") == 1


def test_reports_and_comparisons(call: Call, monkeypatch, tmp_path):
    monkeypatch.setattr("fedsweep.report.write_figures", lambda *_: ())
    record(tmp_path / "mlruns", "s1", ONE)
    record(tmp_path / "mlruns", "s2", OTHER)
    sweep = document(call("report", SPACE, "--format", "json"), "report")["sweep"]
    assert sweep.keys() == json_output.SWEEP.keys()
    assert (sweep["id"], sweep["trials"]["finished"], len(sweep["table"])) == ("s2", 9, 3)
    assert (sweep["failures"], sweep["changes_made"], len(sweep["each_trial"])) == ([], [], 9)
    assert all(one.keys() == json_results.TRIAL.keys() for one in sweep["each_trial"])
    arm = sweep["arms"][0]
    assert arm.keys() == json_results.ARM.keys()
    assert (arm["arm"], arm["label"], arm["n"], arm["baseline"]) == ({"lora.rank": 4}, "lora.rank=4", 3, False)
    columns = [name for name in arm if name in sweep["table"][0] and name != "arm"]
    assert {"mean", "interval_low", "interval_high", "p", "p_holm", "verdict"} <= {*columns}
    assert [{name: one[name] for name in columns} for one in sweep["arms"]] == [
        {name: one[name] for name in columns} for one in sweep["table"]
    ]
    assert arm["simultaneous_low"] < arm["interval_low"] < arm["interval_high"] < arm["simultaneous_high"]
    (state,) = document(call("status", SPACE, "--format", "json"), "status")["sweeps"]
    assert state.keys() == json_output.STATE.keys()
    assert (state["arms"], state["status"]) == (sweep["arms"], sweep["status"])
    assert sweep["table"][0]["difference"] == pytest.approx(0.56 - 0.60)
    assert sweep["findings"]
    compared = document(call("compare", f"{SPACE}@s1", f"{SPACE}@s2", "--format", "json"), "compare")
    assert [one["arm_a"] for one in compared["comparisons"]] == ["lora.rank=4", "lora.rank=8"]
    assert compared["findings"]
    one = compared["comparisons"][0]
    described = {name for names in json_results.COMPARISON for name in names.split(", ")}
    assert described <= one.keys()
    assert (one["values_a"], one["correction"], one["p_corrected"]) == ({"lora.rank": 4}, "Holm", one["p_holm"])
    arms = (f"{SPACE}:lora.rank=4", f"{SPACE}:lora.rank=16")
    (two,) = document(call("compare", *arms, "--format", "json"), "compare")["comparisons"]
    assert (two["correction"], two["p_corrected"]) == ("Bonferroni", two["p_bonferroni"])


@pytest.mark.parametrize("until", [{}, DECIDED])
def test_arms_and_comparisons_have_all_their_intervals(tmp_path, until):
    sweep = draw(tmp_path, better=0.2, seeds=6)
    manifest = make_manifest(comparisons=RANKS if until else (*RANKS, WORST), **until)
    (four, eight), (own, other) = arms = [[*map(json_results.arm, made := summarise(manifest, sweep.records))], made]
    assert all(one.keys() == json_results.ARM.keys() for one in arms[0])
    assert (four["images_low"], four["images_high"]) == own.comparison.images
    assert (four["simultaneous_low"], four["simultaneous_high"]) == (own.comparison.simultaneous or (None, None))
    assert (four["simultaneous_low"] is None) == bool(until)  # a single test
    assert [eight[f"{name}_{end}"] for name in ("images", "simultaneous") for end in ("low", "high")] == [None] * 4
    sides = [Side(one.key, manifest, (one,), 2) for one in (other, own)]
    (found,) = json_results.comparisons(Pairing.of(*sides, by_arm=False))
    for end in ("low", "high"):
        assert [found[f"{name}_{end}"] for name in ("images", "simultaneous")] == [
            four[f"{name}_{end}"] for name in ("images", "simultaneous")
        ]


def test_a_failed_and_a_diverged_trial_are_listed_with_their_tracebacks(call: Call, monkeypatch, tmp_path):
    monkeypatch.setattr("fedsweep.report.write_figures", lambda *_: ())
    record(tmp_path / "mlruns", "s1", ONE)
    sweep = Store(tmp_path / "mlruns").find(SPACE)
    traceback = "Traceback (most recent call last):\n  File ...\nValueError: a test\n"
    trials = sweep.trials()
    for trial, outcome in zip(trials, ("failed", "diverged"), strict=False):
        sweep.trial(trial.plan.key).end(Outcome(outcome=outcome, round=trial.last_round, error=traceback))
    reported = document(call("report", SPACE, "--format", "json"), "report")["sweep"]
    (state,) = document(call("status", SPACE, "--format", "json"), "status")["sweeps"]
    assert reported["failures"] == state["failures"]
    assert [one["outcome"] for one in state["failures"]] == ["failed", "diverged"]
    first = state["failures"][0]
    assert first.keys() == json_results.FAILURE.keys()
    assert (first["key"], first["label"]) == (trials[0].plan.key, trials[0].plan.label)
    assert (first["error"], first["traceback"]) == ("ValueError: a test", traceback)
    assert json_results.status(sweep.manifest(), sweep.trials(), True) == "running"


def test_the_status_of_a_sweep_depends_on_its_trials():
    def status(planned: int | None, *outcomes: str | None) -> str:
        ended = [None if name is None else SimpleNamespace(outcome=name) for name in outcomes]
        trials = [SimpleNamespace(outcome=one) for one in ended]
        return json_results.status(SimpleNamespace(trials=planned), trials, False)  # type: ignore[arg-type]

    assert status(2, "finished", "diverged") == "complete"
    assert status(2, "finished", "failed") == "failed"
    assert status(3, "finished", "failed") == "interrupted"
    assert status(2, "finished", None) == "interrupted"
    assert status(None, "finished", None) == "interrupted"
    assert status(None, "finished") == "complete"


def test_prepared_data_sets(call: Call, monkeypatch, tmp_path):
    monkeypatch.delenv("FEDSWEEP_DATA", raising=False)
    write_tree(tmp_path / "tree")
    prepare = ("data", "prepare", "animals", "--root", "tree", "--size", "16", "--workers", "1", "--format", "json")
    made = document(call(*prepare), "data prepare")
    assert (made["already"], made["data_set"]["name"], made["warnings"]) == (False, "animals", [])
    listed = document(call("data", "list", "--format", "json"), "data list")
    assert [one["folder"] for one in listed["data_sets"]] == [made["folder"]]
    assert len(listed["layouts"]) == 11
    shown = document(call("data", "show", "animals", "--verify", "--format", "json"), "data show")
    assert shown["verified"]
    assert Path(shown["picture"]).is_file()
    total = sum(one["train"] for classes in shown["counts"].values() for one in classes.values())
    assert total == 48
    images = document(call("data", "show", "animals", "--split", "test", "--format", "json"), "data show")["images"]
    assert len(images) == 12
    assert images[0].keys() == {"domain", "class", "path"}


def test_partitions(call: Call):
    found = document(call("data", "partition", "fedra_digits", "--format", "json"), "data partition")
    (one,) = found["partitions"]
    assert len(one["clients"]) == 6
    assert one["clients"][0]["images"].keys() == {str(digit) for digit in range(10)}
    assert Path(found["picture"]).is_file()


def test_checks_of_the_machine(call: Call, monkeypatch):
    doctor = importlib.import_module("fedsweep.cli.doctor")
    monkeypatch.setattr(doctor, "CHECKS", {"packages": doctor.CHECKS["packages"]})
    (one,) = document(call("doctor", "--format", "json"), "doctor")["checks"]
    assert one["works"]


def test_the_results_of_a_sweep_are_one_document_also_if_a_trial_has_failed(call: Call, monkeypatch, capsys):
    """The sweep itself is replaced, because it would start Ray."""
    write("search_spaces", "mine", GRID)
    store = Store(Path("mlruns"))
    plan = Plan.read("mine", {}, {})
    sweep = importlib.import_module("fedsweep.sweep.running.open_sweep").new_sweep(plan, store)
    session = SimpleNamespace(interrupted=False, sweep=sweep)
    tally = {"finished": 0, "pruned": 0, "diverged": 0, "failed": 0}
    result = SimpleNamespace(session=session, status=1, folder=sweep.folder, trials=(), report=None)

    def run_space(options, dry_run, ended):
        json_sweeps.output.result_console().print("the table")
        ended(result)
        raise SystemExit(1)

    monkeypatch.setattr(importlib.import_module("fedsweep.cli.tune"), "run_space", run_space)
    answer = call("tune", "mine", "--format", "json")
    found = document(answer, "tune")
    assert (answer.code, found["exit_code"]) == (1, 1)
    assert "the table" in answer.err
    (one,) = found["sweeps"]
    assert one.keys() == json_output.SWEEP.keys()
    assert (one["status"], one["trials"], one["table"]) == ("failed", tally, [])


def test_a_field_without_a_description_is_an_error():
    with pytest.raises(ValueError, match="fields without a description"):
        json_output.text("doctor", checks=[], other=1)


def test_numbers_that_are_not_finite_are_null():
    assert json.loads(json_output.text("doctor", checks=[float("nan"), Path("a"), (1, {2})]))["checks"] == [
        None, "a", [1, [2]],
    ]  # fmt: skip


def test_the_reference_describes_every_field():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text()
    sections = dict(re.findall(r"^## (.*)\n((?:(?!^## ).*\n?)*)", page, re.MULTILINE))
    assert sections.keys() == {
        "Errors and exit codes", "Verdicts", *json_output.FIELDS, *json_output.NESTED
    }  # fmt: skip
    for command, fields in [*json_output.FIELDS.items(), *json_output.NESTED.items()]:
        names = [name for several in fields for name in several.split(", ")]
        assert [name for name in names if not re.search(rf"^\| .*`{name}`.* \|", sections[command], re.M)] == []
    verdicts = {name for several in json_results.VERDICTS for name in several.split(", ")}
    assert verdicts == {name for kind in get_args(Verdict) for name in (get_args(kind) or (kind,))}
    assert all(f"`{name}`" in sections["Verdicts"] for name in verdicts)
