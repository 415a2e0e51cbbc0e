"""Changes to a sweep after it has started: further seeds, dropped arms, and a stop that another process asks for.

A changed sweep continues as if it had been planned so from the start. This module does not import ray.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping
from dataclasses import replace

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.yaml_values import Json
from fedsweep.results import Outcome, Store, SweepManifest, SweepStore, TrialRecord
from fedsweep.results.arms import arm_label, identity
from fedsweep.results.records import DROPPED, Change
from fedsweep.results.steering import DropRequest, ExtendRequest, Request, Requests, StopRequest
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import exclusively, resumed_sweep
from fedsweep.sweep.running.shared_sweep import planning
from fedsweep.sweep.space.requested_space import read


class Steering:
    """The requests that other processes make to a running sweep.

    A granted change lets each trial end its current round. The change is then applied, and the trials continue.
    """

    def __init__(self, plan: Plan, sweep: SweepStore) -> None:
        self.plan = plan
        self.interrupted = False
        """True if the session was stopped, by Ctrl-C or by another process."""
        self._sweep, self._requests = sweep, Requests(sweep)
        self._granted: dict[str, tuple[Request, Plan]] = {}
        self._stops: list[str] = []

    @property
    def paused(self) -> bool:
        """True if no trial must start or continue, because a change has to be applied first."""
        return bool(self._granted)

    @contextlib.contextmanager
    def planning(self) -> Iterator[bool]:
        """Let only this process write plans within the block, and yield True: only the driver changes the sweep."""
        with planning(self._sweep):
            yield True

    def look(self) -> bool:
        """Look for new requests, refuse those that are invalid, and return whether the sweep must stop.

        If the folder of requests cannot be read or written, the sweep goes on.
        """
        with contextlib.suppress(OSError):
            self._look()
        return bool(self._stops)

    def _look(self) -> None:
        for name, request in self._requests.waiting():
            if isinstance(request, StopRequest):
                self._stops += [name] * (name not in self._stops)
            elif name not in self._granted:
                try:
                    self.plan = changed_plan(self.plan, request)
                except Exception as error:  # whatever is wrong with the request, the sweep goes on
                    self._requests.answer(name, str(error) if isinstance(error, UserError) else one_line(error))
                else:
                    self._granted[name] = request, self.plan

    def apply(self) -> list[str]:
        """Apply the granted changes, and return a sentence about each of them."""
        sentences = []
        for name, (request, plan) in self._granted.items():
            sentences.append(apply(request, plan, self._sweep))
            self._requests.answer(name, sentence=sentences[-1])
        self._granted = {}
        return sentences

    def record_stop(self) -> bool:
        """Record that another process has stopped the sweep, answer it, and return whether this is so."""
        if self._stops:
            change = _record(self._sweep, {}, kind="stopped")
            for name in self._stops:
                self._requests.answer(name, sentence=change.sentence)
        return bool(self._stops)


def changed_plan(plan: Plan, request: ExtendRequest | DropRequest) -> Plan:
    """Return the plan of a sweep after a change.

    Raises:
        UserError: The sweep cannot be changed in this way. Its seeds or arms may depend on results, for example.
    """
    asked, space = plan.request, plan.space
    verb = "extended" if isinstance(request, ExtendRequest) else "changed"
    where = f"a sweep of {asked.name} cannot be {verb}"
    if asked.stage is not None:
        raise UserError(f"{where}, because its arms are tuned one by one (`tune_each`); start a new sweep.")
    for setting, chosen, needed in (
        ("search", space.search.name, "grid"),
        ("scheduler", space.scheduler.name, "none"),
    ):
        if chosen != needed:
            rule = f"because `{setting}` is {chosen}, whose choices depend on all trials"
            raise UserError(f"{where}, {rule}; this needs `{setting}` {needed}.")
    options = _with_seeds(plan, request, where) if isinstance(request, ExtendRequest) else _without_arm(plan, request)
    changed = Plan.of(read(asked.name, asked.overrides, {**asked.options, **options})).on(space.resources)
    changed.preflight()
    return changed


def _with_seeds(plan: Plan, request: ExtendRequest, where: str) -> Mapping[str, Json]:
    space, seeds = plan.space, plan.space.planned_seeds
    if space.until_decided is not None:
        raise UserError(
            f"{where}, because it runs seeds until its comparisons are decided, and the decisions depend on "
            f"`seeds.at_most` {len(seeds)}; start a new sweep with fresh seeds (`--first-seed {seeds[-1] + 1}`)."
        )
    if wrong := [seed for seed in request.seeds if seed < 0 or request.seeds.count(seed) > 1]:
        raise UserError(f"`--seeds` must be distinct and not negative, but they contain {wrong[0]}.")
    if known := [seed for seed in request.seeds if seed in seeds]:
        listed = ", ".join(map(str, seeds))
        raise UserError(f"`--seeds` must list only new seeds besides {listed}, but it contains {known[0]}.")
    return {"seeds": [*seeds, *request.seeds]}


def _without_arm(plan: Plan, request: DropRequest) -> Mapping[str, Json]:
    left = [arm for arm in plan.arms if identity(arm) != identity(request.arm)]
    label = arm_label(request.arm)
    if len(left) == len(plan.arms):
        raise UserError(f"the arm {label} does not belong to the sweep, or has been dropped before.")
    if not left:
        raise UserError(f"the arm {label} is the only one of the sweep and cannot be dropped.")
    return {"exclude": [*plan.space.exclude, dict(request.arm)]}


def apply(request: Request, plan: Plan, sweep: SweepStore) -> str:
    """Change a sweep whose trials do not run at the moment, and return a sentence about the change.

    The folders of the trials of a dropped arm are set aside. A new process that resumes the sweep continues an
    application that was interrupted.

    Args:
        request: The change.
        plan: The plan of the sweep after the change.
        sweep: The folder of the sweep.
    """
    updated: dict[str, object] = {
        "seeds": plan.space.planned_seeds,
        "trials": None if plan.space.until_decided else plan.num_trials,
        "options": dict(plan.request.options),
        "digests": plan.digests(),
    }
    with planning(sweep):  # other processes that take part write no plan of a dropped arm from now on
        if isinstance(request, ExtendRequest):
            change = _record(sweep, updated, kind="extended", seeds=request.seeds)
        else:
            arm = request.arm if isinstance(request, DropRequest) else None
            change = _record(sweep, updated, kind="dropped", arm=arm)
    set_aside(plan, sweep)
    return change.sentence


def as_dropped(trial: TrialRecord) -> TrialRecord:
    """Return a trial that was set aside, with an outcome that tells MLflow that it does not count."""
    ended = trial.outcome or Outcome(outcome="pruned", round=max(trial.last_round, 0))
    return replace(trial, outcome=ended.model_copy(update={"reason": DROPPED}))


def set_aside(plan: Plan, sweep: SweepStore) -> None:
    """Set aside the trials that do not belong to the plan, and number the others as in the plan.

    If another process runs a trial that does not belong to the plan, wait until it has ended its round.
    """
    numbers = {one.key: one.number for one in plan.grid()}
    for trial in sweep.trials():
        key = trial.plan.key
        if key not in numbers:
            with sweep.trial(key).take(seconds=-1):
                sweep.set_aside(key)
        elif trial.plan.number != numbers[key]:
            sweep.trial(key).plan(trial.plan.model_copy(update={"number": numbers[key]}))


def _record(sweep: SweepStore, updated: Mapping[str, object], **change: object) -> Change:
    """Add a change to the manifest of a sweep, and update other entries."""
    manifest = sweep.manifest()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    made = Change.model_validate({"time": now, "ended": len(sweep.ended()), **change})
    sweep.change(manifest.model_copy(update={**updated, "changes": (*manifest.changes, made)}))
    return made


def plan_of(manifest: SweepManifest) -> Plan:
    """Return the current plan of a sweep from its manifest; raise UserError if its files are no longer valid."""
    return Plan.of(read(manifest.name, manifest.overrides, manifest.options))


def change_at_rest(request: ExtendRequest | DropRequest, store: Store, sweep: SweepStore) -> str:
    """Change a sweep that no process is running, and return a sentence about the change.

    Raises:
        UserError: A process has begun to run the sweep, or the sweep cannot be changed in this way or not be resumed.
    """
    with exclusively(sweep):
        plan = plan_of(sweep.manifest())
        changed = changed_plan(plan, request)
        resumed_sweep(plan, store, sweep)
        return apply(request, changed, sweep)
