"""Arguments and options that several commands share, and functions that check their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from fedsweep.cli import completion
from fedsweep.cli.early_check import check, check_space
from fedsweep.common.errors import UserError, near
from fedsweep.common.paths import RESULTS, find
from fedsweep.common.yaml_values import Json, read_yaml

if TYPE_CHECKING:
    from fedsweep.federation.build_and_run import Device
    from fedsweep.federation.run_config import RunConfig
    from fedsweep.sweep.space.requested_space import RequestedSpace

Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="[NAME=VALUE]...",
        help="hyperparameters to change, e.g. `federation.rounds=5`",
        autocompletion=completion.overrides,
    ),
]
SweepArgument = Annotated[
    str,
    Argument(
        metavar="SEARCH_SPACE[@SWEEP]",
        help="search space, whose newest sweep is meant, or a sweep",
        autocompletion=completion.sweeps,
    ),
]
FileArgument = Annotated[
    str,
    Argument(
        metavar="NAME",
        help="experiment or search space",
        autocompletion=completion.files("experiments", "search_spaces"),
    ),
]
SweepOption = Annotated[
    str | None,
    Option("--sweep", help="id of the sweep; the newest by default", autocompletion=completion.sweep_ids),
]
_STORE = "results folder, or a remote one such as `s3://BUCKET/RUNS`"
StoreOption = Annotated[str, Option("--store", envvar="FEDSWEEP_STORE", metavar="FOLDER|URI", help=_STORE)]
_COLUMNS = "columns besides the objective, e.g. `worst_domain`, `rounds_to=0.7` or a metric"
ColumnsOption = Annotated[
    str | None, Option("--columns", metavar="NAME,...", help=_COLUMNS, autocompletion=completion.columns)
]
_MLFLOW = "address of an MLflow server, or `store` (default): the results folder"
MlflowOption = Annotated[str | None, Option("--mlflow", envvar="FEDSWEEP_MLFLOW", metavar="ADDRESS", help=_MLFLOW)]
VerifyOption = Annotated[
    bool,
    Option("--verify", help="first check all pixels of the data"),
]
DEFAULT_STORE = RESULTS
DeviceOption = Annotated[
    str,
    Option("--device", help="device to compute on: `cpu` or `cuda`", autocompletion=completion.choices("cpu", "cuda")),
]
WorkersOption = Annotated[
    int | None, Option("--workers", help="number of processes that decode images; one per core by default")
]


def listed(given: str) -> list[str]:
    """Return the items of a comma-separated list.

    >>> listed("worst_domain, loss/train")
    ['worst_domain', 'loss/train']
    """
    return [name.strip() for name in given.split(",") if name.strip()]


def check_format(given: str, known: tuple[str, ...], option: str = "--format") -> None:
    """Raise UserError unless the value of `option` is one of `known`."""
    if given not in known:
        raise UserError(
            f"`{option}` must be {', '.join(known[:-1])} or {known[-1]}, but it is `{given}`{near(given, known) or '.'}"
        )


def checked_device(device: str) -> Device:
    """Return `device`, or raise UserError if it is unknown or unavailable.

    torch is imported only for `cuda`, because the import is slow.
    """
    if device == "cpu":
        return "cpu"
    if device != "cuda":
        raise UserError(f"`--device` must be cpu or cuda, but it is `{device}`.")
    from fedsweep.cli.output import loading_torch

    with loading_torch("torch"):
        import torch

    if not torch.cuda.is_available():
        raise UserError("`--device` is cuda, but torch finds no GPU.")
    return "cuda"


def worker_count(workers: int | None) -> int:
    """Return `workers`, or the number of cores if it is None; raise UserError if `workers` is below 1."""
    if workers is not None and workers < 1:
        raise UserError(f"`--workers` must be at least 1, but it is {workers}.")
    from joblib import cpu_count

    return workers or int(cpu_count())


def check_experiment(name: str, changes: Mapping[str, Json]) -> None:
    """Raise UserError if an experiment or a change has a mistake that can be found without importing torch."""
    path = find("experiments", name)
    check("RunConfig", read_yaml(path), f"experiment {name}", changes, path)


def read_space(name: str, changes: Mapping[str, Json]) -> RequestedSpace:
    """Return a search space with `changes` to its experiment; raise UserError as `check_space` does."""
    from fedsweep.sweep.space.requested_space import read

    request = read(name, changes, {})
    check_space(request)
    return request


def read_experiment(name: str, changes: Mapping[str, Json]) -> RunConfig:
    """Return the configuration of an experiment with `changes` applied.

    Unknown names and invalid values raise UserError at once, before the slow import of torch.
    """
    from fedsweep.cli.output import loading_torch

    check_experiment(name, changes)
    with loading_torch("fedsweep.federation.run_config"):
        import fedsweep.federation.run_config  # noqa: F401
    from fedsweep.api import load_experiment

    return load_experiment(name, changes)
