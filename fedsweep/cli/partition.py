"""Partitions of an experiment, or of all arms of a search space."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from rich.table import Table
from rich.text import Text

from fedsweep.common.config import flat
from fedsweep.common.paths import find_either
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.federation.build_and_run import split
from fedsweep.federation.run_config import RunConfig
from fedsweep.preparation.figures import Panel, class_counts, distances, skew
from fedsweep.sweep.plan.plan import Plan

DECIDES = ("data", "partition", "seed")  # the parts of an experiment that determine its partition


def panels_of(name: str, changes: Mapping[str, Json]) -> tuple[list[Panel], tuple[str, ...]]:
    """Return one panel per distinct partition, and the names of the classes."""
    different: dict[str, RunConfig] = {}
    for config in _configs(name, changes):
        different.setdefault(config.model_dump_json(include=set(DECIDES)), config)
    values = [_deciding(config) for config in different.values()]
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


def _configs(name: str, changes: Mapping[str, Json]) -> list[RunConfig]:
    kind, path = find_either(name)
    if kind == "experiments":
        where = f"experiment {name}"
        return [RunConfig.of(read_yaml(path), where).override(changes, where)]
    return [config for _, config in Plan.read(name, changes, {}).configs]


def _deciding(config: RunConfig) -> dict[str, Json]:
    return {key: value for key, value in flat(config).items() if key.split(".")[0] in DECIDES}


def partition_table(panel: Panel, class_names: tuple[str, ...]) -> Table:
    """Return a table of images, classes and skew by client."""
    counts = class_counts(panel.clients, len(class_names))
    own = distances(panel.clients, len(class_names))
    title = f"{panel.title} (skew {skew(panel.clients, len(class_names)):.2f})"
    table = Table("client", title=Text(title), title_justify="left", box=None)
    for heading in ("images", "classes"):
        table.add_column(heading, justify="right")
    table.add_column("most of")
    table.add_column("distance", justify="right")
    for client, row, distance in zip(panel.clients, counts, own, strict=True):
        most = int(np.argmax(row))
        share = f"{class_names[most]} {row[most] / max(1, row.sum()):.0%}"
        table.add_row(Text(client.id), str(row.sum()), str(np.count_nonzero(row)), Text(share), f"{distance:.2f}")
    return table
