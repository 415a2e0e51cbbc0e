"""Pareto efficiency, compared with the definition of dominance."""

from hypothesis import given
from hypothesis import strategies as st

from fedsweep.results.history import RoundRecord, over_the_run
from fedsweep.results.pareto import pareto_efficient

FEW = st.sampled_from([0.0, -0.0, 0.5, 1.0, 1.5, 2.0])  # few values, so that they are often equal
ANY = st.floats(allow_nan=False, allow_infinity=False)
MODES = st.sampled_from(["max", "min"])


def dominates(one: tuple[float, float], other: tuple[float, float], modes: tuple[str, str]) -> bool:
    """Return whether the point `one` is at least as good as `other` in both values and better in one."""
    pairs = [(a, b) if mode == "max" else (b, a) for a, b, mode in zip(one, other, modes, strict=True)]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


@given(st.lists(st.tuples(FEW, FEW) | st.tuples(ANY, ANY), max_size=12), st.tuples(MODES, MODES))
def test_a_point_is_efficient_if_no_other_point_dominates_it(points, modes):
    expected = [not any(dominates(other, one, modes) for other in points) for one in points]
    assert pareto_efficient(points, modes) == expected


def test_accumulated_metrics_are_summed_over_the_rounds_and_others_are_of_the_last_round():
    history = [
        RoundRecord(0, {"accuracy/mean": 0.1}, 0.5),
        RoundRecord(1, {"accuracy/mean": 0.2, "bytes/up": 2e6, "bytes/down": 3e6}, 1.0),
        RoundRecord(2, {"accuracy/mean": 0.3, "bytes/up": 1e6, "bytes/down": 4e6}, 2.0),
    ]
    names = ["accuracy/mean", "bytes/up", "bytes/down", "megabytes/sent", "seconds/round", "loss/train"]
    assert [over_the_run(history, name) for name in names] == [0.3, 3e6, 7e6, 10.0, 3.5, None]
    assert over_the_run([], "bytes/up") is None
