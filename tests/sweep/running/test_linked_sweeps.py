"""Arms tuned one by one: the samples, the refusals and the linked sweeps, with a kill and a resume."""

from contextlib import chdir
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fedsweep.common.errors import UserError
from fedsweep.report.choice import by_validation
from fedsweep.results import Outcome, Store, SweepStore, TrialRecord
from fedsweep.results.arms import identity
from fedsweep.results.history import RoundRecord
from fedsweep.results.tune_command import tune_command
from fedsweep.results.tuned_arms import STAGE, choose
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.linked_sweeps import _options_of, _started, first_stage, planned_sweeps
from fedsweep.sweep.running.open_sweep import new_sweep, resumed_sweep
from fedsweep.sweep.running.tune import TuneOptions
from fedsweep.sweep.search.proposals import drawn_values
from fedsweep.sweep.space.axes import Axis
from tests.sweep.helpers import GRID, SMALL, fedsweep, kill, newest, runs, start, wait_for_rounds, write_space

FIXED = {**SMALL, "federation.rounds": 2, "data.validation_fraction": 0.2, "evaluation.test_rounds": "last"}
TUNED = {
    **GRID,
    "fixed": FIXED,
    "tune_each": {"space": {"optimizer.lr": {"loguniform": [0.01, 0.5]}}, "samples": 3},
}


def plan_of(folder: Path, name: str, stage: str) -> Plan:
    with chdir(folder):
        planned = planned_sweeps(TuneOptions(name))
        return Plan.of(planned[("tuning", "common", "tuned").index(stage)].request)


def test_samples_depend_only_on_the_axes_and_the_seed():
    axes = {"optimizer.lr": Axis(loguniform=(0.01, 1.0)), "lora.dropout": Axis(uniform=(0.0, 0.5), step=0.05)}
    five, eight = drawn_values(axes, 5, 3), drawn_values(axes, 8, 3)
    assert eight[:5] == five
    assert len({identity(one) for one in eight}) == 8
    assert all(axis.has(one[name]) for one in eight for name, axis in axes.items())
    assert drawn_values(axes, 5, 4) != five
    assert len(drawn_values({"lora.rank": Axis(choice=(1, 2))}, 5, 0)) == 2
    assert len(drawn_values({"lora.dropout": Axis(choice=(0, 0.0))}, 5, 0)) == 1


@pytest.mark.parametrize("ranks", [[1, 4], [4, 1], [16, 4, 1, 2]])
def test_all_arms_try_the_same_samples_whatever_their_order_and_number(tmp_path, ranks):
    write_space(tmp_path, "tuned", {**TUNED, "space": {"lora.rank": {"grid": ranks}}})
    plan = plan_of(tmp_path, "tuned", "tuning")
    samples: dict[int, list[float]] = {}
    for trial in plan.grid():
        assert trial.seed == 1000
        assert trial.config["optimizer"]["lr"] == trial.arm["optimizer.lr"]
        samples.setdefault(trial.arm["lora.rank"], []).append(trial.arm["optimizer.lr"])
    common = plan.base.optimizer.lr
    drawn = drawn_values({"optimizer.lr": Axis(loguniform=(0.01, 0.5))}, 2, 1000)
    assert samples == {rank: [common, *(one["optimizer.lr"] for one in drawn)] for rank in ranks}


def test_the_three_sweeps_have_the_seeds_and_metrics_of_their_stage(tmp_path):
    write_space(tmp_path, "tuned", TUNED)
    tuning, common, tuned = (plan_of(tmp_path, "tuned", name) for name in ("tuning", "common", "tuned"))
    assert [one.name for one in (tuning, common, tuned)] == ["tuned/tuning", "tuned", "tuned/tuned"]
    assert [one.space.goal.metric for one in (tuning, common)] == ["validation/accuracy/mean", "accuracy/mean"]
    assert [one.num_trials for one in (tuning, common, tuned)] == [6, 4, 4]
    assert [one.key for one in common.grid()] == [one.key for one in tuned.grid()]  # nothing is chosen yet


def test_a_tuned_arm_runs_with_its_own_values_under_the_name_of_the_arm(tmp_path):
    write_space(tmp_path, "tuned", TUNED)
    with chdir(tmp_path):
        options = planned_sweeps(TuneOptions("tuned"))[2]
        stage = options.request.stage
        chosen = [{"arm": {"lora.rank": 1}, "sample": 2, "values": {"optimizer.lr": 0.25}, "score": 0.5}]
        own = {**stage.model_dump(mode="json"), "chosen": chosen}
        plan = Plan.of(replace(options, space_options={STAGE: own}).request)
    rates = {trial.arm["lora.rank"]: trial.config["optimizer"]["lr"] for trial in plan.grid()}
    assert rates == {1: 0.25, 4: plan.base.optimizer.lr}
    assert all({*trial.arm} == {"lora.rank"} for trial in plan.grid())
    assert plan.unnamed_changes() == []


def test_the_stage_belongs_to_the_definition_of_a_sweep(tmp_path):
    write_space(tmp_path, "tuned", TUNED)
    digests = {plan_of(tmp_path, "tuned", name).digests()["definition"] for name in ("tuning", "common", "tuned")}
    assert len(digests) == 3


LR = {"optimizer.lr": {"loguniform": [0.01, 0.5]}}
WRONG = {
    "varied in space": (
        {"space": {"lora.rank": {"grid": [1, 4]}, "optimizer.lr": {"grid": [0.1, 0.2]}}},
        "`tune_each` tunes `optimizer.lr`, which cannot also be in `space`.",
    ),
    "fixed": (
        {"fixed": {**FIXED, "optimizer.lr": 0.2}},
        "`tune_each` tunes `optimizer.lr`, which cannot also be in `fixed`.",
    ),
    "named": (
        {"space": {}, "named": {"a": {"optimizer.lr": 0.2}, "b": {}}, "baseline": {"arm": "b"}},
        "`tune_each` tunes `optimizer.lr`, which cannot also be in `named`.",
    ),
    "ablated": (
        {"tune_each": {"space": {"lora.dropout": {"uniform": [0.0, 0.5]}}}, "ablate": {"lora.dropout": 0.3}},
        "`tune_each` tunes `lora.dropout`, which cannot also be in `ablate`.",
    ),
    "parent in space": (
        {"space": {"optimizer": {"grid": [{"name": "sgd", "lr": 0.1}, {"name": "sgd", "lr": 0.3}]}}, "baseline": None},
        "`tune_each` tunes `optimizer.lr`, so `optimizer` cannot be in `space`.",
    ),
    "parent in named": (
        {"space": {}, "named": {"a": {"optimizer": {"name": "sgd", "lr": 0.1}}, "b": {}}, "baseline": {"arm": "b"}},
        "`tune_each` tunes `optimizer.lr`, so `optimizer` cannot be in `named`.",
    ),
    "field in fixed": (
        {
            "tune_each": {"space": {"optimizer": {"choice": [{"name": "sgd", "lr": 0.1}, {"name": "sgd", "lr": 0.3}]}}},
            "fixed": {**FIXED, "optimizer.lr": 0.2},
        },
        "`tune_each` tunes `optimizer`, so `optimizer.lr` cannot be in `fixed`.",
    ),
    "unknown": (
        {"tune_each": {"space": {"optimizer.lrr": {"loguniform": [0.01, 0.5]}}}},
        "search space tuned: `optimizer.lrr` is not a hyperparameter of this run; did you mean `optimizer.lr`",
    ),
    "out of range": (
        {"tune_each": {"space": {"optimizer.momentum": {"uniform": [0.5, 1.5]}}}},
        "optimizer.momentum",
    ),
    "grid": (
        {"tune_each": {"space": {"optimizer.lr": {"grid": [0.1, 0.2]}}}},
        "`tune_each` needs a range or a `choice` for each name, but `tune_each.space.optimizer.lr` has `grid`",
    ),
    "condition": (
        {"tune_each": {"space": {"optimizer.lr": {"uniform": [0.1, 0.2], "when": {"lora.rank": 1}}}}},
        "`tune_each` tunes every arm alike, but `tune_each.space.optimizer.lr` has the condition `when`",
    ),
    "one sample": ({"tune_each": {"space": LR, "samples": 1}}, "`tune_each.samples`"),
    "too few values": (
        {"tune_each": {"space": {"lora.dropout": {"choice": [0.1, 0.2]}}, "samples": 8}},
        "is 8 (the untuned value and 7 drawn ones), but `tune_each.space` has only 2 different values; use fewer",
    ),
    "no validation images": (
        {"fixed": {**FIXED, "data.validation_fraction": 0.0}},
        "`tune_each` chooses by validation images, but `data.validation_fraction` is 0",
    ),
    "no validation metric": (
        {"objective": {"metric": "loss/train", "mode": "min"}},
        "`tune_each` needs an objective that is also measured on validation images, but `objective.metric` is",
    ),
    "objective on validation images": (
        {"objective": {"metric": "validation/accuracy/mean", "mode": "max"}},
        "`tune_each` chooses by validation images and needs an `objective.metric` on test images, but it is "
        "validation/accuracy/mean; use accuracy/mean.",
    ),
    "search": (
        {"search": {"name": "random", "samples": 4}, "space": {"lora.rank": {"choice": [1, 4]}}, "seeds": [0]},
        "`tune_each` needs `search` grid, but it is random.",
    ),
    "scheduler": (
        {"scheduler": "asha"},
        "`tune_each` needs `scheduler` none, because samples are compared after the last round, but it is asha.",
    ),
    "seed": ({"seeds": [0, 1000]}, "`tune_each.seed` must not be one of the `seeds`, but it is 1000."),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_refused_before_anything_runs(tmp_path, case):
    changes, message = WRONG[case]
    write_space(tmp_path, "tuned", {**TUNED, **changes})
    done = fedsweep(tmp_path, "tune", "tuned", code=2, trains=False)
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "mlruns").exists()


def test_a_tuned_hyperparameter_cannot_be_overridden(tmp_path):
    write_space(tmp_path, "tuned", TUNED)
    done = fedsweep(tmp_path, "tune", "tuned", "optimizer.lr=0.2", code=2, trains=False)
    assert "`optimizer.lr` is tuned by search space tuned and cannot be overridden." in done.stderr


@pytest.mark.parametrize("stage", ["tuning", "tuned"])
def test_a_search_space_with_the_name_of_a_linked_sweep_is_refused(tmp_path, stage):
    write_space(tmp_path, "tuned", TUNED)
    write_space(tmp_path, f"tuned/{stage}", GRID)
    for resume in ([], ["--resume"]):
        done = fedsweep(tmp_path, "tune", "tuned", *resume, code=2, trains=False)
        taken = f"`tune_each` runs a sweep `tuned/{stage}`, but a search space has this name; rename the search space."
        assert taken in " ".join(done.stderr.split()) or (resume and "there is no sweep" in done.stderr)


def test_a_fixed_optimizer_gives_the_untuned_value_of_its_learning_rate(tmp_path):
    write_space(tmp_path, "tuned", {**TUNED, "fixed": {**FIXED, "optimizer": {"name": "adam", "lr": 0.001}}})
    plan = plan_of(tmp_path, "tuned", "tuning")
    assert [trial.config["optimizer"]["name"] for trial in plan.grid()] == ["adam"] * 6
    assert plan.grid()[0].config["optimizer"]["lr"] == 0.001


def test_one_factor_arms_are_the_same_in_all_linked_sweeps(tmp_path):
    grid = {"lora.rank": {"grid": [1, 4]}, "lora.position": {"grid": ["l0", "both"]}}
    baseline = {"lora.rank": 4, "lora.position": "both"}
    write_space(tmp_path, "tuned", {**TUNED, "space": grid, "design": "one_factor", "baseline": baseline})
    tuning, common = plan_of(tmp_path, "tuned", "tuning"), plan_of(tmp_path, "tuned", "common")
    stage = tuning.request.stage
    assert len(common.arms) == 3
    assert list({identity(one): one for one in map(stage.untuned, tuning.arms)}.values()) == common.arms


def test_a_dry_run_prices_all_three_sweeps(tmp_path):
    write_space(tmp_path, "tuned", TUNED)
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
    with chdir(tmp_path):
        drawn = first_stage(TuneOptions("tuned").asked).drawn
    shown = [row[1] for row in rows if len(row) == 2 and row[0].isdigit()]
    assert shown[-2:] == [f"{one['optimizer.lr']:.4g}" for one in drawn]


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
    started = _started(options)
    assert {name: one.folder for name, one in started.items()} == {"tuning": begun.folder}
    own = _options_of("tuned", options, started, console)
    stage = own.request.stage
    assert (stage.name, stage.sweep) == ("tuned", begun.folder.name)
    assert [(one.arm["lora.rank"], one.sample) for one in stage.chosen] == [(1, 2), (4, None)]
    assert said.getvalue() == "No sample of arm lora.rank=4 has finished, so it runs at the common values.\n"
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
    assert {name: one.folder.name for name, one in _started(last).items()} == {"tuning": newer.folder.name}
    for sweep_id in (begun.folder.name, *created):
        found = _started(replace(last, sweep_id=sweep_id))
        assert [one.folder.name for one in found.values()] == [begun.folder.name, *created]
    with pytest.raises(UserError, match="there is no sweep `nothing` of tuned/tuning"):
        _started(replace(last, sweep_id="nothing"))
    assert _started(TuneOptions("tuned")) == {}


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
    assert "Each arm tuned, 3 samples" in " ".join(done.stdout.split())
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
