"""Arms that a search or a scheduler chose by validation images or by test images."""

from dataclasses import replace

import pytest

from fedsweep.report.choice import arms_on_test, by_validation, on_test_images
from fedsweep.report.formats import data_frame
from fedsweep.report.formats.latex import latex
from tests.report.helpers import by_domain, rows_of, tabulate

VALIDATION = "validation/accuracy/mean"
BY_TEST = (
    "The search tpe and the scheduler asha choose between trials by accuracy/mean on the test images, so their best"
)


def add(trials, arm, seed, validation, test, outcome="finished"):
    """Add a trial with these values on validation images by round, and these values on test images by round."""
    trials.add(arm, seed, test, outcome)
    record = trials.records[-1]
    history = [
        replace(one, metrics={**one.metrics, VALIDATION: value})
        for one, value in zip(record.history, validation, strict=True)
    ]
    trials.records[-1] = replace(record, history=history)


@pytest.fixture
def searched(manifest, trials):
    """Return the table of a search whose best arm by validation images is only the second best on the test images."""
    add(trials, {"optimizer.lr": 0.1}, 0, [0.25, 0.5, 0.70], [0.2, 0.4, 0.61])
    add(trials, {"optimizer.lr": 0.2}, 0, [0.25, 0.5, 0.66], [0.2, 0.4, 0.65])
    add(trials, {"optimizer.lr": 0.9}, 0, [0.25, 0.3], [0.2, 0.3], "pruned")
    settings = {"metric": VALIDATION, "search": "tpe", "scheduler": "asha", "baseline": None, "seeds": (0,)}
    return tabulate(manifest(varied=("optimizer.lr",), **settings), trials)


def test_only_the_chosen_arm_is_shown_on_the_test_images(searched):
    head, _, *rows = rows_of(searched.markdown())
    assert head == ["optimizer.lr", "n", "mean", "on test", "optimism", "MB sent", "note"]
    assert [row[:5] for row in rows] == [
        ["0.1", "1", "70.00", "61.00", "+9.00"],
        ["0.2", "1", "66.00", "-", "-"],
        ["0.9", "0", "-", "-", "-"],
    ]
    assert [row[0] for row in by_domain(searched.markdown())[2:]] == ["0.1"]
    (best, found) = searched.findings()[:2]
    assert best == "Best: lr 0.1 with validation/accuracy/mean 70.00% (n = 1)."
    assert found == (
        "On the test images, which had no part in the choice, lr 0.1 has 61.00%: 9.00 points worse than the value by "
        "which it was chosen from 3 arms (the untuned model: 5.00 points worse)."
    )
    assert not any("on the test images, so" in one for one in searched.caption())


def test_exports_name_the_images_by_which_arms_were_chosen(searched, manifest, trials):
    frame = data_frame.data_frame(searched)
    assert frame["chosen_by"].tolist() == ["validation/accuracy/mean (validation images)"] * 3
    assert frame["test_mean"].tolist()[0] == 0.61
    assert frame["optimism"].tolist()[0] == pytest.approx(0.09)
    assert frame[["test_mean", "optimism"]].isna().all(axis=1).tolist() == [False, True, True]
    by_test = tabulate(manifest(search="tpe", scheduler="asha", baseline=None, seeds=(0,)), trials)
    assert {*data_frame.data_frame(by_test)["chosen_by"]} == {"accuracy/mean (test images)"}
    for export in (by_test.markdown(), latex(by_test), " ".join(by_test.caption())):
        assert BY_TEST in export
    plain = tabulate(manifest(), trials)
    assert "chosen_by" not in data_frame.data_frame(plain)
    assert not any("chooses" in one for one in plain.caption())


def test_a_baseline_is_shown_on_the_test_images_beside_the_best_arm_of_a_pruned_grid(manifest, trials):
    for seed in (0, 1):
        add(trials, 8, seed, [0.2, 0.5, 0.60], [0.2, 0.4, 0.60])
        add(trials, 4, seed, [0.2, 0.5, 0.64 + seed / 50], [0.2, 0.4, 0.63 + seed / 50])
        add(trials, 2, seed, [0.2, 0.5, 0.50], [0.2, 0.4, 0.70])
    pruned = manifest(metric=VALIDATION, scheduler="arms", seeds=(0, 1))
    table = tabulate(pruned, trials)
    found = on_test_images(pruned, table.arms)
    shown = {one.arm.values["lora.rank"]: found.get(one.key) for one in table.arms}
    assert shown[2] is None
    assert (shown[8].value, shown[8].optimism) == (0.60, None)
    assert (shown[4].value, shown[4].optimism, shown[4].untuned) == pytest.approx((0.64, 0.01, 0.0))
    assert [one.arm.values["lora.rank"] for one in arms_on_test(pruned, table.arms)] == [4, 8]
    assert any(
        one.startswith("On the test images, which had no part in the choice, rank 4") for one in table.findings()
    )


def test_a_loss_is_optimistic_if_it_is_lower_on_the_validation_images(manifest, trials):
    for record, (validation, test) in zip(range(2), ((0.4, 0.5), (0.6, 0.45)), strict=True):
        trials.add({"optimizer.lr": record}, 0, [2.0, validation], metric="validation/loss")
        last = trials.records[-1]
        history = [replace(one, metrics={**one.metrics, "loss/test": test}) for one in last.history]
        trials.records[-1] = replace(last, history=history)
    searched = manifest(metric="validation/loss", mode="min", search="random", baseline=None, seeds=(0,))
    found = on_test_images(searched, tabulate(searched, trials).arms)
    ((key, tested),) = found.items()
    assert '"optimizer.lr": 0' in key
    assert tested.optimism == pytest.approx(0.1)


def test_a_second_objective_on_test_images_is_a_choice_by_test_images(manifest, trials):
    trials.arms({8: (0.5,), 4: (0.4,)})
    against = {"metric": "accuracy/worst_domain", "mode": "max"}
    searched = manifest(metric=VALIDATION, against=against, search="tpe", baseline=None, seeds=(0,))
    assert searched.choice_by_test_images == (
        "The search tpe chooses between trials by accuracy/worst_domain on the test images, so its best values are "
        "optimistic."
    )
    assert searched.chosen_by == f"{VALIDATION} (validation images), accuracy/worst_domain (test images)"
    add(trials, {"lora.rank": 8}, 1, [0.5], [0.4])
    assert by_validation(searched.model_copy(update={"against": None}))
    assert not by_validation(searched)
    assert on_test_images(searched, tabulate(searched, trials).arms) == {}


def test_a_choice_by_another_metric_is_not_called_a_choice_by_test_images(manifest, trials):
    for rank, loss in ((8, 0.5), (4, 0.6)):
        trials.add({"lora.rank": rank}, 0, [2.0, loss], metric="loss/train")
    searched = manifest(metric="loss/train", mode="min", search="tpe", baseline=None, seeds=(0,))
    assert "test images" not in " ".join(tabulate(searched, trials).findings())


def test_the_csv_and_chosen_columns_hide_every_value_on_test_images_of_arms_that_were_not_chosen(searched):
    asked = ("accuracy/mean", "loss/test", "domain_spread", "worst_domain", "photo", "megabytes")
    table = replace(searched, manifest=searched.manifest.model_copy(update={"columns": asked}))
    arms = [replace(one, columns=dict.fromkeys((*one.columns, *asked), 0.5)) for one in table.arms]
    table = replace(table, arms=arms)
    headings = ["accuracy/mean", "loss/test", "sd of domains", "worst domain", "photo"]
    for first, row in zip((True, False, False), table.cells(), strict=True):
        assert [row[name] != "-" for name in headings] == [first] * len(headings)
        assert row["MB sent"] != "-"
    assert data_frame.data_frame(table)["domain_spread"].notna().tolist() == [True, False, False]


def test_the_csv_hides_the_test_accuracies_of_arms_that_were_not_chosen(searched):
    frame = data_frame.data_frame(searched)
    assert frame["worst_domain_accuracy"].notna().tolist() == [True, False, False]
    assert frame["accuracy/domain/photo"].notna().tolist() == [True, False, False]
