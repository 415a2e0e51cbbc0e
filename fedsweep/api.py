"""The Python interface of fedsweep, which the command line also uses.

    from fedsweep import load_experiment, load_report, run, tune

`run` and `tune` do what the commands of the same name do: they check everything before the first round, record the
results in a results folder and in MLflow, and return them. Nothing is printed unless a console is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from fedsweep.common.errors import DivergenceError, UserError, disk_is_full
from fedsweep.common.paths import find, relative
from fedsweep.common.places import placed
from fedsweep.common.progress import loading, silent_console, waiting
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.results import Store, TrialStore
from fedsweep.results.history import RoundRecord
from fedsweep.results.table_columns import check_columns
from fedsweep.sweep import TuneOptions
from fedsweep.sweep import tune as tune_sweep

if TYPE_CHECKING:
    import pandas as pd

    from fedsweep.federation.build_and_run import Device
    from fedsweep.federation.run_config import RunConfig
    from fedsweep.report import Report
    from fedsweep.sweep.running.finish import SweepResult
    from fedsweep.tracking import Destination, Recorder
    from fedsweep.types import RoundListener

STORE = "mlruns"
"""The default results folder: `mlruns` in the root folder of the project, or else in the working directory."""


def load_experiment(name: str, changes: Mapping[str, Json] | None = None) -> RunConfig:
    """Return the configuration of an experiment.

    Args:
        name: The name of the experiment, such as `fedra_digits`. Your own folder `experiments/` is searched first.
        changes: Changes to hyperparameters, by dotted name, such as `{"lora.rank": 4}`.

    Raises:
        UserError: There is no such experiment, or a value is invalid.
    """
    from fedsweep.federation.run_config import RunConfig

    path, where = find("experiments", name), f"experiment {name}"
    return RunConfig.of(read_yaml(path), where, file=path).override(dict(changes or {}), where)


@dataclass(frozen=True)
class RunResult:
    """The result of one federated run."""

    config: RunConfig
    """The configuration of the run."""
    history: tuple[RoundRecord, ...]
    """One record per round, from round 0, which evaluates the untuned model."""
    trial: TrialStore
    """The folder of the run in the results folder."""
    recorder: Recorder
    """The recorder that wrote the run to MLflow. `recorder.unsynced` lists what MLflow lacks."""

    @property
    def frame(self) -> pd.DataFrame:
        """The metrics, with one row per round and one column per metric. Accuracies range from 0 to 1."""
        import pandas as pd

        rounds = pd.Index([one.round for one in self.history], name="round")
        return pd.DataFrame([dict(one.metrics) for one in self.history], index=rounds)


@dataclass(frozen=True)
class PreparedRun:
    """A run whose data, weights and results folder have been checked."""

    name: str
    config: RunConfig
    store: Store
    destination: Destination

    def run(
        self,
        device: Device = "cpu",
        system_metrics: bool = False,
        show: Callable[[RoundRecord], object] = lambda record: None,
        listener: RoundListener | None = None,
    ) -> RunResult:
        """Execute the run, record it and return its result; see `run`.

        Raises:
            UserError: The training has diverged.
        """
        import torch

        from fedsweep.tracking.single_run import record_run

        threads, history = torch.get_num_threads(), list[RoundRecord]()

        def keep(record: RoundRecord) -> None:
            history.append(record)
            show(record)

        torch.set_num_threads(1)  # as in a trial, because rounding depends on the number of threads
        try:
            trial, recorder = record_run(
                self.name, self.config, self.store, device, keep, self.destination, system_metrics, listener
            )
        except DivergenceError as error:
            raise UserError(f"{error}.") from None
        finally:
            torch.set_num_threads(threads)
        return RunResult(self.config, tuple(history), trial, recorder)


def prepare_run(
    experiment: str,
    config: RunConfig,
    *,
    store: str = STORE,
    mlflow: str | None = None,
    verify: bool = False,
) -> PreparedRun:
    """Check the data, the weights, the results folder and MLflow for a run. The arguments are those of `run`.

    Raises:
        UserError: One of them cannot be used.
    """
    from fedsweep.federation.build_and_run import check_content, check_pixels
    from fedsweep.tracking import Destination, check_server, check_writable

    check_content(config)
    if verify:
        check_pixels([config])
    home = Store.at(store)
    check_writable(home.root)
    home.check_writable()
    destination = Destination.of(home.root, mlflow)
    check_server(destination, experiment)
    return PreparedRun(experiment, config, home, destination)


def run(
    experiment: str | RunConfig,
    changes: Mapping[str, Json] | None = None,
    *,
    name: str = "python",
    store: str = STORE,
    mlflow: str | None = None,
    device: Device = "cpu",
    system_metrics: bool = False,
    verify: bool = False,
    show: Callable[[RoundRecord], object] = lambda record: None,
    listener: RoundListener | None = None,
) -> RunResult:
    """Execute one federated run, and record it as `fedsweep run` does.

    Args:
        experiment: The name of an experiment, or a configuration from `load_experiment`.
        changes: Changes to hyperparameters, by dotted name.
        name: The name under which a configuration is recorded. A named experiment is recorded under its own name.
        store: The results folder, or the URI of a remote results folder.
        mlflow: The address of an MLflow server; by default, the database in the results folder.
        device: The device on which the model is trained, `cpu` or `cuda`.
        system_metrics: Whether to record the CPU, memory and GPU use of each round in MLflow.
        verify: Whether to read all pixels of prepared data sets first, and check that they are unchanged.
        show: A function that is called with the record of each round.
        listener: An object that follows the progress within each round.

    Returns:
        The metrics of all rounds, also as a data frame (`RunResult.frame`).

    Raises:
        UserError: A setting is invalid, the data, the weights, the results folder or MLflow cannot be used, or the
            training has diverged.
    """
    asked = dict(changes or {})
    if isinstance(experiment, str):
        config = load_experiment(experiment, asked)
        with placed(find("experiments", experiment), asked):
            prepared = prepare_run(experiment, config, store=store, mlflow=mlflow, verify=verify)
    else:
        config = experiment.override(asked, "the configuration")
        prepared = prepare_run(name, config, store=store, mlflow=mlflow, verify=verify)
    return prepared.run(device, system_metrics, show, listener)


def tune(
    space: str,
    overrides: Mapping[str, Json] | None = None,
    *,
    options: Mapping[str, Json] | None = None,
    store: str = STORE,
    mlflow: str | None = None,
    resume: bool = False,
    join: bool = False,
    sweep: str | None = None,
    fresh: bool = False,
    verify: bool = False,
    address: str = "local",
    at_once: int | None = None,
    console: Console | None = None,
    show: Callable[[Report], object] = lambda report: None,
) -> SweepResult:
    """Run all trials of a search space on Ray Tune, record them in MLflow, and write the report.

    When the function returns, the report is written, MLflow is closed, and Ray is stopped.

    Args:
        space: The name of a search space, such as `ablations/lora_rank`.
        overrides: Changes to the experiment, by dotted name, such as `{"federation.rounds": 5}`.
        options: Changes to the search space, by dotted name, such as `{"seeds": [0, 1], "search.samples": 8}`.
        store: The results folder, or the URI of a remote results folder.
        mlflow: The address of an MLflow server; by default, the database in the results folder.
        resume: Whether to resume a sweep instead of starting a new one.
        join: Whether to run the newest sweep together with the processes that run it. It is resumed if no process runs
            it, and started if there is none.
        sweep: The id of the sweep to resume or join; the newest by default.
        fresh: Whether to run all trials, even those that an earlier sweep has finished.
        verify: Whether to read all pixels of prepared data sets first, and check that they are unchanged.
        address: Where to run trials: `local`, `auto`, or HOST:PORT of a Ray cluster.
        at_once: The largest number of parallel trials.
        console: A console for progress messages and the live table; by default, nothing is printed.
        show: A function that is called with the report as soon as it is written.

    Returns:
        The trials, the report and the exit status of the command. `result.report.frame` is the table as a data frame.
        If the arms are tuned one by one (`tune_each`), this is the result of the last sweep.

    Raises:
        UserError: The search space is invalid, or a machine, the results folder or MLflow cannot be used.
    """
    asked = TuneOptions(
        space,
        dict(overrides or {}),
        dict(options or {}),
        store=store,
        mlflow=mlflow,
        resume=resume,
        join=join,
        sweep_id=sweep,
        fresh=fresh,
        verify=verify,
        address=address,
        at_once=at_once,
    )
    from fedsweep.sweep.plan.plan import Plan

    Plan.of(asked.request)  # raises errors before Ray is started
    return tune_sweep(asked, console, show)


def load_report(
    space: str,
    sweep: str | None = None,
    *,
    store: str = STORE,
    columns: Iterable[str] | None = None,
    console: Console | None = None,
) -> Report:
    """Return the report of a sweep, and write its table, figures and HTML page again from the recorded results.

    Args:
        space: The search space of the sweep, the sweep as `SPACE@SWEEP`, or its id.
        sweep: The id of the sweep; the newest of the search space by default.
        store: The results folder, or the URI of a remote results folder.
        columns: Columns of the table in addition to the objective, such as `worst_domain`; by default, those with which
            the sweep was started.
        console: A console for progress messages; by default, nothing is printed.

    Returns:
        The report. `report.frame` is its table as a data frame, and `report.rounds` has the metrics of all rounds.

    Raises:
        UserError: There is no such sweep, no trial has recorded a round, a column is unknown, or the files cannot be
            written.
    """
    console = console or silent_console()
    with loading(console, "the report", "fedsweep.report"):
        from fedsweep.report import write_report

    found = Store.at(store).find(space, sweep)
    manifest, trials = found.manifest(), found.trials()
    if columns is not None:
        asked = (columns,) if isinstance(columns, str) else tuple(columns)
        metrics = {name for trial in trials for one in trial.history for name in one.metrics}
        check_columns(asked, sorted(metrics), manifest.metric, "`--columns`", manifest.varied)
        manifest = manifest.model_copy(update={"columns": asked})
    folder = found.folder / "report"
    try:
        with waiting(console, "Writing the report"):
            return write_report(manifest, trials, folder)
    except OSError as error:
        if disk_is_full(error):
            raise
        raise UserError(f"the report cannot be written to {relative(folder)}: {error.strerror or error}.") from None
