"""Importances by fANOVA for samples whose objective is a known function of the hyperparameters."""

import re
from functools import partial

import pytest
from optuna.importance import FanovaImportanceEvaluator

from fedsweep.common.randomness import stream
from fedsweep.report import importance
from fedsweep.report.arm_statistics import summarise
from fedsweep.report.effects import Effects
from fedsweep.report.importance import LEAST, importances
from tests.report.helpers import accepts_columns, tabulate

NAMES = ("optimizer.lr", "lora.rank", "method")


@pytest.fixture(autouse=True)
def _fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "FORESTS", 2)
    trees = partial(FanovaImportanceEvaluator, n_trees=16)
    monkeypatch.setattr("optuna.importance.FanovaImportanceEvaluator", trees)


def sample(trials, value, count=40) -> None:
    rng = stream(0, "samples")
    for _ in range(count):
        arm = {
            "optimizer.lr": float(10 ** rng.uniform(-4, -1)),
            "lora.rank": int(rng.integers(1, 17)),
            "method": ["fedra", "all_small"][rng.integers(2)],
        }
        trials.add(arm, 0, [0.2, value(arm)])


@pytest.fixture
def sampled(manifest):
    return manifest(baseline=None, varied=NAMES, search="tpe", seeds=(0,), logarithmic=("optimizer.lr",))


@pytest.mark.parametrize(
    ("value", "first"),
    [
        (lambda arm: 0.5 + 0.02 * arm["lora.rank"], "lora.rank"),
        (lambda arm: 0.5 + 0.2 * (arm["method"] == "fedra") + 0.001 * arm["lora.rank"], "method"),
        (lambda arm: 0.9 if arm["optimizer.lr"] < 1e-3 else 0.4, "optimizer.lr"),
    ],
)
def test_the_deciding_hyperparameter_has_the_largest_importance(sampled, trials, value, first):
    sample(trials, value)
    found = importances(sampled, trials.records)
    assert found[0].name == first
    assert found[0].share > 0.8
    assert sum(one.share for one in found) <= 1 + 1e-9
    assert all(one.spread and 0 <= one.spread[0] <= one.share <= one.spread[1] <= 1 for one in found)


def test_logarithmic_ranges_are_weighed_on_the_logarithmic_scale(sampled, manifest, trials):
    """A third of the logarithmic range is below 1e-3, but only a hundredth of the linear range."""
    sample(trials, lambda arm: (0.9 if arm["optimizer.lr"] < 1e-3 else 0.4) + 0.02 * arm["lora.rank"])
    linear = sampled.model_copy(update={"logarithmic": ()})

    def of_rate(sweep) -> float:
        return next(one.share for one in importances(sweep, trials.records) if one.name == "optimizer.lr")

    assert of_rate(sampled) > 0.5 > of_rate(linear)


def test_importances_are_deterministic_and_ignore_pruned_trials(sampled, trials):
    sample(trials, lambda arm: 0.02 * arm["lora.rank"])
    before = importances(sampled, trials.records)
    trials.add({"optimizer.lr": 0.05, "lora.rank": 1, "method": "fedra"}, 0, [0.2, 0.99], "pruned")
    assert importances(sampled, trials.records) == before


def test_hyperparameters_of_only_some_trials_are_left_out(sampled, trials):
    sample(trials, lambda arm: 0.02 * arm["lora.rank"])
    del trials.records[0].plan.arm["method"]
    assert {one.name for one in importances(sampled, trials.records)} == {"optimizer.lr", "lora.rank"}


@pytest.mark.parametrize(
    ("count", "value", "why"),
    [
        (LEAST - 1, lambda arm: 0.02 * arm["lora.rank"], "9 trials finished, but at least 10 are needed"),
        (LEAST, lambda arm: 0.5, "all trials have the same final value"),
    ],
)
def test_the_reason_for_no_importances_is_shown_below_the_table(sampled, trials, count, value, why):
    sample(trials, value, count)
    assert importances(sampled, trials.records) == why
    table = tabulate(sampled, trials)
    assert table.caption()[-1] == f"No importances: {why}."


def test_the_report_shows_importances_in_a_sentence_and_a_table(sampled, trials):
    sample(trials, lambda arm: 0.02 * arm["lora.rank"])
    effects = Effects.of(sampled, summarise(sampled, trials.records))
    (section,) = effects.sections
    assert section.rows[0][0] == "lora.rank"
    sentence = r"Importance of each hyperparameter for accuracy/mean \(fANOVA\): \d+% for lora\.rank; "
    assert re.match(sentence, effects.findings[0])
    assert [one.name for one in effects.shares] == [row[0] for row in section.rows]
    assert [*section.head] == ["hyperparameter", "share", "forests"]
    accepts_columns(sampled, trials.records, section.head)
