"""Values computed from the history of a run."""

import itertools

import pytest

from fedsweep.results.history import (
    SIMULATED,
    RoundRecord,
    averaged_rounds,
    is_loss,
    mean_of_last,
    on_test,
    on_validation,
    over_last_rounds,
    over_the_run,
    total_megabytes,
    uses_test_images,
)


def test_the_last_rounds_are_averaged_without_the_untuned_model():
    history = [RoundRecord(round, {"accuracy/mean": 10.0**round}, 0.0) for round in range(6)]
    assert mean_of_last(history, "accuracy/mean") == (100 + 1_000 + 10_000 + 100_000) / 4
    assert mean_of_last(history, "accuracy/mean", rounds=1) == 100_000
    assert mean_of_last(history[:3], "accuracy/mean") == 55


def test_megabytes_count_both_directions_of_every_round():
    rounds = [RoundRecord(round, {"bytes/up": 1e6 * round, "bytes/down": 5e5}, 0.0) for round in (1, 2)]
    assert total_megabytes([RoundRecord(0, {"accuracy/mean": 0.1}, 0.0), *rounds]) == pytest.approx(1 + 2 + 0.5 + 0.5)


def test_the_simulated_time_of_a_run_is_the_sum_over_its_rounds():
    rounds = [RoundRecord(round, {SIMULATED: float(round)} if round else {}, 0.0) for round in range(4)]
    assert over_the_run(rounds, SIMULATED) == 6
    assert over_the_run(rounds[:1], SIMULATED) is over_the_run([], SIMULATED) is None


def test_the_averaged_rounds_are_evaluated_ones_and_the_last():
    for round, rounds, every in itertools.product(range(1, 9), range(2, 6), range(1, 5)):
        found = averaged_rounds(round, rounds, every)
        expected = [one for one in range(1, round + 1) if one > round - rounds and (one % every == 0 or one == round)]
        assert found == expected
    assert averaged_rounds(0, 3) == [0]


def test_the_mean_over_the_last_rounds_counts_evaluated_rounds_and_validation_images():
    history = [
        RoundRecord(0, {"accuracy/mean": 0.1, "validation/accuracy/mean": 0.3}, 0.0),
        RoundRecord(1, {"accuracy/mean": 0.2, "validation/accuracy/mean": 0.4}, 0.0),
        RoundRecord(2, {"loss/train": 1.0}, 0.0),
        RoundRecord(3, {"accuracy/mean": 0.4, "validation/accuracy/mean": 0.8}, 0.0),
    ]
    now = {"accuracy/mean": 0.9, "validation/accuracy/mean": 1.0}
    for rounds, mean, validated in (
        (2, (0.4 + 0.9) / 2, 0.9),
        (3, (0.4 + 0.9) / 2, 0.9),
        (4, 0.5, 2.2 / 3),
        (9, 0.5, 2.2 / 3),
    ):
        found = over_last_rounds(history, 4, now, rounds)
        assert found == pytest.approx({"accuracy/last_rounds": mean, "validation/accuracy/last_rounds": validated})
    assert over_last_rounds([], 0, {"accuracy/mean": 0.1}, 3) == {"accuracy/last_rounds": 0.1}
    assert over_last_rounds(history, 4, {"loss/train": 1.0}, 3) == {}


def test_the_loss_is_averaged_over_the_same_rounds_as_the_accuracy():
    losses = {"accuracy/mean": "loss/test", "validation/accuracy/mean": "validation/loss"}
    rounds = [{name: 10.0**round for pair in losses.items() for name in pair} for round in range(6)]
    history = [RoundRecord(round, metrics, 0.0) for round, metrics in enumerate(rounds[:5])]
    for last, every in ((2, 1), (3, 2), (9, 1)):
        found = over_last_rounds(history, 5, rounds[5], last, every)
        assert len(found) == 4
        assert len({*found.values()}) == 1
        assert found["loss/last_rounds"] == found["validation/loss/last_rounds"] < 1e5


@pytest.mark.parametrize("metric", ["loss/last_rounds", "accuracy/last_rounds", "loss/test", "accuracy/mean"])
def test_a_metric_of_test_images_has_a_counterpart_of_validation_images(metric):
    validated = on_validation(metric)
    assert on_test(validated) == metric
    assert uses_test_images(metric)
    assert not uses_test_images(validated)
    assert is_loss(validated) == is_loss(metric) == metric.startswith("loss/")
