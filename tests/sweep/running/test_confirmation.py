"""A search that chooses by validation images, and the confirmation of its best arms with fresh seeds."""

import re
from types import SimpleNamespace

import pytest
import yaml

from fedsweep.common.errors import UserError
from fedsweep.common.progress import silent_console
from fedsweep.results.tuned_arms import STAGE
from fedsweep.sweep.running.confirmation import images_that_chose, write_confirmation
from tests.places import PLACE
from tests.report.conftest import make_manifest
from tests.report.helpers import rows_of
from tests.sweep.helpers import GRID, SAMPLED, SMALL, fedsweep, newest, runs, write_space

VALIDATED = {**SMALL, "data.validation_fraction": 0.2, "evaluation.test_rounds": "last"}
SEARCH = {
    **SAMPLED,
    "fixed": VALIDATED,
    "objective": {"mode": "max"},
    "search": {"name": "random", "samples": 4, "seed": 0},
}


@pytest.mark.slow
def test_a_search_chooses_by_validation_images_and_is_confirmed_on_the_test_images(tmp_path):
    write_space(tmp_path, "search", SEARCH)
    done = fedsweep(tmp_path, "tune", "search")
    assert "on the test images, so" not in done.stdout + done.stderr
    assert "On the test images, which had no part in the choice" in " ".join(done.stdout.split())
    sweep = newest(tmp_path, "search")
    assert sweep.manifest().metric == "validation/accuracy/mean"
    for trial in sweep.trials():
        tested = [one.round for one in trial.history if "accuracy/mean" in one.metrics]
        assert tested == [round for round in (0, SMALL["federation.rounds"]) if round <= trial.last_round]
        assert all("validation/accuracy/mean" in one.metrics for one in trial.history)
    (parent,), _, _ = runs(tmp_path, "search")
    assert parent.data.tags["fedsweep.chosen_by"] == "validation/accuracy/mean (validation images)"

    fedsweep(tmp_path, "confirm", "search", "--dry-run", trains=False)
    assert not (tmp_path / "search_spaces" / "confirm").exists()
    done = fedsweep(tmp_path, "confirm", "search", "--top", "2", "--seeds", "2")
    name = f"confirm/search/{sweep.folder.name}-top2-seeds2"
    assert f"search_spaces/{name}.yaml" in done.stderr
    written = yaml.safe_load((tmp_path / "search_spaces" / f"{name}.yaml").read_text())
    head, _, *rows = rows_of((newest(tmp_path, name).folder / "report" / "table.md").read_text())
    assert [row[head.index("arm")] for row in rows] == ["baseline", "best_1", "best_2"]
    assert [row[head.index("n")] for row in rows] == ["2", "2", "2"]
    best = [one.plan.arm for one in sorted(sweep.trials(), key=_reached, reverse=True)[:2]]
    assert [written["named"]["best_1"], written["named"]["best_2"]] == best
    confirmed = newest(tmp_path, name)
    assert confirmed.manifest().metric == "accuracy/mean"
    assert {trial.plan.seed for trial in confirmed.trials()} == {1, 2}
    fedsweep(tmp_path, "confirm", "search", "--top", "9", code=2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scheduler": "pbt"}, "pbt changes hyperparameters during the training"),
        (
            {"options": {STAGE: {"name": "tuning", "names": ["optimizer.lr"], "drawn": []}}},
            "ablations/x/tuned compares",
        ),
    ],
)
def test_a_sweep_whose_arms_cannot_be_repeated_is_not_confirmed(changes, reason):
    name = "ablations/x/tuning" if "options" in changes else "ablations/x"
    sweep = SimpleNamespace(manifest=lambda: make_manifest(name=name, **changes))
    with pytest.raises(UserError, match=reason):
        write_confirmation(sweep, 1, 5, silent_console())


@pytest.mark.parametrize(
    ("metric", "search", "said"),
    [
        ("validation/accuracy/mean", "tpe", None),
        ("accuracy/mean", "tpe", "were chosen by the test images"),
        ("validation/accuracy/clients/mean", "tpe", "some of them are tuning images of the search"),
        ("accuracy/clients/mean", "grid", None),
    ],
)
def test_a_confirmation_on_images_that_chose_the_arm_says_so(metric, search, said):
    found = images_that_chose(make_manifest(metric=metric, search=search))
    assert found is None if said is None else said in found


def _reached(trial):
    finished = trial.outcome is not None and trial.outcome.outcome == "finished"
    return trial.history[-1].metrics["validation/accuracy/mean"] if finished else -1.0


@pytest.mark.parametrize(
    ("metric", "setting"),
    [("accuracy/mean", "data.validation_fraction"), ("accuracy/clients/mean", "partition.tuning_share")],
)
def test_a_search_needs_validation_images_or_says_that_it_chooses_by_the_test_images(tmp_path, metric, setting):
    changes = {"fixed": {**SMALL, "partition.test_share": 0.1}, "objective": {"metric": f"validation/{metric}"}}
    write_space(tmp_path, "search", {**SEARCH, **changes})
    done = fedsweep(tmp_path, "tune", "search", code=2, trains=False)
    assert PLACE.sub("", done.stderr.splitlines()[-1].removeprefix("fedsweep: ")) == (
        f"`objective.metric` validation/{metric} needs validation images, "
        f"but `{setting}` is 0; set it to 0.2, for example, or set `objective.metric` to {metric}, "
        "which uses the test images."
    )
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.parametrize(
    ("metric", "share", "said"),
    [
        ("validation/accuracy/clients/mean", {}, "needs validation images, but `partition.tuning_share` is 0"),
        (
            "validation/accuracy/clients/mean",
            {"partition.tuning_share": 0.1},
            "needs test images of the clients, but `partition.test_share` is 0",
        ),
        ("accuracy/clients/mean", {}, "needs test images of the clients, but `partition.test_share` is 0"),
    ],
)
def test_a_search_by_the_clients_own_models_needs_their_images(tmp_path, metric, share, said):
    write_space(tmp_path, "search", {**SEARCH, "fixed": {**SMALL, **share}, "objective": {"metric": metric}})
    done = fedsweep(tmp_path, "tune", "search", code=2, trains=False)
    assert PLACE.sub("", done.stderr.splitlines()[-1].removeprefix("fedsweep: ")) == (
        f"`objective.metric` {metric} {said}; set it to 0.2, for example."
    )


def test_a_scheduler_needs_the_test_images_in_all_rounds_if_it_compares_trials_by_them(tmp_path):
    changes = {"objective": {"metric": "accuracy/mean"}, "scheduler": "arms", "search": "grid"}
    write_space(tmp_path, "grid", {**GRID, **changes, "fixed": VALIDATED})
    said = fedsweep(tmp_path, "tune", "grid", code=2, trains=False).stderr.splitlines()[-1]
    assert PLACE.sub("", said.removeprefix("fedsweep: ")) == (
        "`scheduler` arms compares trials before the last round and needs "
        "`evaluation.test_rounds` all for `objective.metric` accuracy/mean, but it is last."
    )


@pytest.mark.parametrize(("changes", "who"), [({"scheduler": "arms"}, "scheduler arms"), ({}, None)])
def test_a_pruned_grid_says_at_its_start_that_it_chooses_by_the_test_images(tmp_path, changes, who):
    write_space(tmp_path, "grid", {**GRID, **changes})
    done = fedsweep(tmp_path, "tune", "grid", "--dry-run", trains=False)
    found = re.findall(r"The (.*) chooses between trials by accuracy/mean on the test images", done.stderr)
    assert found == ([who] if who else [])
