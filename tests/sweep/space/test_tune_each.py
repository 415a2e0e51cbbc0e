"""Search spaces with `tune_each`: the samples, the plans of the linked sweeps, and the refusals."""

from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest

from fedsweep.results.arms import identity
from fedsweep.results.tuned_arms import STAGE
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.linked_sweeps import planned_sweeps
from fedsweep.sweep.running.tune import TuneOptions
from fedsweep.sweep.search.proposals import drawn_values
from fedsweep.sweep.space.axes import Axis
from tests.sweep.helpers import GRID, TUNED, fedsweep, write_space

FIXED = TUNED["fixed"]


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


def test_every_sample_is_tried_with_each_seed_of_tuning(tmp_path):
    write_space(tmp_path, "tuned", {**TUNED, "tune_each": {**TUNED["tune_each"], "seeds": 3}})
    plan = plan_of(tmp_path, "tuned", "tuning")
    tried = {(identity(one.arm), one.seed) for one in plan.grid()}
    assert {seed for _, seed in tried} == {1000, 1001, 1002}
    assert len(tried) == plan.num_trials == 3 * len({arm for arm, _ in tried}) == 18


def test_a_tuned_arm_runs_with_its_chosen_values_under_the_name_of_the_arm(tmp_path):
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
        "`optimizer.lrr` is not a hyperparameter of this run; did you mean `optimizer.lr`",
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
    "no tuning images": (
        {"objective": {"metric": "accuracy/clients/mean", "mode": "max"}},
        "`tune_each` chooses by validation images, but `partition.tuning_share` is 0",
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
    "second seed": (
        {"seeds": [0, 1001], "tune_each": {"space": LR, "seeds": 2}},
        "`tune_each` tries samples with the seeds 1000 to 1001, which must not be in `seeds`, but 1001 is; use another",
    ),
    "streams": (
        {"tune_each": {"space": {"seed_streams": {"choice": ["all", ["batches"]]}}}},
        "`tune_each` cannot tune `seed_streams`.",
    ),
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


@pytest.mark.parametrize("name", ["mine/tuned", "mine/tuning"])
def test_a_search_space_may_be_named_like_a_stage(tmp_path, name):
    write_space(tmp_path, name, TUNED)
    assert plan_of(tmp_path, name, "tuning").request.name == f"{name}/tuning"
    assert plan_of(tmp_path, name, "common").request.name == name


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
