"""Labels next to points, which cover no point, no other label and not the Pareto front, wherever the points are."""

from itertools import combinations, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsweep.report.figures.canvas import plain
from fedsweep.report.figures.point_labels import Box, label_points
from fedsweep.results.pareto import pareto_efficient

LONG = "aggregation of the adapters median\nwith a description, lr 0.03"


def boxes_of(points, labels):
    """Draw `points` with `labels` and their front; return the dots, the corners of the front, and the axes.

    The dots are rectangles. The rectangles and the corners are in pixels.
    """
    figure, axes = plain(6.4, 4.0)
    axes.plot(*zip(*points, strict=True), "o", markersize=6)
    efficient = pareto_efficient([(y, x) for x, y in points], ("max", "min"))
    front = sorted(point for point, best in zip(points, efficient, strict=True) if best)
    border = axes.step(*zip(*front, strict=True), where="post")
    axes.margins(0.08)
    axes.autoscale_view()
    label_points(axes, [(*point, label) for point, label in zip(points, labels, strict=True)], points, border)
    figure.canvas.draw()
    size = 3 * figure.dpi / 72
    centres = [axes.transData.transform(point) for point in points]
    dots = [Box(x - size, y - size, x + size, y + size) for x, y in centres]
    corners = [corner for (x, y), (right, _) in pairwise([*front, front[-1]]) for corner in ((x, y), (right, y))]
    return dots, [tuple(axes.transData.transform(corner)) for corner in corners], axes


@settings(max_examples=25, deadline=None)
@example([(1.2, 50.3), (1.35, 50.8), (1.5, 51.7), (1.7, 51.6), (1.8, 50.9), (2.0, 51.8)])
@example([(1.0 + step / 8, 50.0 + step / 4) for step in range(9)])
@given(st.lists(st.tuples(st.floats(1, 2), st.floats(50, 52)), min_size=2, max_size=9))
def test_no_label_covers_a_dot_or_another_label_or_the_front(points):
    dots, front, axes = boxes_of(points, [LONG if place % 2 else f"rank {place}" for place in range(len(points))])
    texts = [text.get_window_extent() for text in axes.texts]
    assert len(texts) == len(points)
    words = [Box(*text.extents) for text in (text for text in map(_without_arrow, axes.texts))]
    assert not [pair for pair in combinations(words, 2) if pair[0].meets(pair[1])]
    assert not [(word, dot) for word in words for dot in dots if word.meets(dot)]
    assert not [word for word in words if any(word.crossed_by(*pair) for pair in pairwise(front))]
    left, bottom = axes.get_window_extent().min
    assert all(word.left >= left and word.bottom >= bottom for word in words)


def _without_arrow(text):
    """Return the extent of the words of an annotation, without the line that joins it to its point."""
    from matplotlib.text import Text

    return Text.get_window_extent(text)


def test_every_label_names_its_own_point_even_if_points_coincide():
    points = [(1.0, 50.0)] * 3 + [(2.0, 51.0)]
    _, _, axes = boxes_of(points, ["a", "b", "c", "d"])
    assert [(text.get_text(), text.xy) for text in axes.texts] == list(zip("abcd", points, strict=True))


@pytest.mark.parametrize(
    ("end", "crossed"), [((10, 10), True), ((10, 0), False), ((0, 10), False), ((1, 1), False), ((5, 5), True)]
)
def test_a_line_crosses_a_box(end, crossed):
    assert Box(4, 4, 6, 6).crossed_by((0, 0), end) is crossed
