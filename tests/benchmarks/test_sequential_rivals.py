"""AdaStop as the benchmark runs it, against the package itself."""

import numpy as np
import pytest

from benchmarks import sequential, sequential_rivals

adastop = pytest.importorskip("adastop", reason="needs AdaStop, to which only a benchmark compares fedsweep")


@pytest.mark.parametrize("noise", ["normal", "very skewed"])
@pytest.mark.parametrize("truth", [(0.0,), (0.0, 1.0, 2.0), sequential.MIXED[7]], ids=len)
def test_adastop_with_arrays_decides_as_the_package(truth, noise):
    fast = sequential_rivals.adastop_class()

    class WithThePackagesPermutations(fast):
        def drawn(self, count, n):
            return np.array([self.rng.permutation(2 * n)[:n] for _ in range(count)], int).reshape(count, n)

    trials = sequential.draw(np.random.default_rng(3), 10, truth, 1.0, noise)[:, :, : sequential_rivals.AT_MOST]
    ours, package = (
        sequential_rivals.adastop(one, trials, 7, 0.05)
        for one in (WithThePackagesPermutations, adastop.MultipleAgentsComparator)
    )
    for one, other in zip(ours, package, strict=True):
        assert np.array_equal(one, other)
