"""The methods and the metrics that `fedsweep list` prints."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from fedsweep.cli.output import loading_torch, result_console

if TYPE_CHECKING:
    from fedsweep.methods import FederatedMethod

NEEDS = {
    "lora": "LoRA",
    "text": "text encoder",
    "head": "head",
    "validation": "client images",
    "proxy": "server images",
    "synthetic": "synthetic images",
}
"""The words for the fields of `Needs`. Client images and server images are held out from training."""
WIDE, FEW = 160, 3
"""The width of a terminal, and the number of methods, for which the table has a column with the papers."""


def list_methods() -> tuple[list[dict[str, Any]], list[str]]:
    """Return a description of each method, and a sentence about each plug-in whose method cannot be used.

    A description contains the name, the needs, the first sentence of the docstring and the source.
    """
    with loading_torch("fedsweep.methods"):
        from fedsweep.methods import usable

    methods, broken = usable()
    described = [
        {
            "name": one.model_fields["name"].default,
            "needs": _needs(one),
            "description": _first_sentence(one.__doc__),
            "source": _first_sentence(sys.modules[one.__module__].__doc__),
        }
        for one in methods
    ]
    return described, [str(error) for error in broken]


def _needs(method: type[FederatedMethod]) -> list[str]:
    found = method.model_construct(name=method.model_fields["name"].default).needs
    return [NEEDS.get(field.name, field.name) for field in fields(found) if getattr(found, field.name)]


def _first_sentence(docstring: str | None) -> str:
    """Return the first sentence of a docstring.

    >>> _first_sentence("FedAvg (FedRA, Sec. 4.1) on blocks. Another.")
    'FedAvg (FedRA, Sec. 4.1) on blocks.'
    """
    first = " ".join((docstring or "").split("\n\n")[0].split())
    return re.split(r"(?<=[a-z)]\.) (?=[A-Z])", first)[0]


def list_metrics() -> list[dict[str, str]]:
    """Return the columns of reports, the metrics that most runs record, and the means over the last rounds."""
    from fedsweep.cli.completion import AVERAGES, MEANS, stored_schemas
    from fedsweep.results.table_columns import COLUMNS

    columns = [{"name": one.name, "kind": "column", "description": one.meaning} for one in COLUMNS.values()]
    names = [*MEANS, "accuracy/domain/NAME", *stored_schemas()["metrics"]]
    about = dict.fromkeys(names, "") | dict.fromkeys(AVERAGES, "only with evaluation.last_rounds")
    return [*columns, *({"name": name, "kind": "metric", "description": text} for name, text in about.items())]


def show_methods(methods: Sequence[dict[str, Any]]) -> None:
    """Print a table of methods."""
    console = result_console()
    sources = console.width >= WIDE or len(methods) <= FEW
    columns = ("method", "needs", "description", *(["source"] if sources else []))
    table = Table(*columns, title="Methods: method=NAME", title_justify="left", box=None)
    for one in methods:
        cells = (one["description"], *([one["source"]] if sources else []))
        table.add_row(one["name"], ", ".join(one["needs"]), *map(Text, cells))
    console.print(table)
    if not sources:
        console.print("", "`fedsweep list methods NAME` also shows the paper of a method.", sep="\n")


def show_metrics(metrics: Sequence[dict[str, str]]) -> None:
    """Print a table of columns and metrics."""
    console = result_console()
    for kind, title in {"column": "Columns of reports: --columns NAME,...", "metric": "Metrics of most runs"}.items():
        table = Table(title=title, title_justify="left", box=None, show_header=False)
        for one in metrics:
            if one["kind"] == kind:
                table.add_row(one["name"], Text(one["description"]))
        console.print(table, "")
    console.print("The metrics of a run depend on its method and its data set; MLflow shows all of them.")
