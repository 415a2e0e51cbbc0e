"""The variance of a difference between two ranks, with common and with independent initial factors."""

import numpy as np
import pytest

from benchmarks.common_factors import SCORES, ratio, rows, variances


def test_common_factors_cancel_only_in_differences_of_the_same_set():
    rng, seeds = np.random.default_rng(0), 20000
    seed, factors = rng.normal(size=(seeds, 1, 1)), rng.normal(size=(seeds, 1, 2))
    values = 5 * seed + 2 * factors + rng.normal(size=(seeds, 2, 2))
    common, independent = variances(values)
    assert common == pytest.approx(2, rel=0.05)
    assert independent == pytest.approx(2 + 2 * 4, rel=0.05)
    assert ratio(values) == independent / common


def test_each_score_has_a_row():
    values = np.random.default_rng(0).normal(size=(len(SCORES), 8, 2, 2))
    found = list(rows(values))
    assert [row[0] for row in found] == [*SCORES]
    assert len(found) == 4
    assert all(len(row) == 5 for row in found)
