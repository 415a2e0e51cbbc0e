"""The finding that no arm is better than chance, or better than the untuned model of round 0."""

from dataclasses import replace

import numpy as np
import pytest

from fedsweep.report.untuned_model import Ends, FinishedArm, above_chance, better_than_untuned
from fedsweep.results.history import LAST_ROUNDS
from tests.report.helpers import printed, tabulate

NOTHING_LEARNED = "No arm is significantly better than the untuned model of round 0 in accuracy/mean"
AT_CHANCE = "No arm is distinguishable from chance in accuracy/mean"


def at_chance(trials):
    for rank in (4, 8):
        for seed, end in enumerate((0.101, 0.098, 0.102)):
            trials.add(rank, seed, [0.1, 0.1, 0.1, 0.1, end])
    return trials


def planned(trials, **fields):
    """Give every trial's plan these fields, and return the trials."""
    trials.records = [replace(one, plan=one.plan.model_copy(update=fields)) for one in trials.records]
    return trials


def finished(gains, images=0, first=0.1):
    """Return one arm per list of gains, which is measured on `images` test images with a chance of 10%."""
    return [FinishedArm([Ends(first, first + gain) for gain in arm], 0.1, images) for arm in gains]


def test_a_sweep_that_learned_nothing_is_the_first_finding(manifest, trials):
    table = tabulate(manifest(), at_chance(trials))
    first, *others = table.findings()
    assert first == (
        f"{NOTHING_LEARNED}, so the differences between arms say little. "
        "Check the labels, the learning rate and the number of rounds."
    )
    assert others
    assert NOTHING_LEARNED in " ".join(printed(table, 120).split())
    assert first in table.markdown()


def test_an_untrained_backbone_is_given_as_the_reason(manifest, trials):
    planned(at_chance(trials), config={"backbone": {"pretrained": "none"}})
    assert "train one with `fedsweep pretrain`" in tabulate(manifest(), trials).findings()[0]


@pytest.mark.parametrize("start", [0.08, 0.125])
def test_arms_that_predict_one_class_are_at_chance_wherever_they_started(manifest, trials, start):
    for rank in (4, 8):
        for seed in range(3):
            trials.add(rank, seed, [start, 0.1])
    first = tabulate(manifest(), planned(trials, images={"test": 200}, chance=0.1)).findings()[0]
    assert first.startswith(
        f"{AT_CHANCE}: predicting the same class for all test images reaches 10.00%. The differences between arms "
        "therefore mean nothing."
    )


def test_chance_is_also_known_for_the_mean_over_the_last_rounds(manifest, trials):
    planned(at_chance(trials), images={"test": 200}, chance=0.1)
    trials.records = [
        replace(one, history=[
            replace(record, metrics={**record.metrics, LAST_ROUNDS: record.metrics["accuracy/mean"]})
            for record in one.history
        ])
        for one in trials.records
    ]  # fmt: skip
    first = tabulate(manifest(metric=LAST_ROUNDS), trials).findings()[0]
    assert first.startswith(f"No arm is distinguishable from chance in {LAST_ROUNDS}")


@pytest.mark.parametrize("finals", [{4: [0.5, 0.6, 0.5], 8: [0.2, 0.2, 0.2]}, {8: [0.9]}])
@pytest.mark.parametrize("fields", [{}, {"images": {"test": 200}, "chance": 0.1}])
def test_a_sweep_that_learned_has_no_such_finding(manifest, trials, finals, fields):
    found = " ".join(tabulate(manifest(), planned(trials.arms(finals), **fields)).findings())
    assert NOTHING_LEARNED not in found
    assert AT_CHANCE not in found


def test_arms_below_the_untuned_model_have_learned_nothing(manifest, trials):
    assert NOTHING_LEARNED in tabulate(manifest(), trials.arms({8: [0.1, 0.12, 0.11]})).findings()[0]


@pytest.mark.parametrize(("mode", "learned"), [("min", True), ("max", False)])
def test_a_lower_loss_is_an_improvement(manifest, trials, mode, learned):
    for seed, end in enumerate((0.4, 0.5, 0.45)):
        trials.add(8, seed, [2.3, end], metric="loss")
    planned(trials, images={"test": 200}, chance=0.1)
    found = " ".join(tabulate(manifest(metric="loss", mode=mode), trials).findings())
    assert ("untuned" not in found) is learned
    assert "chance" not in found


def test_sweeps_without_a_finished_trial_have_no_such_finding(manifest, trials):
    trials.add(8, 0, [0.1, 0.1], "pruned")
    assert "untuned" not in " ".join(tabulate(manifest(), trials).findings())


def test_small_gains_count_if_the_seeds_agree():
    assert better_than_untuned(finished([[0.011, 0.012, 0.010, 0.011]]))
    assert not better_than_untuned(finished([[0.03, -0.02, 0.01, -0.015]]))


def test_a_gain_on_too_few_images_does_not_count():
    # One arm needs 1.645 squared = 2.7 images, and two arms need 1.96 squared = 3.8.
    assert not better_than_untuned(finished([[0.02]], images=100))
    assert better_than_untuned(finished([[0.03]], images=100))
    assert not better_than_untuned(finished([[0.03], [0.03]], images=100))


def test_more_test_images_make_a_small_distance_to_chance_clear():
    near = [[0.02] * 3]
    assert not above_chance(finished(near, images=300))
    assert above_chance(finished(near, images=3000))


@pytest.mark.parametrize(("images", "at_chance"), [({"in_domain_test": 300}, True), ({}, False)])
def test_images_of_held_out_domains_do_not_count(manifest, trials, images, at_chance):
    for seed in range(3):
        trials.add(8, seed, [0.05, 0.12])
    planned(trials, images={"train": 900, "test": 3000, **images}, chance=0.1)
    assert (AT_CHANCE in " ".join(tabulate(manifest(), trials).findings())) is at_chance


def test_each_arm_is_compared_with_chance_on_its_own_test_images(manifest, trials):
    trials.arms({4: [0.1] * 3, 8: [0.2] * 3})
    chances = {4: 0.1, 8: 0.2}
    changed = [{"images": {"test": 200}, "chance": chances[one.plan.arm["lora.rank"]]} for one in trials.records]
    trials.records = [
        replace(one, plan=one.plan.model_copy(update=fields))
        for one, fields in zip(trials.records, changed, strict=True)
    ]
    assert (
        "predicting the same class for all test images reaches 10.00% to 20.00%."
        in (tabulate(manifest(), trials).findings()[0])
    )


def test_an_arm_that_varies_much_hides_no_other_arm_and_does_not_count_itself():
    steady, wild = [0.06, 0.07, 0.065], [-0.5, 0.1, -0.3]
    assert better_than_untuned(finished([steady, wild]))
    assert not better_than_untuned(finished([[0.0, 0.001, -0.001], [0.1, -0.02, 0.05]]))


@pytest.mark.parametrize("metric", ["accuracy/domain_spread", "accuracy/clients/mean"])
def test_chance_is_known_only_for_the_mean_accuracy(manifest, trials, metric):
    for seed, end in enumerate((0.03, 0.02, 0.025)):
        trials.add(8, seed, [0.3, end], metric=metric)
    planned(trials, images={"test": 200}, chance=0.1)
    assert "chance" not in " ".join(tabulate(manifest(metric=metric, mode="min"), trials).findings())


@pytest.mark.parametrize("deviation", [0.003, 0.03])
@pytest.mark.parametrize("arms", [1, 10])
def test_random_gains_seldom_count(deviation, arms):
    rng = np.random.default_rng(0)
    drawn = rng.normal(0, deviation, (400, arms, 3)).tolist()
    assert 0.01 < np.mean([better_than_untuned(finished(gains)) for gains in drawn]) < 0.08


def test_random_predictions_are_seldom_above_chance():
    accuracies = np.random.default_rng(0).binomial(200, 0.1, (400, 5, 1)) / 200
    found = [above_chance(finished(one, images=200, first=0)) for one in accuracies.tolist()]
    assert 0.01 < np.mean(found) < 0.1
