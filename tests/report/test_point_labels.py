"""Labels next to points, which cover no point and no other label, wherever the points are."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsweep.report.figures.canvas import plain
from fedsweep.report.figures.point_labels import Box, label_points

LONG = "aggregation of the adapters median\nwith a description, lr 0.03"


def boxes_of(points, labels):
    """Draw `points` with `labels`, and return the rectangles of the dots and of the labels, in pixels."""
    figure, axes = plain(6.4, 4.0)
    axes.plot(*zip(*points, strict=True), "o", markersize=6)
    axes.margins(0.08)
    axes.autoscale_view()
    label_points(axes, [(*point, label) for point, label in zip(points, labels, strict=True)], points)
    figure.canvas.draw()
    size = 3 * figure.dpi / 72
    centres = [axes.transData.transform(point) for point in points]
    dots = [Box(x - size, y - size, x + size, y + size) for x, y in centres]
    named = [text.get_tightbbox() for text in axes.texts]
    return dots, [Box(one.x0, one.y0, one.x1, one.y1) for one in named], axes


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 2), st.floats(50, 52)), min_size=2, max_size=9))
def test_no_label_covers_a_dot_or_another_label(points):
    dots, _, axes = boxes_of(points, [LONG if place % 2 else f"rank {place}" for place in range(len(points))])
    texts = [text.get_window_extent() for text in axes.texts]
    assert len(texts) == len(points)
    words = [Box(*text.extents) for text in (text for text in map(_without_arrow, axes.texts))]
    assert not [pair for pair in combinations(words, 2) if pair[0].meets(pair[1])]
    assert not [(word, dot) for word in words for dot in dots if word.meets(dot)]
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
