"""The tables and the progress bar of `fedsweep data`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from fedsweep.data.prepared.card import StoreCard

MOST_ROWS = 40  # largest number of classes that are listed one by one by default
SHORTEST = 2.0  # seconds before the progress bar appears


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} images/s" if speed >= 10 else f"{speed:.2g} images/s")


class ImageBar:
    """A progress bar that counts images and is shown only on a terminal.

    The label of the bar is `doing` until the last image is finished, and then `ending`. While all images are read again
    to find copies, a second bar replaces it.
    """

    def __init__(self, console: Console, doing: str = "decoding", ending: str = "checking") -> None:
        self.doing, self.ending = doing, ending
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TextColumn("about"),
            TimeRemainingColumn(), TextColumn("left"), console=console, transient=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress.live.is_started:
            self.progress.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` images are finished."""
        if not self.progress.tasks:  # images that an earlier preparation decoded do not count for the speed
            self.progress.add_task(self.doing, total=total, completed=done)
        # After the last image, all images are read again, which takes a while.
        step = self.doing if done < total else self.ending
        self._update(self.progress.tasks[0], done, step)

    def compared(self, done: int, total: int) -> None:
        """Show that `done` of `total` finished images have been compared with the others."""
        if len(self.progress.tasks) == 1:  # a task of its own, with another speed
            for task in self.progress.tasks:
                task.visible = False
            self.progress.add_task("comparing", total=total)
        self._update(self.progress.tasks[-1], done, "comparing")

    def _update(self, task: Task, done: int, label: str) -> None:
        """Update a task, and show the bar if the first task began long enough ago."""
        began = self.progress.tasks[0].start_time or 0.0
        if self.progress.console.is_terminal and self.progress.get_time() - began > SHORTEST:
            self.progress.start()
        self.progress.update(task.id, completed=done, description=label)


def experiment_lines(card: StoreCard) -> str:
    """Return the line that selects the prepared data set in an experiment file."""
    domains = ", ".join(yaml_word(name) for name in card.domains)
    return f"data: {{name: prepared, set: {yaml_word(card.name)}, size: {card.size}, domains: [{domains}]}}"


def yaml_word(name: str) -> str:
    """Return a name as it is written in a YAML file, in quotation marks if it is not a plain word."""
    plain = name.isascii() and name.replace("_", "").replace("-", "").isalnum() and name[0].isalpha()
    return name if plain and name.lower() not in ("true", "false", "null") else json.dumps(name)


def headline(card: StoreCard) -> str:
    """Return one line with the name, image size, number of images and number of classes of a prepared data set."""
    return f"{card.name} at {card.size} pixels, {card.images} images of {len(card.class_names)} classes"


def split_words(card: StoreCard) -> str:
    """Return a phrase about the origin of the split, and the number of test images that are listed for validation."""
    drawn = card.test_fraction
    words = "split of the data set" if drawn is None else f"split drawn at random, {drawn:g} of each class for testing"
    return f"{words}; test images listed for validation: {card.validation}" if card.validation else words


def _table(first: str, *numbers: str, title: str | None = None) -> Table:
    columns = [Column(heading, justify="right") for heading in numbers]
    return Table(first, *columns, title=title, title_justify="left", box=None)


def summary(card: StoreCard) -> Table:
    """Return a table of the number of training images, the number of test images and the file size of each domain.

    If there are several domains, the last row contains the totals.
    """
    table = _table("domain", "train", "test", "MB")
    for name, domain in card.domains.items():
        table.add_row(Text(name), str(domain.train), str(domain.test), megabytes(domain.bytes))
    if len(card.domains) > 1:
        train, test = (sum(getattr(one, split) for one in card.domains.values()) for split in ("train", "test"))
        table.add_row("all", str(train), str(test), megabytes(card.bytes))
    return table


def stores_table(cards: Sequence[StoreCard]) -> Table:
    """Return a table with one row per prepared data set."""
    table = _table("name", "size", "images", "domains", "classes", "MB", title="Prepared")
    table.add_column("digest")
    for card in cards:
        numbers = (card.size, card.images, len(card.domains), len(card.class_names))
        table.add_row(Text(card.name), *map(str, numbers), megabytes(card.bytes), card.digest[:12])
    return table


def layouts_table() -> Table:
    """Return a table of the layouts that `fedsweep data prepare` can read."""
    from fedsweep.preparation.layouts import ALL

    table = Table("layout", "files", title="Layouts that `prepare` can read", title_justify="left", box=None)
    for source in ALL:
        table.add_row(source.name, Text(source.looks_like))
    return table


def counts_table(card: StoreCard, counts: dict[str, np.ndarray], every: bool = False) -> Table:
    """Return a table with the numbers of training and test images per class and domain.

    Args:
        card: The card of the prepared data set.
        counts: The numbers of training and test images per class, int64 (2, classes), keyed by domain.
        every: Whether to list every class. If false and there are more than 40 classes, the table shows only the
            minimum, median and maximum over the classes.
    """
    table = Table("class", *[Column(Text(name), justify="right") for name in card.domains], box=None)
    if every or len(card.class_names) <= MOST_ROWS:
        for label, class_name in enumerate(card.class_names):
            cells = [f"{counts[name][0, label]} / {counts[name][1, label]}" for name in card.domains]
            table.add_row(Text(class_name), *cells)
    else:
        for heading, of in (("fewest in a class", np.min), ("median", np.median), ("most in a class", np.max)):
            table.add_row(heading, *["{:g} / {:g}".format(*of(counts[name], axis=1)) for name in card.domains])
    table.add_row("all", *[f"{domain.train} / {domain.test}" for domain in card.domains.values()])
    return table


def label_counts(folder: Path, card: StoreCard) -> dict[str, np.ndarray]:
    """Return the numbers of training and test images per class, int64 (2, classes), keyed by domain."""
    from fedsweep.data.prepared.arrow_files import check_labels, map_domain

    found = {}
    for name in card.domains:
        parts = map_domain(path := folder / f"{name}.arrow")
        for part in parts:
            check_labels(path, part.labels, len(card.class_names))
        found[name] = np.stack([np.bincount(part.labels, minlength=len(card.class_names)) for part in parts])
    return found


def listed_images(folder: Path, card: StoreCard, split: str) -> Iterator[tuple[str, str, str]]:
    """Yield the domain, the class and the source path of each image of a split.

    The splits are `train`, `test`, and `validation`: the test images that the data set lists for validation.
    """
    from fedsweep.data.prepared.arrow_files import check_labels, map_domain

    for name in card.domains:
        part = map_domain(path := folder / f"{name}.arrow")[split != "train"]
        check_labels(path, part.labels, len(card.class_names))
        validation = np.zeros(len(part.labels), bool) if part.validation is None else part.validation
        for label, source, listed in zip(part.labels.tolist(), part.paths.to_pylist(), validation, strict=True):
            if listed or split != "validation":
                yield name, card.class_names[label], source


def megabytes(count: int) -> str:
    """Format a number of bytes in MB (10^6 bytes), without the unit."""
    return f"{count / 1e6:,.1f}"
