"""The axes of a search space that are ranges with steps or whole numbers on a logarithmic scale."""

from fractions import Fraction
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsweep.common.errors import UserError
from fedsweep.sweep.search.proposals import distribution
from fedsweep.sweep.space.axes import Axis

optuna.logging.set_verbosity(optuna.logging.WARNING)
STEPS = st.sampled_from(["0.05", "0.1", "0.01", "0.25", "2", "0.3", "1e-3"])
LOWS = st.sampled_from(["0", "0.1", "-0.3", "1", "0.005"])


def lattice(low: str, step: str, count: int) -> list[float]:
    """Return the `count` values of a stepped range, computed with exact arithmetic."""
    return [float(Fraction(low) + place * Fraction(step)) for place in range(count + 1)]


def drawn(axis: Axis, samples: int, seed: int, **sampler: Any) -> list[Any]:
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, **sampler))
    found = []
    for _ in range(samples):
        trial = study.ask({"x": distribution(axis)})
        found.append(axis.exact(trial.params["x"]))
        study.tell(trial, float(trial.params["x"]))
    return found


@settings(max_examples=12, deadline=None)
@given(LOWS, STEPS, st.integers(1, 12), st.integers(0, 9))
def test_samples_of_a_range_with_a_step_are_exact_multiples_of_the_step(low, step, count, seed):
    values = lattice(low, step, count)
    axis = Axis(uniform=(values[0], values[-1]), step=float(step))
    assert set(drawn(axis, 20, seed, n_startup_trials=10)) <= set(values)
    assert all(axis.has(value) for value in values)
    assert not any(axis.has(value + float(step) / 2) for value in values)
    assert not axis.has(values[-1] + float(step))


def test_every_value_of_a_stepped_range_is_sampled_including_both_ends():
    assert set(drawn(Axis(uniform=(0.0, 0.5), step=0.05), 200, 0, n_startup_trials=200)) == set(
        lattice("0", "0.05", 10)
    )
    assert set(drawn(Axis(integer=(2, 14), step=4.0), 60, 0, n_startup_trials=60)) == {2, 6, 10, 14}


@given(st.integers(-20, 20), st.integers(1, 6), st.integers(1, 8))
def test_a_stepped_integer_range_contains_exactly_its_steps(low, step, count):
    values = list(range(low, low + step * count + 1, step))
    axis = Axis(integer=(values[0], values[-1]), step=float(step))
    assert [value for value in range(low - 3, values[-1] + 4) if axis.has(value)] == values


def test_half_of_the_loginteger_samples_are_below_the_geometric_mean_of_the_bounds():
    found = drawn(Axis(loginteger=(1, 64)), 400, 0, n_startup_trials=400)
    assert {type(one) for one in found} == {int}
    assert min(found) == 1
    assert 0.4 < sum(one <= 8 for one in found) / 400 < 0.65  # a uniform draw would give 8 / 64
    assert max(found) > 50


@pytest.mark.parametrize(
    ("axis", "sentence"),
    [
        ({"uniform": [0.0, 0.5], "step": 0.2}, "the `step` of `uniform` must divide the range from 0 to 0.5 evenly, "
         "but it is 0.2."),
        ({"uniform": [0.0, 0.5], "step": 0.6}, "the `step` of `uniform` must divide the range from 0 to 0.5 evenly, "
         "but it is 0.6."),
        ({"integer": [1, 8], "step": 2}, "the `step` of `integer` must divide the range from 1 to 8 evenly, but it "
         "is 2."),
        ({"integer": [1, 8], "step": 0.5}, "the `step` of `integer` must be a whole number, but it is 0.5."),
        ({"loguniform": [0.1, 1.0], "step": 0.1}, "`step` needs `uniform` or `integer`, but it is given with "
         "`loguniform`."),
        ({"loginteger": [1, 8], "step": 1}, "`step` needs `uniform` or `integer`, but it is given with `loginteger`."),
        ({"choice": [1, 8], "step": 1}, "`step` needs `uniform` or `integer`, but it is given with `choice`."),
        ({"uniform": [0.0, 0.5], "step": 0}, "`step` must be greater than 0, but it is 0."),
        ({"loginteger": [0, 8]}, "the bounds of `loginteger` must be positive, but they are [0, 8]."),
        ({"loginteger": [8, 1]}, "the bounds of `loginteger` must be in ascending order, but they are [8, 1]."),
        ({"loginteger": [1.5, 8]}, "`loginteger.0` must be an integer, but it is 1.5."),
        ({"step": 1}, "each entry of `space` must have exactly one of grid, choice, uniform, loguniform, integer "
         "and loginteger, but one has none."),
        ({"choice": [1, 8], "when": {}}, "`when` must have at least 1 item, but it is {}."),
        ({"choice": [1, 8], "when": {"lora.rank": []}}, "`when` must list at least one value of `lora.rank`, but the "
         "list is empty."),
    ],
)  # fmt: skip
def test_an_invalid_axis_is_rejected(axis, sentence):
    with pytest.raises(UserError) as refusal:
        Axis.of(axis, "axis")
    assert str(refusal.value) == f"axis: {sentence}"
