"""The folder of a sweep: a new one, or one to go on with; and what a session that was killed left in it."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import shutil
from collections.abc import Iterator

from fedsweep.common.errors import UserError
from fedsweep.common.files import locked
from fedsweep.results import Outcome, Store, SweepManifest, SweepStore
from fedsweep.results.remote.mirror import SCRATCH
from fedsweep.sweep.cluster.cluster import processor
from fedsweep.sweep.plan import warm_start
from fedsweep.sweep.plan.plan import Plan
from fedsweep.tracking import check_writable


def open_sweep(plan: Plan, store: Store, resume: bool, sweep_id: str | None, fresh: bool = False) -> SweepStore:
    """A new sweep's folder, or that of the one to go on with. A `fresh` one takes no trial from another.

    Raises:
        UserError: there is nothing to resume, or its definition, the engine or the data changed since; or the store
            cannot be written.
    """
    check_writable(store.root)
    store.check_writable()
    if resume:
        sweep = store.find(plan.name, sweep_id)
        started = sweep.manifest()
        for what, digest in plan.digests().items():
            if started.digests[what] != digest:
                changed = {
                    "definition": "its YAML files or overrides have",
                    "engine": "fedsweep's engine has",
                    "data": "its data or weights have",
                    "packages": "the installed packages have",
                }
                raise UserError(
                    f"sweep {started.id} of {plan.name} cannot be resumed because {changed[what]} changed since; "
                    "start a new sweep, or undo the change."
                )
        return sweep
    taken = warm_start.collect(plan, store)
    now = datetime.datetime.now(datetime.UTC)
    manifest = SweepManifest(
        id=f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        name=plan.name,
        experiment=plan.space.experiment,
        created=now.isoformat(),
        metric=plan.space.objective.metric,
        mode=plan.space.objective.mode,
        against=plan.space.objective.against,
        rounds=plan.base.federation.rounds,
        varied=tuple(plan.space.names),
        baseline=plan.space.baseline,
        reference=plan.reference,
        seeds=plan.space.seeds,
        trials=None if plan.space.scheduler.name == "pbt" else plan.num_trials,
        scheduler=plan.space.scheduler.name,
        search=plan.space.search.name,
        domains=plan.base.data.domains,
        columns=plan.space.columns,
        logarithmic=tuple(key for key, axis in plan.space.space.items() if axis.loguniform or axis.loginteger),
        overrides=plan.changes["overrides"],
        options=plan.changes["options"],
        digests=plan.digests(),
        processor=processor(plan.space.resources),
        fresh=fresh,
    )
    sweep = store.sweep(plan.name, manifest.id)
    warm_start.keep(taken, sweep)
    sweep.create(manifest, plan.files)
    return sweep


@contextlib.contextmanager
def alone(sweep: SweepStore) -> Iterator[None]:
    """One process runs a sweep at a time. Where its store is elsewhere, the folder is as that is, from then on.

    Raises:
        UserError: another one does.
        UnreachableError: the store elsewhere does not answer.
    """
    what = f"sweep {sweep.folder.name}"
    taken = f"{what} is being run by another process; wait for it or end it."
    with locked(sweep.folder / ".lock", taken), sweep.remote.exclusively(what):
        sweep.remote.pull(discard=True)
        try:
            yield
        finally:
            sweep.remote.save()


def tidy(sweep: SweepStore, rounds: int, retry: bool, judged: bool = False) -> None:
    """Clear what a killed session left behind, and with `retry` reopen failures, which another attempt may mend.

    What diverged would do so again; a worker that ran out of memory, or a full disk, may not be met again. In a
    sampled search a failure stays one, because the search has gone on from it. Where arms are `judged` together, a
    trial with all its rounds is finished only if its arm did not fall before.
    """
    shutil.rmtree(sweep.folder / SCRATCH, ignore_errors=True)
    sweep.remote.clear(SCRATCH)
    for torn in (sweep.folder / "trials").glob("*/.*"):
        torn.unlink()
    if not judged:
        settle(sweep, rounds)
    for trial in sweep.trials() if retry else ():
        if trial.outcome is not None and trial.outcome.outcome == "failed":
            sweep.trial(trial.plan.key).reopen()


def settle(sweep: SweepStore, rounds: int) -> None:
    """Mark trials as finished that have all their rounds on disk, but whose session ended before it could say so."""
    for trial in sweep.trials():
        if trial.outcome is None and trial.last_round >= rounds:
            sweep.trial(trial.plan.key).end(Outcome(outcome="finished", round=trial.last_round))
