"""The command `fedsweep doctor`, which checks that fedsweep can work on this machine."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedsweep.cli import json_output
from fedsweep.cli.json_output import FormatOption
from fedsweep.cli.options import DEFAULT_STORE, StoreOption, check_format
from fedsweep.cli.output import awaiting, relative, result_console
from fedsweep.common import plugins
from fedsweep.common.errors import UserError, one_line
from fedsweep.common.paths import activation_folder, data_folder, with_tilde
from fedsweep.results import Store

PACKAGES = ("torch", "ray", "mlflow", "optuna", "timm", "peft", "transformers")
GIGABYTE = 1e9
LEAST_SPACE = 1 * GIGABYTE
"""Free bytes below which a disk is reported as full: a sweep of the shipped spaces with its checkpoints needs less."""


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    works: bool
    sentence: str
    """The facts, or the reason of a failure with its remedy."""


def doctor(
    store: StoreOption = DEFAULT_STORE,
    format: FormatOption = "terminal",
) -> None:
    """Check the packages, processors, GPUs, data, the results folder and Ray of this machine.

    The exit code is 1 if a check fails.

    Example: `fedsweep doctor`
    """
    check_format(format, ("terminal", "json"))
    console, findings = result_console(), list[Finding]()
    for name, look in CHECKS.items():
        if name in NEED_PLUGINS and any(one.check == PLUGINS and not one.works for one in findings):
            one = Finding(name, False, f"not checked, because a plug-in is broken; see `{PLUGINS}`.")
        else:
            with awaiting(f"Checking: {name}"):
                one = found(name, look, store)
        findings.append(one)
        if format == "terminal":
            mark, style = ("\u2713", "green") if one.works else ("\u2717", "red")
            _print(console, Text(mark, style), f"{name}: {one.sentence}")
    if format == "json":
        json_output.document("doctor", checks=[one._asdict() for one in findings])
    if not all(one.works for one in findings):
        raise SystemExit(1)


def _print(console: Console, mark: Text, sentence: str) -> None:
    """Print a mark and a sentence. In a terminal, the further lines of a long sentence start below its first word."""
    if not console.is_terminal:
        console.print(mark, sentence, soft_wrap=True)
        return
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_row(mark, Text(sentence))
    console.print(row)


def found(name: str, look: Callable[[str], str], store: str) -> Finding:
    """Return the result of a check. Every error is a result, because a later check may still be of use."""
    try:
        return Finding(name, True, look(store))
    except UserError as error:
        return Finding(name, False, str(error))
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {one_line(error)}")


def _packages(store: str) -> str:
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    return f"fedsweep {metadata.version('fedsweep')}, Python {platform.python_version()}, {', '.join(versions)}"


def _plugins(store: str) -> str:
    from fedsweep import methods
    from fedsweep.data.data_config import data_sources
    from fedsweep.training.aggregation_rules import aggregation_rules
    from fedsweep.training.round_metrics import round_metrics

    for imported in (lambda: methods.ALL, data_sources, aggregation_rules, round_metrics):
        imported()
    listed = {name: f"{name} {version}" for name, version in plugins.versions().items()}
    for point in plugins.installed():
        listed[plugins.package(point)] += f", {point.group.removeprefix('fedsweep.')}: {point.name}"
    return "; ".join(listed.values()) or "none installed"


def _processors(store: str) -> str:
    import psutil

    from fedsweep.sweep.cluster.cluster import available_cpus

    cores = available_cpus()
    memory = psutil.virtual_memory()
    parallel = f"{cores} trial{'s' * (cores > 1)} in parallel by default"
    free = f"{memory.available / GIGABYTE:.0f} of {memory.total / GIGABYTE:.0f} GB of memory free"
    return f"{cores} CPU core{'s' * (cores > 1)} ({parallel}), {free}"


def _gpus(store: str) -> str:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return "none that PyTorch can use, so trials run on the CPU"
    torch.zeros(1, device="cuda").add_(1).item()
    return ", ".join(torch.cuda.get_device_name(place) for place in range(count))


def _shipped(store: str) -> str:
    from fedsweep.common.paths import find
    from fedsweep.common.yaml_values import read_yaml
    from fedsweep.federation.build_and_run import split
    from fedsweep.federation.run_config import RunConfig

    config = RunConfig.of(read_yaml(find("experiments", "fedra_digits")), "experiment fedra_digits")
    data, _ = split(config)
    config.backbone.check_weights(len(data.class_names), data.class_names)
    images = sum(len(one.train) + len(one.test) for one in data.domains)
    return f"{images:,} images of digits in {len(data.domains)} styles, and their backbone"


def _prepared(store: str) -> str:
    from fedsweep.data.prepared.card import read_card, stores, unfinished

    cards = [read_card(folder) for folder in stores()]
    if waiting := [relative(folder) for folder in unfinished()]:
        raise UserError(f"{waiting[0]} is unfinished; run the same `fedsweep data prepare` command again.")
    if not cards:
        return f"none in {relative(data_folder())}; `fedsweep data prepare` adds data sets"
    return f"{', '.join(dict.fromkeys(card.name for card in cards))} in {relative(data_folder())}"


def _results(store: str) -> str:
    from fedsweep.tracking import check_writable

    try:
        opened = Store.at(store)
        opened.check_writable()
        existed = opened.root.exists()
        check_writable(opened.root)
        free = _space(opened.root)
        if not existed:
            opened.root.rmdir()  # `doctor` leaves no folder behind
    except UserError as error:
        raise UserError(f"{str(error).rstrip('.')}; choose another results folder with `--store`.") from None
    return f"{store if opened.uri else relative(opened.root)} is writable, {free}"


def _cache(store: str) -> str:
    folder = activation_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return f"{with_tilde(folder)}, {_space(folder)}"


def _space(folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    if free < LEAST_SPACE:
        raise UserError(
            f"the disk of {folder} has only {free / GIGABYTE:.1f} GB free; delete files, or use another disk."
        )
    return f"{free / GIGABYTE:.0f} GB free"


def _ray(store: str) -> str:
    from fedsweep.sweep.cluster.ray_session import check_worker

    check_worker()
    return "starts on this machine, and a worker of it answers"


PLUGINS = "plug-ins"
NEED_PLUGINS = ("shipped data", "Ray")
"""The checks that import all plug-ins, and therefore fail if one of them is broken."""
CHECKS: dict[str, Callable[[str], str]] = {
    "packages": _packages,
    PLUGINS: _plugins,
    "processors": _processors,
    "GPUs": _gpus,
    "shipped data": _shipped,
    "prepared data sets": _prepared,
    "results folder": _results,
    "cache": _cache,
    "Ray": _ray,
}
"""The checks, each with a function that returns the facts, and raises an error if something does not work."""
