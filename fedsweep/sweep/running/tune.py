"""The function `tune`, which runs a search space. Heavy imports happen only after the search space is validated."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedsweep.common.errors import UserError
from fedsweep.common.files import locked, write_atomically
from fedsweep.common.imports import without_collections
from fedsweep.common.paths import find
from fedsweep.common.progress import loading, silent_console, waiting
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.results import Store, SweepStore
from fedsweep.results.tuned_arms import STAGE, StageName, stage_of, sweep_name
from fedsweep.sweep.space.requested_space import RequestedSpace, read

if TYPE_CHECKING:
    from fedsweep.report import Report
    from fedsweep.sweep.cluster.cluster import Cluster
    from fedsweep.sweep.cluster.ray_session import OwnRay
    from fedsweep.sweep.running.finish import SweepResult
    from fedsweep.sweep.running.open_sweep import Prepared
    from fedsweep.sweep.space.settings import Resources
    from fedsweep.tracking import Destination


@dataclass(frozen=True)
class TuneOptions:
    """The sweep to run, its machines, and the store for its results."""

    space: str
    """Name of the search space, e.g. `ablations/lora_rank`."""
    overrides: Mapping[str, Json] = field(default_factory=dict)
    """Changes to the experiment, by dotted name."""
    space_options: Mapping[str, Json] = field(default_factory=dict)
    """Changes to the search space, by dotted name, e.g. `{"seeds": [0, 1]}`."""
    store: str = "mlruns"
    """Folder for results and MLflow's database, or the URI of a remote store."""
    mlflow: str | None = None
    """Address of an MLflow server; None for the store's own database."""
    resume: bool = False
    """Resume a sweep instead of starting a new one."""
    join: bool = False
    """Run the newest sweep together with the processes that run it; resume it if none does, or start the first one."""
    sweep_id: str | None = None
    """Id of the sweep to resume; the newest by default."""
    fresh: bool = False
    """Run all trials, including those that an earlier sweep has finished."""
    verify: bool = False
    """Read all pixels of the prepared data sets, and check that they are unchanged, before the first trial."""
    address: str = "local"
    """The machines for trials: `local`, `auto`, or HOST:PORT of a Ray cluster's head."""
    at_once: int | None = None
    """Largest number of trials in parallel."""
    id_file: str | None = None
    """A file that receives the sweep's id before the first trial starts, so that a script can resume this sweep."""

    def __post_init__(self) -> None:
        from fedsweep.sweep.cluster.ray_session import check_address

        again = "--join" if self.join else "--resume"
        if self.sweep_id is not None and not (self.resume or self.join):
            raise UserError("`--sweep` selects the sweep to resume or join and needs `--resume` or `--join`.")
        if self.fresh and (self.resume or self.join):
            raise UserError(f"`--fresh` applies to new sweeps and cannot be combined with `{again}`.")
        if self.join and self.resume:
            raise UserError("`--join` also resumes a sweep and cannot be combined with `--resume`.")
        if self.join and self.results.uri is not None:
            raise UserError(f"`--join` needs a results folder that the machines share, but `--store` is {self.store}.")
        if self.join and self.is_linked:
            raise UserError(f"{self.space} cannot be joined, because its arms are tuned one by one (`tune_each`).")
        if self.id_file is not None and not os.access(folder := Path(self.id_file).parent, os.W_OK):
            raise UserError(f"`--id-file` {self.id_file} cannot be written: {folder} is not a writable folder.")
        check_address(self.address)

    @cached_property
    def results(self) -> Store:
        """The results folder or remote store that `store` names."""
        return Store.at(self.store)

    @cached_property
    def resumed(self) -> SweepStore | None:
        """The sweep to resume, or None if a new sweep is started."""
        find("search_spaces", self.space)
        name = sweep_name(self.space, stage_of(self.space_options))
        known = self.sweep_id is not None or any(one.manifest().name == name for one in self.results.sweeps())
        return self.results.find(name, self.sweep_id) if self.resume or (self.join and known) else None

    @cached_property
    def linked(self) -> Mapping[StageName, SweepStore]:
        """The linked sweeps to resume, by stage; empty if new linked sweeps are started."""
        from fedsweep.sweep.running.linked_sweeps import sweeps_to_resume

        return sweeps_to_resume(self) if self.resume else {}

    @cached_property
    def request(self) -> RequestedSpace:
        """The search space with the user's changes. A resumed sweep keeps the changes with which it was started.

        Resumed linked sweeps keep the changes with which their tuning sweep was started.
        """
        resumed = self.linked.get("tuning") if self.is_linked else self.resumed
        if resumed is None:
            return read(self.space, self.overrides, self.space_options)
        started = resumed.manifest()
        kept = {name: value for name, value in started.options.items() if not (self.is_linked and name == STAGE)}
        return read(self.space, {**started.overrides, **self.overrides}, {**kept, **self.space_options})

    @cached_property
    def is_linked(self) -> bool:
        """True if the arms are tuned one by one, so that several sweeps are run. False for each of these sweeps."""
        if stage_of(self.space_options) is not None:
            return False
        return bool(read_yaml(find("search_spaces", self.space)).get("tune_each"))

    @property
    def destination(self) -> Destination:
        """The MLflow database or server that records the sweep."""
        from fedsweep.tracking import Destination

        if self.resumed is not None:
            return Destination.of_sweep(self.results.root, self.resumed.folder, self.mlflow)
        return Destination.of(self.results.root, self.mlflow)


def tune(
    options: TuneOptions, console: Console | None = None, show: Callable[[Report], object] = lambda report: None
) -> SweepResult:
    """Run a search space on Ray Tune, record it, and write its report.

    If the search space tunes each arm (`tune_each`), all of its linked sweeps are run.

    Args:
        options: The search space, the user's changes to it, the machines and the store.
        console: The console for progress messages; none are printed by default.
        show: Called with the report as soon as it is written, before the last rounds are sent to MLflow.

    Returns:
        The trials, the report and the exit status. Every round is in the store, and also in MLflow if MLflow answers.
        Of linked sweeps, the result of the last one is returned.

    Raises:
        UserError: The search space is invalid, or a machine, the store, the MLflow server or an existing MLflow
            database cannot be used. The error is raised before any trial starts.
    """
    from fedsweep.common.signals import ending_signals_interrupt
    from fedsweep.sweep.cluster.ray_session import OwnRay

    console = console or silent_console()
    if options.is_linked:
        from fedsweep.sweep.running.linked_sweeps import linked_sweeps

        return linked_sweeps(options, console, show)
    with ending_signals_interrupt(), OwnRay(options.address, console) as ray:
        return tune_one(options, console, show, ray)


def tune_one(
    options: TuneOptions, console: Console, show: Callable[[Report], object], ray: OwnRay, more: bool = False
) -> SweepResult:
    """Run a single sweep (see `tune`).

    Args:
        options: The options of the sweep, which may be one of the linked sweeps of a search space.
        console: The console for progress messages.
        show: Called with the report.
        ray: The Ray instance on this machine. It is started if a trial is left to run, and stopped before the report is
            written.
        more: Whether another linked sweep follows. If so, the Ray instance is kept for it, unless this sweep was
            interrupted, could not be stored, or has lost the instance.
    """
    from fedsweep.common.signals import ending_signals_interrupt
    from fedsweep.sweep.cluster.ray_session import prepare_environment

    with ending_signals_interrupt() as received, contextlib.ExitStack() as starting, contextlib.ExitStack() as held:
        if options.join and options.resumed is None:
            starting.enter_context(_first_to_start(options, console))
            options = replace(options)  # another process may have started the sweep until now
        workers = min(most := options.request.most_trials(), options.at_once or most)
        begin = functools.partial(ray.begin, options.request.space.resources, workers)
        if _certain_to_run(options):
            begin()
        ready = held.enter_context(_prepared(options, console))
        from fedsweep.sweep.running.open_sweep import opened

        prepare_environment(ready.cluster)
        with contextlib.ExitStack() as joined:

            @functools.cache
            def connect() -> None:
                begin()
                joined.enter_context(ray.session(ready.cluster))

            sweep, is_driver = opened(ready, options, console, held, connect)
            starting.close()
            if options.id_file is not None:
                write_atomically(Path(options.id_file), f"{sweep.folder.name}\n".encode())
            with waiting(console, "Loading Ray Tune"), without_collections():
                from fedsweep.sweep.running.sessions import join, run  # imports ray, which reads the environment

            session = run(ready, sweep, console, held) if is_driver else join(ready, sweep, console, held, connect)
        ray.keep() if more and not session.stopped and not session.lost else ray.end()
        with waiting(console, "Loading the report"), without_collections():
            from fedsweep.sweep.running.finish import finish  # imports the report, which would delay the trials

        return finish(session, console, show, received.status)


@contextlib.contextmanager
def rehearsed(options: TuneOptions, console: Console) -> Iterator[Prepared]:
    """Perform the checks of `tune` for a dry run, and yield the checked plan.

    No folder is created, no trial is started, and no file is sent to a node.
    """
    from fedsweep.tracking import check_could_write

    if options.results.uri is None:
        check_could_write(options.results.root)
    with _prepared(options, console, rehearsal=True) as ready:
        from fedsweep.sweep.plan.warm_start import collect
        from fedsweep.sweep.running.open_sweep import resumed_sweep

        if options.resumed is not None:
            resumed_sweep(ready.plan, ready.store, options.resumed)
        elif known := collect(ready.plan, ready.store):
            console.print(known.note(ready.plan.base.federation.rounds))
        yield ready


@contextlib.contextmanager
def _first_to_start(options: TuneOptions, console: Console) -> Iterator[None]:
    """Let only this process start a sweep of the search space within the block; other processes then join it."""
    lock = options.results.root / f".starting-{options.space.replace('/', '-')}.lock"
    with contextlib.ExitStack() as stack:
        with waiting(console, "Waiting for another process that starts the sweep"):
            stack.enter_context(locked(lock, "the sweep is being started", seconds=-1))
        stack.callback(lock.unlink, missing_ok=True)
        yield


def _certain_to_run(options: TuneOptions) -> bool:
    """Return whether Ray can begin to start while the sweep is checked, because a trial will certainly run.

    This is unknown if the sweep may reuse all of its trials, or if it is resumed and runs seeds until its comparisons
    are decided. If an error is already certain, it is raised.
    """
    from fedsweep.tracking import check_writable

    root, request = options.results.root, options.request
    if root.exists() and not root.is_dir():
        check_writable(root)
    if request.counted:
        return False
    if options.resumed is not None:
        return options.resumed.manifest().until_decided is None and options.resumed.any_left()
    name = sweep_name(options.space, stage_of(options.space_options))
    return options.fresh or not any(one.manifest().name == name for one in options.results.sweeps())


@contextlib.contextmanager
def _prepared(options: TuneOptions, console: Console, rehearsal: bool = False) -> Iterator[Prepared]:
    """Prepare a sweep: join the cluster, if any, and check the machines, the data, the weights and the MLflow server.

    If `rehearsal` is true, no files are sent to nodes, and the MLflow server is not changed.
    """
    request, destination = options.request, options.destination
    if request.counted:
        raise UserError(f"{request.where} only counts parameters; use `fedsweep show` to print the counts.")

    with loading(console, "PyTorch", "fedsweep.sweep.plan.plan"):
        from fedsweep.federation.build_and_run import check_pixels
        from fedsweep.results.records import choice_by_test_images
        from fedsweep.sweep.cluster.cluster import LOCAL
        from fedsweep.sweep.cluster.ray_session import opened
        from fedsweep.sweep.plan.client_budgets import unequal_budgets
        from fedsweep.sweep.plan.plan import Plan
        from fedsweep.sweep.running.open_sweep import Prepared
        from fedsweep.sweep.running.shared_sweep import check_shareable
        from fedsweep.tracking import check_server

    with waiting(console, "Checking the arms"):
        plan = Plan.of(request)
        if options.join:
            check_shareable(plan)
    # The cluster is joined before the sweep's folder is created, so that a failure leaves no folder.
    with contextlib.ExitStack() as stack:
        joining = waiting(console, "Connecting to the Ray cluster", always=True)
        with contextlib.nullcontext() if options.address == LOCAL else joining:
            cluster = stack.enter_context(opened(options.address, options.at_once))
        plan = plan.on(_decided(plan.space.resources, cluster, options.resumed))
        with waiting(console, f"Checking the data and the weights of {plan.num_trials} trials"):
            plan.preflight()
        space, second = plan.space, plan.space.goal.against
        chosen = space.goal.metric, space.search.name, space.scheduler.name, second.metric if second else None
        if warned := choice_by_test_images(*chosen):
            console.print(f"{warned} See guides/tuning.md in the documentation.", style="yellow", soft_wrap=True)
        for sentence in unequal_budgets(plan):
            console.print(sentence, style="yellow", soft_wrap=True)
        if options.verify:
            with waiting(console, "Reading all pixels"):
                check_pixels(plan.reachable())
        for sentence in dict.fromkeys(filter(None, (one.untrained_backbone() for _, one in plan.configs))):
            console.print(sentence, style="yellow")
        try:
            with waiting(console, "Checking MLflow"):
                check_server(destination, None if rehearsal else plan.name)
        except UserError as error:
            if options.resumed is None:
                raise
            console.print(f"{error} Missing rounds are sent to MLflow once it answers again.", style="yellow")
        arrival = None
        if not cluster.is_local:
            from fedsweep.sweep.cluster.nodes import make_ready  # imports ray

            arrival = make_ready(cluster, plan, options.results, console, deliver=not rehearsal)
        yield Prepared(plan, options.results, destination, cluster, arrival)


def _decided(resources: Resources, cluster: Cluster, resumed: SweepStore | None) -> Resources:
    """Return the resources of each trial, after checking that the machines have them."""
    from fedsweep.sweep.cluster.cluster import check_device, check_resources, decided

    started = resumed.manifest() if resumed is not None else None
    resources = decided(resources, cluster, started)
    if started is not None:
        check_device(resources, cluster, started)
    check_resources(resources, cluster)
    return resources
