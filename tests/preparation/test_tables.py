"""The progress bar of a preparation, and the printed line for an experiment file."""

import io
import re

import numpy as np
import pytest
from rich.console import Console

from fedsweep.common.yaml_values import parse_yaml
from fedsweep.data.prepared.card import DomainCard, StoreCard
from fedsweep.preparation.tables import ImageBar, counts_table, experiment_lines, stores_table, summary


def shown(terminal: bool, seconds: list[float]) -> str:
    """Return the output of a progress bar for 100 images that is updated every 10 images, at times given in seconds."""
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
    assert "about" in text
    assert "left" in text


def test_a_bar_appears_although_all_images_were_decoded_before():
    stream = io.StringIO()
    with ImageBar(Console(file=stream, force_terminal=True, width=100)) as bar:
        bar.progress.get_time = lambda: 0.0  # type: ignore[method-assign]
        bar(700, 700)
        for second, done in enumerate((0, 256, 512)):
            bar.progress.get_time = lambda second=second: 2 * second  # type: ignore[method-assign,misc]
            bar.compared(done, 700)
        bar.progress.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert re.search(r"comparing .* 512/700 128 images/s about .* left", text)
    assert "700/700" not in text


@pytest.mark.parametrize(("terminal", "seconds"), [(True, [0, 0.5, 1.9]), (False, [0, 1, 2, 3, 4])])
def test_short_work_and_pipes_get_no_bar(terminal, seconds):
    assert "images/s" not in shown(terminal, seconds)


@pytest.mark.parametrize(
    "names", [("photo", "art_painting"), ("real world", "no"), ("1", "true", "a,b"), ("a: b", "ä")]
)
def test_the_line_for_an_experiment_is_valid_yaml_with_the_same_names(names):
    card = StoreCard(
        name="set", size=64, layout="domains", class_names=("a",), digest="", crop_pct=1.0,
        domains={name: DomainCard(train=1, test=1, bytes=1) for name in names},
    )  # fmt: skip
    given = parse_yaml(experiment_lines(card), "line")
    assert given == {"data": {"name": "prepared", "set": "set", "size": 64, "domains": list(names)}}


def test_names_are_not_interpreted_as_markup():
    card = StoreCard(
        name="set[b]", size=64, layout="domains", class_names=("[red]a", "[/b]"), digest="", crop_pct=1.0,
        domains={name: DomainCard(train=1, test=1, bytes=1) for name in ("[bold]photo", "[/x]")},
    )  # fmt: skip
    stream = io.StringIO()
    console = Console(file=stream, width=100)
    counts = {name: np.ones((2, 2), int) for name in card.domains}
    for table in (summary(card), stores_table([card]), counts_table(card, counts)):
        console.print(table)
    assert all(stream.getvalue().count(name) == 2 for name in card.domains)
    assert all(name in stream.getvalue() for name in (card.name, *card.class_names))


def test_the_bar_shows_the_check_after_the_last_image():
    assert "decoding" in shown(True, [0, 1, 2, 3, 4])
    assert "checking" not in shown(True, [0, 1, 2, 3, 4])
    assert "checking" in shown(True, list(range(11)))
