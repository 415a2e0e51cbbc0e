"""The shares of a seed's random streams in the variance of a sweep."""

import sys

import numpy as np
import pytest

from benchmarks import streams
from fedsweep.common import randomness


def test_components_of_the_variance_are_estimated_without_bias():
    rng, levels, found = np.random.default_rng(0), 4, []
    for _ in range(4000):
        parts = (levels, 1, 1), (1, levels, levels), (levels, levels, levels)
        first, pair, all_three = (rng.normal(size=shape) for shape in parts)
        found.append(streams.components(10 * first + 3 * pair + all_three))
    means = {effect: float(np.mean([one[effect] for one in found])) for effect in found[0]}
    assert means.keys() == {(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)}
    assert means[0,] == pytest.approx(100, rel=0.1)
    assert means[1, 2] == pytest.approx(9, rel=0.1)
    assert means[0, 1, 2] == pytest.approx(1, rel=0.1)
    assert means[0, 1] < 0.3  # negative estimates count as 0, so the mean is above the true value 0


@pytest.mark.slow
def test_each_stream_has_its_own_seed(monkeypatch):
    for module in list(sys.modules.values()):  # put back after the test
        if module.__name__.startswith("fedsweep") and hasattr(module, "derived_seed"):
            monkeypatch.setattr(module, "derived_seed", module.derived_seed)
    plain = randomness.stream(3, "cohort").integers(1000)
    runs = [streams.accuracy_of((1, seeds, 1)) for seeds in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0))]
    assert len(set(runs)) == 4
    assert runs[0] == runs[4]
    assert randomness.stream(3, "cohort").integers(1000) == plain
    assert randomness.stream(3, "batches", 1).integers(1000) == randomness.stream(5, "batches", 1).integers(1000)
