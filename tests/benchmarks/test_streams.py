"""The shares of a seed's random streams in the variance of a sweep."""

import numpy as np
import pytest

from benchmarks import streams
from benchmarks.streams import STREAMS, SUBSETS, Job


def test_components_of_the_variance_are_estimated_without_bias():
    rng, found = np.random.default_rng(0), []
    true = {frozenset({"cohort"}): 100.0, frozenset({"cohort", "batches"}): 9.0, frozenset(STREAMS): 1.0}
    for _ in range(3000):
        cells = dict.fromkeys(SUBSETS, 0.0)
        for effect, variance in true.items():
            of_levels: dict[frozenset, float] = {}
            for level in SUBSETS:
                cells[level] += of_levels.setdefault(level & effect, rng.normal() * variance**0.5)
        found.append(streams.components(cells))
    means = {effect: float(np.mean([one[effect] for one in found])) for effect in SUBSETS[1:]}
    for effect in SUBSETS[1:]:
        spread = float(np.std([one[effect] for one in found])) / len(found) ** 0.5
        assert means[effect] == pytest.approx(true.get(effect, 0.0), abs=4 * spread)
    assert means[frozenset({"cohort"})] == pytest.approx(100, rel=0.1)
    sd, *parts = streams.shares(found)
    assert sd == pytest.approx(110**0.5, rel=0.05)
    alone, in_all = parts[2:4]  # the cohort's
    assert alone == pytest.approx(100 / 1.1, rel=0.05)
    assert in_all == pytest.approx(100, abs=3)
    assert sum(parts[:-1:2]) + parts[-1] == pytest.approx(100)


@pytest.mark.slow
def test_each_stream_changes_the_run():
    jobs = [Job(1, int(bool(one)), frozenset(one), 1) for one in ((), *((name,) for name in STREAMS), STREAMS)]
    assert len({streams.accuracy_of(job) for job in jobs}) == len(jobs)
