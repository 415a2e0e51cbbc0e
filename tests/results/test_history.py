"""Values computed from the history of a run."""

import pytest

from fedsweep.results.history import RoundRecord, mean_of_last, total_megabytes


def test_the_last_rounds_are_averaged_without_the_untuned_model():
    history = [RoundRecord(round, {"accuracy/mean": 10.0**round}, 0.0) for round in range(6)]
    assert mean_of_last(history, "accuracy/mean") == (100 + 1_000 + 10_000 + 100_000) / 4
    assert mean_of_last(history, "accuracy/mean", rounds=1) == 100_000
    assert mean_of_last(history[:3], "accuracy/mean") == 55


def test_megabytes_count_both_directions_of_every_round():
    rounds = [RoundRecord(round, {"bytes/up": 1e6 * round, "bytes/down": 5e5}, 0.0) for round in (1, 2)]
    assert total_megabytes([RoundRecord(0, {"accuracy/mean": 0.1}, 0.0), *rounds]) == pytest.approx(1 + 2 + 0.5 + 0.5)
