"""The finding that no arm differs from the untuned model of round 0."""

from dataclasses import replace

import numpy as np
import pytest

from fedsweep.report.untuned_model import CLEAR, distinguishable
from tests.report.helpers import printed, tabulate

NOTHING_LEARNED = "No arm is distinguishable from the untuned model of round 0 in accuracy/mean"


def at_chance(trials):
    for rank in (4, 8):
        for seed, end in enumerate((0.101, 0.098, 0.102)):
            trials.add(rank, seed, [0.1, 0.1, 0.1, 0.1, end])
    return trials


def test_a_sweep_at_chance_is_the_first_finding(manifest, trials):
    table = tabulate(manifest(), at_chance(trials))
    first, *others = table.findings()
    assert first == (
        f"{NOTHING_LEARNED}, so differences between arms mean nothing. "
        "Check the labels, the learning rate and the number of rounds."
    )
    assert others
    assert NOTHING_LEARNED in " ".join(printed(table, 120).split())
    assert first in table.markdown()


def test_an_untrained_backbone_is_given_as_the_reason(manifest, trials):
    at_chance(trials)
    trials.records = [
        replace(one, plan=one.plan.model_copy(update={"config": {"backbone": {"pretrained": "none"}}}))
        for one in trials.records
    ]
    assert "train one with `fedsweep pretrain`" in tabulate(manifest(), trials).findings()[0]


@pytest.mark.parametrize("finals", [{4: [0.5, 0.6, 0.5], 8: [0.2, 0.2, 0.2]}, {8: [0.9]}])
def test_a_sweep_that_learned_has_no_such_finding(manifest, trials, finals):
    assert NOTHING_LEARNED not in " ".join(tabulate(manifest(), trials.arms(finals)).findings())


def test_arms_below_the_untuned_model_are_distinguishable(manifest, trials):
    assert NOTHING_LEARNED not in " ".join(tabulate(manifest(), trials.arms({8: [0.1, 0.12, 0.11]})).findings())


def test_sweeps_without_a_finished_trial_have_no_such_finding(manifest, trials):
    trials.add(8, 0, [0.1, 0.1], "pruned")
    assert "untuned" not in " ".join(tabulate(manifest(), trials).findings())


def test_small_gains_count_if_the_seeds_agree():
    assert distinguishable([[0.011, 0.012, 0.010, 0.011]])
    assert not distinguishable([[0.03, -0.02, 0.01, -0.015]])
    assert distinguishable([[CLEAR + 0.001]])
    assert not distinguishable([[CLEAR]])


def test_random_gains_seldom_count():
    rng = np.random.default_rng(0)
    hits = [distinguishable(rng.normal(0, 0.008, (10, 3)).tolist()) for _ in range(400)]
    assert 0 < np.mean(hits) < 0.08
