"""The distinct partitions of the runs of an experiment or a search space, and a table of the clients of each."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from fedsweep.common.config import flat
from fedsweep.federation.build_and_run import split
from fedsweep.federation.run_config import RunConfig
from fedsweep.preparation.figures import Panel, class_counts, distances, skew

DECIDES = ("data", "partition", "seed")  # the parts of an experiment that determine its partition


def distinct_panels(configs: Iterable[RunConfig]) -> tuple[list[Panel], tuple[str, ...]]:
    """Return one panel for each distinct partition among `configs`, and the names of the classes."""
    different: dict[str, RunConfig] = {}
    for config in configs:
        different.setdefault(config.model_dump_json(include=set(DECIDES)), config)
    values = [
        {key: value for key, value in flat(config).items() if key.split(".")[0] in DECIDES}
        for config in different.values()
    ]
    varied = [key for key in values[0] if any(one.get(key) != values[0][key] for one in values)]
    varied += sorted({key for one in values for key in one} - set(values[0]))
    panels: list[Panel] = []
    class_names: tuple[str, ...] = ()
    for config, own in zip(different.values(), values, strict=True):
        data, parts = split(config)
        class_names = data.class_names
        title = ", ".join(f"{key.rsplit('.', 1)[-1]} {own[key]}" for key in varied if key in own)
        panels.append(Panel(title or config.partition.name.replace("_", " "), parts.clients))
    return panels, class_names


def of_panel(panel: Panel, class_names: tuple[str, ...]) -> dict[str, object]:
    """Return the title and the skew of a partition, and the numbers of images of each client by class."""
    clients, classes = panel.clients, len(class_names)
    rows = zip(clients, class_counts(clients, classes), distances(clients, classes), strict=True)
    described = [
        {"id": client.id, "images": dict(zip(class_names, row.tolist(), strict=True)), "distance": float(distance)}
        for client, row, distance in rows
    ]
    return {"title": panel.title, "skew": float(skew(clients, classes)), "clients": described}


def partition_table(panel: Panel, class_names: tuple[str, ...]) -> Table:
    """Return a table with one row per client of a partition.

    The columns are the number of images, the number of classes, the most frequent class, and the distance between the
    label distribution of the client and that of its domain.
    """
    clients, classes = panel.clients, len(class_names)
    title = Text(f"{panel.title} (skew {skew(clients, classes):.2f})")
    table = Table("client", title=title, title_justify="left", box=None)
    for heading in ("images", "classes"):
        table.add_column(heading, justify="right")
    table.add_column("most frequent")
    table.add_column("distance", justify="right")
    for client, row, distance in zip(clients, class_counts(clients, classes), distances(clients, classes), strict=True):
        most = int(row.argmax())
        share = f"{class_names[most]} {row[most] / max(1, row.sum()):.0%}"
        table.add_row(Text(client.id), str(row.sum()), str((row > 0).sum()), Text(share), f"{distance:.2f}")
    return table
