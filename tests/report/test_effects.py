"""Main effects and interactions, compared with statsmodels, loops and grids with constructed effects."""

import itertools

import numpy as np
import pandas as pd
import pytest
from statsmodels.stats.anova import AnovaRM

from fedsweep.report.arm_statistics import summarise
from fedsweep.report.effects import Effects, Factorial, decompose
from tests.report.helpers import accepts_columns, tabulate

NAMES = ("lora.rank", "optimizer.lr")
RANKS, RATES = (4, 8, 16), (0.01, 0.1)
BASELINE = {"lora.rank": 8, "optimizer.lr": 0.1}


def fill(trials, value, seeds=range(4), grid=None) -> None:
    """Add a finished trial for each cell of a grid and each seed, with the accuracy `value(cell, seed)`."""
    for rank, rate in grid or itertools.product(RANKS, RATES):
        for seed in seeds:
            trials.add({"lora.rank": rank, "optimizer.lr": rate}, seed, [0.2, value(rank, rate, seed)])


def noisy(scale=0.01):
    rng = np.random.default_rng(7)
    drawn = {key: rng.normal(0, scale) for key in itertools.product(RANKS, RATES, range(8))}
    return lambda rank, rate, seed: 0.5 + 0.01 * seed + 0.002 * rank * (rate == 0.1) + drawn[rank, rate, seed]


def decomposed(manifest, trials, names=NAMES, baseline=None) -> Factorial | str:
    sweep = manifest(varied=names, baseline=baseline)
    return decompose(names, summarise(sweep, trials.records), baseline)


def test_f_equals_the_repeated_measures_anova_of_statsmodels(manifest, trials):
    fill(trials, noisy())
    found = decomposed(manifest, trials)
    rows = [
        {"seed": one.plan.seed, "rank": one.plan.arm["lora.rank"], "rate": one.plan.arm["optimizer.lr"],
         "value": one.history[-1].metrics["accuracy/mean"]}
        for one in trials.records
    ]  # fmt: skip
    table = AnovaRM(pd.DataFrame(rows), "value", "seed", within=["rank", "rate"]).fit().anova_table
    for effect, name in zip(found.effects, ("rank", "rate", "rank:rate"), strict=True):
        assert effect.f == pytest.approx(table.loc[name, "F Value"])
        free = table.loc[name, "Num DF"], table.loc[name, "Den DF"]
        shrunk = effect.degrees[0] / free[0]
        assert effect.degrees[1] == pytest.approx(shrunk * free[1])
        assert 1 / free[0] - 1e-9 <= shrunk <= 1 + 1e-9
        if free[0] == 1:
            assert effect.p == pytest.approx(table.loc[name, "Pr > F"])


def test_the_degrees_of_freedom_follow_greenhouse_and_geisser(manifest, trials):
    """The expected value follows from the covariance of orthonormal contrasts, as in their paper."""
    fill(trials, noisy())
    effect = decomposed(manifest, trials).effects[0]
    by = {(one.plan.seed, *one.plan.arm.values()): one.history[-1].metrics["accuracy/mean"] for one in trials.records}
    means = np.array([[np.mean([by[seed, rank, rate] for rate in RATES]) for rank in RANKS] for seed in range(4)])
    contrasts = np.array([[1, -1, 0], [1, 1, -2]]) / np.array([[2**0.5], [6**0.5]])
    covariance = contrasts @ np.cov(means.T) @ contrasts.T
    epsilon = np.trace(covariance) ** 2 / (2 * (covariance**2).sum())
    assert effect.degrees == pytest.approx((2 * epsilon, 6 * epsilon))


def test_shares_add_up_to_one(manifest, trials):
    fill(trials, noisy())
    found = decomposed(manifest, trials)
    assert sum(one.share for one in found.effects) + found.higher + found.of_seeds + found.rest == pytest.approx(1)
    assert found.higher == 0
    assert [one.factors for one in found.effects] == [
        (("lora.rank",),), (("optimizer.lr",),), (("lora.rank",), ("optimizer.lr",)),
    ]  # fmt: skip


def test_three_factors_have_a_share_for_their_joint_interaction(manifest, trials):
    rng = np.random.default_rng(0)
    names = (*NAMES, "local.steps")
    for rank, rate, steps, seed in itertools.product((4, 8), RATES, (1, 2), range(3)):
        odd = 0.02 if (rank == 4) ^ (rate == 0.1) ^ (steps == 1) else 0.0
        value = 0.5 + odd + rng.normal(0, 1e-4)
        trials.add(dict(zip(names, (rank, rate, steps), strict=True)), seed, [0.2, value])
    found = decomposed(manifest, trials, names)
    assert len(found.effects) == 6
    assert found.higher > 0.99


def test_only_the_constructed_effect_is_found(manifest, trials):
    fill(trials, lambda rank, rate, seed: 0.5 + 0.01 * seed + 0.1 * (rate == 0.1) + 1e-4 * ((rank + 3 * seed) % 5))
    found = decomposed(manifest, trials)
    rank, rate, both = found.effects
    assert rate.share > 0.9
    assert max(rank.share, both.share) < 0.001
    assert rate.p_holm is None or rate.p_holm < 0.001


def test_marginal_means_equal_a_calculation_by_hand(manifest, trials):
    fill(trials, noisy())
    found = decomposed(manifest, trials, baseline=BASELINE)
    by = {(*one.plan.arm.values(), one.plan.seed): one.history[-1].metrics["accuracy/mean"] for one in trials.records}
    for level in found.levels[:3]:
        rank = level.value["lora.rank"]
        assert level.mean == pytest.approx(np.mean([by[rank, rate, seed] for rate in RATES for seed in range(4)]))
        apart = [
            np.mean([by[rank, rate, seed] - by[8, rate, seed] for rate in RATES]) for seed in range(4)
        ]  # fmt: skip
        assert level.difference == (None if rank == 8 else pytest.approx(np.mean(apart)))
        assert (level.difference_interval is None) == (rank == 8)


def test_the_column_names_of_effects_are_accepted_as_columns(manifest, trials):
    fill(trials, noisy())
    table = tabulate(manifest(varied=NAMES, baseline=BASELINE), trials)
    seen = {name for section in table.effects.sections for name in section.head}
    assert {"effect", "F", "degrees of freedom", "level", "95% of difference"} <= seen
    accepts_columns(table.manifest, trials.records, seen)


def test_only_seeds_that_all_cells_finished_count(manifest, trials):
    fill(trials, noisy(), seeds=range(3))
    before = decomposed(manifest, trials)
    trials.add({"lora.rank": 4, "optimizer.lr": 0.1}, 3, [0.2, 0.9])
    trials.add({"lora.rank": 4, "optimizer.lr": 0.1}, 4, [0.2, 0.9], "pruned")
    assert decomposed(manifest, trials) == before
    assert before.seeds == (0, 1, 2)


@pytest.mark.parametrize(
    ("grid", "seeds", "why"),
    [
        ([(4, 0.1), (8, 0.1), (8, 0.01)], range(3), "the arms do not cover all combinations of their values"),
        ([(4, 0.1), (8, 0.1)], range(3), "only one factor varies"),
        (None, range(1), "fewer than two seeds finished in every arm"),
    ],
)
def test_the_reason_for_no_decomposition_is_returned(manifest, trials, grid, seeds, why):
    fill(trials, noisy(), seeds, grid)
    assert decomposed(manifest, trials) == why


def test_trials_with_equal_final_values_have_no_effects(manifest, trials):
    fill(trials, lambda rank, rate, seed: 0.5)
    assert decomposed(manifest, trials) == "all trials have the same final value"


def test_an_arm_that_lacks_a_factor_prevents_the_decomposition(manifest, trials):
    fill(trials, noisy())
    trials.add({"lora.rank": 4}, 0, [0.2, 0.3])
    reason = "some arms lack a hyperparameter that other arms have"
    assert decomposed(manifest, trials) == reason
    effects = Effects.of(manifest(), summarise(manifest(), trials.records))
    assert effects.missing == f"Main effects are not computed, because {reason}."


def test_names_that_vary_together_are_one_factor(manifest, trials):
    for rank, rate, seed in itertools.product((4, 8), RATES, range(3)):
        arm = {"lora.rank": rank, "lora.alpha": 2 * rank, "optimizer.lr": rate}
        trials.add(arm, seed, [0.2, noisy()(rank, rate, seed)])
    found = decomposed(manifest, trials, ("lora.rank", "lora.alpha", "optimizer.lr"))
    assert found.effects[0].factors == (("lora.rank", "lora.alpha"),)
    assert len(found.effects) == 3


def test_the_report_shows_the_effect_of_each_factor(manifest, trials):
    fill(trials, noisy())
    sweep = manifest(varied=NAMES, baseline=BASELINE)
    table = tabulate(sweep, trials)
    markdown = table.markdown()
    assert "## Main effects and interactions" in markdown
    assert "## Marginal means" in markdown
    (said,) = [one for one in table.findings() if one.startswith("Shares of the variation")]
    assert said.count("%") == 3
    assert sum(one.share for one in table.effects.shares) == pytest.approx(1)


@pytest.mark.parametrize(("false_positives", "repetitions"), [(0.05, 120)])
def test_false_effects_are_at_most_as_frequent_as_the_level(false_positives, repetitions):
    """No factor has an effect, but variances differ between levels, for which the degrees of freedom are corrected."""
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(repetitions):
        values = rng.normal(0, 1, (5, 1, 1)) + rng.normal(0, 1, (5, 3, 2)) * np.array([0.2, 1, 3])[None, :, None]
        found += min(_p(values)) <= 0.05
    assert found / repetitions <= false_positives + 0.025


def _p(values: np.ndarray) -> list[float]:
    """Return the Holm-corrected p-values of all effects for final values of shape (seeds, ranks, rates)."""
    from tests.report.conftest import Trials, make_manifest

    trials = Trials()
    for seed, rank, rate in itertools.product(range(5), range(3), range(2)):
        trials.add({"lora.rank": rank, "optimizer.lr": rate}, seed, [0.2, float(values[seed, rank, rate])])
    found = decompose(NAMES, summarise(make_manifest(varied=NAMES, baseline=None), trials.records), None)
    return [one.p_holm for one in found.effects]


def test_one_factor_needs_no_decomposition(manifest, trials):
    trials.arms({4: [0.5, 0.6], 8: [0.5, 0.7]})
    effects = Effects.of(manifest(), summarise(manifest(), trials.records))
    assert effects == Effects()
