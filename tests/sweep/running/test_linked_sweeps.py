"""The linked sweeps of arms that are tuned one by one, with a kill and a resume."""

from contextlib import chdir, nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from fedsweep.cli.early_check import check_space
from fedsweep.cli.linked import run_linked
from fedsweep.cli.tune import named_sweep
from fedsweep.common.errors import UserError
from fedsweep.report.choice import by_validation
from fedsweep.results import Outcome, Store, SweepStore, TrialRecord
from fedsweep.results.history import RoundRecord
from fedsweep.results.tune_command import tune_command
from fedsweep.results.tuned_arms import Stage, choose
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.linked_sweeps import _options_of, first_stage, planned_sweeps, sweeps_to_resume
from fedsweep.sweep.running.open_sweep import new_sweep, resumed_sweep
from fedsweep.sweep.running.tune import TuneOptions
from tests.sweep.helpers import GRID, TUNED, fedsweep, kill, newest, runs, start, wait_for_rounds, write_space


def test_a_dry_run_prices_all_three_sweeps(tmp_path, monkeypatch):
    write_space(tmp_path, "tuned", TUNED)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    done = fedsweep(tmp_path, "tune", "tuned", "--dry-run", trains=False)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    priced = {row[0]: row[2:4] for row in rows if len(row) == 5}
    assert priced == {
        "tuned/tuning": ["1000", "6"],
        "tuned": ["0, 1", "4"],
        "tuned/tuned": ["0, 1", "4"],
    }
    assert "14 trials of fedra_digits with 2 rounds each (28 rounds in all)" in done.stdout
    assert "Estimated time:" in done.stdout
    assert "add `--address auto`" in " ".join(done.stderr.split())
    with chdir(tmp_path):
        drawn = first_stage(TuneOptions("tuned").request).drawn
    shown = [row[1] for row in rows if len(row) == 2 and row[0].isdigit()]
    assert shown[-2:] == [f"{one['optimizer.lr']:.4g}" for one in drawn]


def test_a_dry_run_prints_the_notes_of_an_ordinary_dry_run(tmp_path):
    write_space(tmp_path, "tuned", TUNED)
    changes = ("lora.alpha=8", "lora.scaling=null", "--until-decided")
    done = fedsweep(tmp_path, "tune", "tuned", *changes, "--dry-run", trains=False)
    assert "Expected seeds without any difference:" in done.stdout
    assert "scaling differs between arms: 8, 2 (lora.alpha / lora.rank)." in done.stdout


@pytest.fixture
def begun(tmp_path, monkeypatch) -> SweepStore:
    """Create a tuning sweep with an override, in which rank 1 has two finished samples and rank 4 has none."""
    write_space(tmp_path, "tuned", TUNED)
    monkeypatch.chdir(tmp_path)
    plan = Plan.of(planned_sweeps(TuneOptions("tuned", {"local.steps": 2}))[0].request)
    sweep = new_sweep(plan, Store(tmp_path / "mlruns"))
    values = iter([None, 0.4, 0.6, None, None, None])
    trials = []
    for trial, value in zip(plan.grid(), values, strict=True):
        history = [] if value is None else [RoundRecord(2, {"validation/accuracy/mean": value}, 0.1)]
        outcome = Outcome(outcome="failed" if value is None else "finished", round=2)
        trials.append(TrialRecord(trial, outcome, history))
    monkeypatch.setattr(SweepStore, "trials", lambda self: trials)
    return sweep


def test_the_last_sweep_follows_from_the_metrics_of_the_tuning_sweep(begun):
    console = Console(file=(said := StringIO()), width=200)
    options = TuneOptions("tuned", resume=True)
    started = sweeps_to_resume(options)
    assert {name: one.folder for name, one in started.items()} == {"tuning": begun.folder}
    own = _options_of("tuned", options, started, console)
    stage = own.request.stage
    assert (stage.name, stage.sweep) == ("tuned", begun.folder.name)
    assert [(one.arm["lora.rank"], one.sample) for one in stage.chosen] == [(1, 2), (4, None)]
    assert said.getvalue() == "No sample of arm lora.rank=4 has finished, so it runs with its untuned values.\n"
    plan = Plan.of(own.request)
    rates = {arm["lora.rank"]: config.optimizer.lr for arm, config in plan.configs}
    assert rates == {1: stage.drawn[1]["optimizer.lr"], 4: plan.base.optimizer.lr}
    assert plan.base.local.steps == 2  # as the tuning sweep
    again = _options_of("tuning", options, started, console)
    assert (again.sweep_id, again.resume) == (begun.folder.name, True)
    assert resumed_sweep(Plan.of(again.request), again.results, again.resumed).folder == begun.folder


def test_a_resume_goes_on_with_the_sweeps_that_belong_together(begun):
    console, store, last = Console(quiet=True), begun, TuneOptions("tuned", resume=True)
    results = last.results
    created = []
    for name in ("common", "tuned"):
        plan = Plan.of(_options_of(name, last, {"tuning": store}, console).request)
        created.append(new_sweep(plan, results).folder.name)
    newer = new_sweep(Plan.of(planned_sweeps(TuneOptions("tuned"))[0].request), results)
    assert {name: one.folder.name for name, one in sweeps_to_resume(last).items()} == {"tuning": newer.folder.name}
    for sweep_id in (begun.folder.name, *created):
        found = sweeps_to_resume(replace(last, sweep_id=sweep_id))
        assert [one.folder.name for one in found.values()] == [begun.folder.name, *created]
        for name in {"tuned", NAMES[[begun.folder.name, *created].index(sweep_id)]}:
            assert [*sweeps_to_resume(replace(last, sweep_id=f"{name}@{sweep_id}"))] == ["tuning", "common", "tuned"]
    with pytest.raises(UserError, match="there is no sweep `nothing` of tuned/tuning"):
        sweeps_to_resume(replace(last, sweep_id="nothing"))
    with pytest.raises(UserError, match="there is no sweep `nothing` of tuned/tuning"):
        sweeps_to_resume(replace(last, sweep_id="tuned@nothing"))
    with pytest.raises(UserError, match="there is no sweep `other@"):
        sweeps_to_resume(replace(last, sweep_id=f"other@{begun.folder.name}"))
    assert TuneOptions("tuned").linked == {}


@pytest.mark.parametrize(
    ("name", "sweep", "found"),
    [
        ("tuned", None, ("tuned", None)),
        ("tuned", "ID", ("tuned", "ID")),
        ("tuned@ID", None, ("tuned", "ID")),
        ("tuned@ID", "ID", ("tuned", "ID")),
        ("tuned/tuned", None, ("tuned", None)),
        ("tuned/tuning@ID", None, ("tuned", "tuned/tuning@ID")),
        ("tuned/tuning@ID", "tuned/tuning@ID", ("tuned", "tuned/tuning@ID")),
        ("plain/tuned@ID", None, ("plain/tuned", "ID")),
        ("other/tuned", None, ("other/tuned", None)),
    ],
)
def test_a_sweep_can_be_resumed_by_the_name_that_outputs_print(tmp_path, monkeypatch, name, sweep, found):
    monkeypatch.chdir(tmp_path)
    for space, content in {"tuned": TUNED, "plain": TUNED, "plain/tuned": GRID, "other": GRID}.items():
        write_space(tmp_path, space, content)
    assert named_sweep(name, sweep, resume=True) == found
    if name == found[0]:
        assert named_sweep(name, sweep, resume=False) == found
    else:
        with pytest.raises(
            UserError, match=f"`fedsweep tune {name} --resume` to resume it, or `fedsweep tune {found[0]}`"
        ):
            named_sweep(name, sweep, resume=False)


def test_two_different_sweeps_cannot_be_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^`tuned@ID` and `--sweep other` are two different sweeps; leave out one"):
        named_sweep("tuned@ID", "other", resume=True)


def test_resumed_sweeps_keep_the_changes_and_the_freshness_of_the_tuning_sweep(begun, tmp_path):
    write_space(tmp_path, "valid", {**TUNED, "fixed": {**TUNED["fixed"], "data.validation_fraction": 0.0}})
    asked = TuneOptions("valid", {"data.validation_fraction": 0.2}, {"seeds": [0, 7]}, fresh=True)
    new_sweep(Plan.of(planned_sweeps(asked)[0].request), asked.results, fresh=True)
    resumed = TuneOptions("valid", resume=True)
    check_space(resumed.request)
    assert resumed.request.overrides == {"data.validation_fraction": 0.2}
    assert (resumed.request.stage, resumed.request.space.seeds) == (None, (0, 7))
    tuning, common = (_options_of(name, resumed, resumed.linked, Console(quiet=True)) for name in ("tuning", "common"))
    assert (tuning.resume, common.resume, common.fresh) == (True, False, True)
    assert (common.request.overrides, common.request.space.seeds) == (resumed.request.overrides, (0, 7))


def test_a_resumed_sweep_keeps_its_experiment_even_if_the_file_names_none(begun, tmp_path):
    write_space(tmp_path, "absent", {**TUNED, "experiment": "absent"})
    asked = TuneOptions("absent", space_options={"experiment": "fedra_digits"})
    new_sweep(Plan.of(planned_sweeps(asked)[0].request), asked.results)
    resumed = TuneOptions("absent", resume=True)
    check_space(resumed.request)
    assert resumed.request.space.experiment == "fedra_digits"


def test_a_sweep_with_the_name_of_a_tuning_sweep_is_not_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "tuned", TUNED)
    write_space(tmp_path, "tuned/tuning", GRID)
    new_sweep(Plan.of(TuneOptions("tuned/tuning").request), Store(tmp_path / "mlruns"))
    (tmp_path / "search_spaces" / "tuned" / "tuning.yaml").unlink()
    with pytest.raises(UserError, match="no sweep tuned/tuning has tuned the arms of search space tuned"):
        _ = TuneOptions("tuned", resume=True).request


def test_a_dry_run_of_a_resume_checks_the_sweeps_to_resume(begun, tmp_path):
    done = fedsweep(tmp_path, "tune", "tuned", "--resume", "--sweep", "bogus", "--dry-run", code=2, trains=False)
    assert "there is no sweep `bogus` of tuned/tuning" in " ".join(done.stderr.split())
    options = planned_sweeps(TuneOptions("tuned", resume=True))
    assert [one.resume for one in options] == [True, False, False]
    assert options[0].resumed.folder == begun.folder
    assert [one.request.overrides for one in options] == [{"local.steps": 2}] * 3
    for name in ("tuned", "tuned/tuned", f"tuned/tuning@{begun.folder.name}"):
        assert "Estimated time:" in fedsweep(tmp_path, "tune", name, "--resume", "--dry-run", trains=False).stdout
    done = fedsweep(tmp_path, "tune", "tuned/tuned@bogus", "--resume", "--dry-run", code=2, trains=False)
    assert "there is no sweep `bogus` of tuned/tuning" in " ".join(done.stderr.split())
    done = fedsweep(tmp_path, "tune", "tuned/tuned", "--dry-run", code=2, trains=False)
    assert "`tuned/tuned` is one of the linked sweeps of search space tuned; " in " ".join(done.stderr.split())
    done = fedsweep(tmp_path, "tune", "tuned", "local.steps=3", "--resume", "--dry-run", code=2, trains=False)
    assert "cannot be resumed because its YAML files or overrides have changed" in " ".join(done.stderr.split())


def test_failed_samples_are_forgiven_but_not_failed_uploads(monkeypatch):
    def ended(stage: str, status: int, unsent: dict[str, str]) -> SimpleNamespace:
        request = SimpleNamespace(stage=Stage(name=stage, names=(), drawn=()))
        sweep = SimpleNamespace(remote=SimpleNamespace(unsent=unsent))
        session = SimpleNamespace(plan=SimpleNamespace(request=request), sweep=sweep, stopped=False)
        return SimpleNamespace(session=session, folder=Path(), disk_full=False, report_error=None, status=status)

    def fail(result: SimpleNamespace, page: str) -> None:
        if result.status:
            raise SystemExit(result.status)

    monkeypatch.setattr("fedsweep.cli.output.show_sweep", fail)
    for unsent, code in (({}, None), ({"trials/a": "the network is gone"}, 1)):
        results = [ended("tuning", 1, unsent), ended("common", 0, {})]

        def run_all(*given: object, found: list[SimpleNamespace] = results) -> None:
            for result in found:
                given[-1](result)

        monkeypatch.setattr("fedsweep.sweep.running.linked_sweeps.linked_sweeps", run_all)
        monkeypatch.setattr("fedsweep.tracking.Destination.of_sweep", lambda *_: SimpleNamespace(server=None))
        with pytest.raises(SystemExit) if code else nullcontext() as end:
            run_linked(TuneOptions("tuned"), Console(quiet=True))
        assert code is None or end.value.code == code


def test_the_command_in_a_report_starts_all_linked_sweeps(begun):
    assert tune_command(begun.manifest()) == "fedsweep tune tuned local.steps=2"


def test_a_tuning_sweep_compares_no_arms_and_hides_the_test_images(begun):
    manifest = begun.manifest()
    assert (manifest.baseline, manifest.seeds, manifest.trials) == (None, (1000,), 6)
    assert manifest.varied == ("lora.rank", "optimizer.lr")
    assert manifest.logarithmic == ("optimizer.lr",)
    assert manifest.chosen_by == "validation/accuracy/mean (validation images)"
    assert by_validation(manifest)


NAMES = ("tuned/tuning", "tuned", "tuned/tuned")


def tables(folder: Path) -> dict[str, str]:
    """Return the table of each linked sweep in full precision."""
    return {name: (newest(folder, name).folder / "report" / "table.csv").read_text() for name in NAMES}


def rates(sweep: SweepStore) -> dict[int, set[float]]:
    found: dict[int, set[float]] = {}
    for trial in sweep.trials():
        found.setdefault(trial.plan.arm["lora.rank"], set()).add(trial.plan.config["optimizer"]["lr"])
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the linked sweeps with one trial at a time, and return their working directory."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_space(folder, "tuned", TUNED)
    done = fedsweep(folder, "tune", "tuned", "--at-once", "1")
    assert "was best among 3 samples" in " ".join(done.stdout.split())
    return folder


@pytest.mark.slow
def test_each_arm_runs_with_the_best_of_its_samples_on_the_seeds_of_the_ablation(undisturbed):
    tuning, common, tuned = (newest(undisturbed, name) for name in NAMES)
    manifest = tuning.manifest()
    chosen = {
        one.arm["lora.rank"]: {one.values["optimizer.lr"]}
        for one in choose(manifest.stage, manifest.metric, manifest.mode, tuning.trials())
    }
    assert rates(tuned) == chosen
    assert {rate for several in rates(common).values() for rate in several} == {0.1}
    assert {trial.plan.seed for trial in tuned.trials()} == {0, 1}
    assert tuned.manifest().stage.sweep == tuning.folder.name
    text = (tuned.folder / "report" / "table.md").read_text()
    assert "| lora.rank | optimizer.lr | n |" in text
    assert "Command: `fedsweep tune tuned`" in text
    (parent,), _, _ = runs(undisturbed, "tuned/tuned")
    assert parent.data.tags["fedsweep.stage"] == "tuned"
    assert (tuning.folder / "report" / "tuning.png").exists()
    assert "on test" not in (tuning.folder / "report" / "table.md").read_text()
    for name in NAMES:
        fedsweep(undisturbed, "report", name)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "rounds"), [("tuned/tuning", 3), ("tuned/tuned", 1)])
def test_a_kill_in_any_stage_and_a_resume_give_the_same_tables(undisturbed, tmp_path, stage, rounds):
    write_space(tmp_path, "tuned", TUNED)
    process = start(tmp_path, "tune", "tuned")
    wait_for_rounds(tmp_path, stage, rounds, process)
    kill(process)
    before = {path.name for path in (tmp_path / "mlruns" / "sweeps" / "tuned" / "tuning").iterdir()}
    fedsweep(tmp_path, "tune", "tuned", "--resume")
    assert tables(tmp_path) == tables(undisturbed)
    assert {path.name for path in (tmp_path / "mlruns" / "sweeps" / "tuned" / "tuning").iterdir()} == before
