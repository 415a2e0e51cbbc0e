"""What is printed: the bar, and the line for an experiment."""

import io

import pytest
from rich.console import Console

from fedsweep.config import parse_yaml
from fedsweep.images.card import DomainCard, StoreCard
from fedsweep.preparation.tables import ImageBar, experiment_lines


def shown(terminal: bool, seconds: list[float]) -> str:
    """What a bar prints that is told of 10 more of 100 images at each of these times."""
    stream = io.StringIO()
    with ImageBar(Console(file=stream, force_terminal=terminal, width=100)) as bar:
        for step, second in enumerate(seconds):
            bar.progress.get_time = lambda second=second: second  # type: ignore[method-assign,misc]
            bar(10 * step, 100)
        bar.progress.refresh()
    return stream.getvalue()


def test_long_work_on_a_terminal_gets_a_bar_with_speed_and_time_left():
    text = shown(True, [0, 1, 2, 3, 4])
    assert "40/100" in text
    assert "10 images/s" in text
    assert "left about" in text


@pytest.mark.parametrize(("terminal", "seconds"), [(True, [0, 0.5, 1.9]), (False, [0, 1, 2, 3, 4])])
def test_short_work_and_pipes_get_none(terminal, seconds):
    assert "images/s" not in shown(terminal, seconds)


@pytest.mark.parametrize(
    "names", [("photo", "art_painting"), ("real world", "no"), ("1", "true", "a,b"), ("a: b", "ä")]
)
def test_the_line_for_an_experiment_is_read_as_it_is_meant(names):
    card = StoreCard(
        name="set", size=64, layout="domains", class_names=("a",), digest="", crop_pct=1.0,
        domains={name: DomainCard(train=1, test=1, bytes=1) for name in names},
    )  # fmt: skip
    given = parse_yaml(experiment_lines(card), "line")
    assert given == {"data": {"name": "prepared", "set": "set", "size": 64, "domains": list(names)}}
