"""Selection of the trial that a user names by key, by search space and arm, or by experiment."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fedsweep.common.errors import UserError, near, summarise_list
from fedsweep.results import Store, SweepStore, TrialRecord, TrialStore
from fedsweep.results.arm_names import SEED, select
from fedsweep.results.arms import distinct_labels, identity
from fedsweep.results.folders import is_hidden
from fedsweep.results.history import last, uses_test_images

GRAMMAR = (
    "a trial's key, SPACE[@SWEEP][:ARM] such as `ablations/lora_rank:lora.rank=4,seed=0`, or an experiment that was run"
)


@dataclass(frozen=True)
class Named:
    """The trial or single run that the user selected."""

    trial: TrialStore
    record: TrialRecord
    name: str
    """The search space, or the experiment of a single run."""
    sweep: SweepStore | None
    """None for a single run."""
    why: str
    """The reason for choosing this trial among several; empty if only one matched."""
    by_test: bool = False
    """True if test images decided which trials ran to their ends, or which of several was chosen."""


def find_trial(store: Store, text: str, unfinished: bool = False) -> Named:
    """Return the trial that `text` names, or the trial with the best objective if several trials match.

    `text` is a trial's key, an arm as `SPACE[@SWEEP][:ARM]`, or an experiment. If `text` is an experiment, return the
    experiment's newest single run. Trials that have not finished are accepted only if `unfinished` is true.

    Raises:
        UserError: No trial matches, or `text` is ambiguous.
    """
    name, colon, arm = text.partition(":")
    bare, _, which = name.partition("@")
    store.check_readable(bare)
    spaces = {sweep.folder.name: sweep.manifest().name for sweep in store.sweeps()}
    if bare in {*spaces, *spaces.values()}:
        sweep = store.find(bare, which or None)
        return _best(sweep, sweep.trials(), arm if colon else None, unfinished)
    runs = _runs(store)
    if bare in runs and not colon:
        return _run(store, bare, which, runs[bare], unfinished)
    if bare == text and (found := _by_key(store, text)):
        sweep, record = found
        return _best(sweep, [record], None, unfinished)
    hint = near(bare, {*spaces.values(), *runs}) or f"; it must be {GRAMMAR}."
    raise UserError(f"there is no trial `{text}` in {store.where}{hint}")


def _runs(store: Store) -> dict[str, list[str]]:
    """Return a dict from each experiment to the ids of its single runs, oldest first."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for run in store.runs():
        found[run.folder.parent.relative_to(store.root / "runs").as_posix()].append(run.folder.name)
    return found


def _run(store: Store, name: str, stamp: str, stamps: Sequence[str], unfinished: bool) -> Named:
    if stamp and stamp not in stamps:
        raise UserError(f"there is no run `{stamp}` of {name} in {store.where}{near(stamp, stamps) or '.'}")
    trial = store.whole_run(name, stamp or stamps[-1])
    record = trial.read()
    if not unfinished and not _finished(record):
        raise UserError(f"the run {name}@{record.plan.key} {_standing(record)}.")
    _check_rounds([record], f"the run {name}@{record.plan.key}")
    return Named(trial, record, name, None, f"the newest of {len(stamps)} runs" if len(stamps) > 1 > len(stamp) else "")


def _by_key(store: Store, prefix: str) -> tuple[SweepStore, TrialRecord] | None:
    """Return the trial whose key begins with `prefix`, and its sweep; return None if no key begins with `prefix`.

    If several sweeps contain the trial, return the newest sweep in which the trial finished. If the trial finished in
    none of these sweeps, return the newest of them.

    Raises:
        UserError: Several keys begin with `prefix`.
    """
    found: list[tuple[SweepStore, TrialRecord]] = []
    for sweep in reversed(store.sweeps()):
        sweep.fetch()
        folders = sorted(path.parent for path in (sweep.folder / "trials").glob("*/trial.json"))
        mine = [one for one in folders if prefix and one.name.startswith(prefix) and not is_hidden(one)]
        found += [(sweep, TrialStore(one).read()) for one in mine]
    keys = sorted({record.plan.key for _, record in found})
    if len(keys) > 1:
        raise UserError(
            f"`{prefix}` must be the beginning of one trial's key, but {len(keys)} keys begin with it: "
            f"{summarise_list(keys, most=6, quote='')}."
        )
    return min(found, key=lambda one: not _finished(one[1])) if found else None


def _best(sweep: SweepStore, trials: Sequence[TrialRecord], arm: str | None, unfinished: bool) -> Named:
    """Return the trial with the best final objective among the trials that `arm` names, or among all if it is None.

    `arm` is the name of an arm, in any form that `fedsweep.results.arm_names.select` accepts. The name can also contain
    a seed. Trials that have not finished are accepted only if `unfinished` is true.
    """
    manifest = sweep.manifest()
    where = manifest.label
    named = [{**one.plan.arm, SEED: one.plan.seed} for one in trials]
    meant = list(trials) if arm is None else [trials[place] for place in select(arm, named, manifest.varied)]
    if not meant:
        planned = {identity(one.plan.arm): one.plan.arm for one in trials}
        labels = distinct_labels(planned.values())
        seeds = ", ".join(map(str, sorted({one.plan.seed for one in trials})))
        arms = (
            f"; its arms are {summarise_list(labels, most=6, sign='; ', quote='')}, and its seeds are {seeds}"
            if labels
            else ""
        )
        raise UserError(f"no trial of {where} has {'been planned' if arm is None else f'the arm `{arm}`'}{arms}.")
    pool = meant if unfinished else [one for one in meant if _finished(one)]
    if not pool and len(meant) == 1:
        raise UserError(f"trial {meant[0].plan.key} of {where} {_standing(meant[0])}.")
    if not pool:
        raise UserError(
            f"none of the {len(meant)} trials of {where} has finished; `--unfinished` also accepts other trials."
        )
    _check_rounds(pool, where)
    sign = 1 if manifest.mode == "max" else -1

    def rank(one: TrialRecord) -> float:
        value = last(one.history, manifest.metric)
        return -math.inf if value is None or not math.isfinite(value) else sign * value

    chosen = max((one for one in pool if one.history), key=rank)
    trial = sweep.trial(chosen.plan.key)
    trial.remote.pull(whole=True)
    kind = "" if unfinished else "finished "
    by = manifest.chosen_by or manifest.metric
    why = f"the best of {len(pool)} {kind}trials by {by}{_of_its_arm(chosen, trials, manifest.metric)}"
    several = len(pool) > 1
    by_test = manifest.choice_by_test_images is not None or (several and uses_test_images(manifest.metric))
    return Named(trial, chosen, manifest.name, sweep, why if several else "", by_test)


def _of_its_arm(chosen: TrialRecord, trials: Sequence[TrialRecord], metric: str) -> str:
    """Return a note with the mean of `metric` over all finished seeds of the arm to which `chosen` belongs.

    The note is needed because the value of the best seed alone would be optimistic. The note is empty if fewer than two
    seeds of the arm have finished.
    """
    ends = [last(one.history, metric) for one in trials if one.plan.arm == chosen.plan.arm and _finished(one)]
    known = [value for value in ends if value is not None and math.isfinite(value)]
    return f" (mean of its arm over {len(known)} seeds: {math.fsum(known) / len(known):.4f})" if len(known) > 1 else ""


def _check_rounds(records: Sequence[TrialRecord], where: str) -> None:
    if not any(one.history for one in records):
        raise UserError(f"{where} has no recorded round yet, so there is nothing to export.")


def _finished(record: TrialRecord) -> bool:
    return record.outcome is not None and record.outcome.outcome == "finished"


def _standing(record: TrialRecord) -> str:
    how = "has not ended" if record.outcome is None else f"has the outcome `{record.outcome.outcome}`"
    if record.missing:
        how = f"has ended, but {'some' if record.history else 'all'} of its recorded rounds are not on disk"
    if not record.history:
        return how if record.missing else f"{how} and has no recorded round"
    return f"{how}; `--unfinished` exports its state after round {record.last_round}"
