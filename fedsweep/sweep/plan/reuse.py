"""Reuse of trials that other sweeps have run with the same configuration, code, data, packages and processor."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fedsweep.common.errors import UserError, warn
from fedsweep.results import OutcomeName, Store, SweepManifest, SweepStore, TrialPlan, TrialStore
from fedsweep.results.history import RoundRecord
from fedsweep.results.records import TAKEN_FROM
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.space.settings import compared_rounds, decides_jointly

FINAL: tuple[OutcomeName, ...] = ("finished", "diverged")
"""Outcomes that are reused together with the recorded rounds, so that the trial does not run."""


class Reuse:
    """The trials that a new sweep can reuse, because they have ended in another sweep in the same results folder."""

    def __init__(self, store: Store, sweep: SweepStore, compared: Collection[int] = ()) -> None:
        """Find the trials.

        Args:
            store: The results folder of the sweeps.
            sweep: The new sweep.
            compared: The rounds at which its scheduler compares trials. A trial that ran through one of these rounds
                without an evaluation is not reused.
        """
        self.sweep, self._found, self._compared = sweep, _ended_elsewhere(store, sweep.manifest()), compared

    def give(self, plan: TrialPlan, together: bool = False) -> TrialPlan:
        """Reuse a trial of an earlier sweep, if possible.

        The results are copied from the earlier sweep, and the returned plan has a tag that names the earlier sweep. The
        plan is returned unchanged if no other sweep has run the trial, if the trial failed in the other sweep, or if
        this sweep already contains the trial.

        Args:
            plan: The plan of the trial.
            together: Whether the outcome of the trial depends on other trials of this sweep (see `decides_jointly`). If
                so, the recorded rounds are copied without the outcome.
        """
        trial = self.sweep.trial(plan.key)
        if plan.key not in self._found or trial.planned:
            return plan
        origin, other = self._found[plan.key]
        try:
            outcome = _outcome(other)
        except UserError as error:
            warn(f"a trial of sweep {origin} is not reused but run again: {error}")
            return plan
        if outcome is None or outcome == "failed":
            return plan
        if not _evaluated(other, self.sweep.manifest().metric, self._compared):
            return plan
        marked = plan.model_copy(update={"marks": {**plan.marks, TAKEN_FROM: origin}})
        # An outcome that depends on other trials is decided anew in this sweep.
        trial.copy(other, ends=() if together else FINAL)
        trial.plan(marked)
        return marked


def all_reusable(plan: Plan, store: Store, started: SweepManifest) -> bool:
    """Return whether a new sweep reuses all of its trials from other sweeps, so that no trial is left to run.

    The result is always False for sampled searches, populations, and schedulers that decide anew in each sweep how a
    trial ends, because the trials or their outcomes are not known before the sweep runs.

    Args:
        plan: The plan of the new sweep.
        store: The results folder of the sweeps.
        started: The manifest of the new sweep.
    """
    if plan.sampled is not None or decides_jointly(plan.space.scheduler):
        return False
    found = _ended_elsewhere(store, started)
    try:
        trials = [found[one.key][1] for one in plan.grid() if one.key in found]
        compared, metric = compared_rounds(plan.space.scheduler, plan.base.federation.rounds), started.metric
        ended = all(_outcome(one) in FINAL and _evaluated(one, metric, compared) for one in trials)
        return ended and len(trials) == plan.num_trials
    except UserError:  # `Reuse.give` warns about a damaged trial
        return False


@dataclass(frozen=True)
class ReusedTrial:
    """A trial as a new sweep would contain it after reusing the rounds of another sweep, but not its outcome."""

    rounds: Sequence[RoundRecord] = ()

    @property
    def planned(self) -> bool:
        """True if another sweep has recorded rounds of the trial."""
        return bool(self.rounds)

    def recorded(self) -> Sequence[RoundRecord]:
        """Return the reused rounds."""
        return self.rounds

    def outcome(self) -> None:
        """Return None, because the new sweep decides how the trial ends."""

    def error(self) -> None:
        """Return None, because trials with errors are not reused without their outcome."""


class ReusedTrials:
    """The trials as a new sweep would contain them at its start, before its folder is created."""

    def __init__(self, store: Store, started: SweepManifest) -> None:
        self._found = _ended_elsewhere(store, started)

    def trial(self, key: str) -> ReusedTrial:
        """Return a trial, without rounds if no other sweep has run it."""
        if key not in self._found:
            return ReusedTrial()
        _, other = self._found[key]
        try:
            return ReusedTrial() if _outcome(other) in (None, "failed") else ReusedTrial(other.recorded())
        except UserError:  # `Reuse.give` warns about a damaged trial
            return ReusedTrial()


def _ended_elsewhere(store: Store, started: SweepManifest) -> Mapping[str, tuple[str, TrialStore]]:
    """Return the trials that have ended in other sweeps whose results are comparable.

    Args:
        store: The results folder of the sweeps.
        started: The manifest of the sweep that may reuse the trials.

    Returns:
        The id of the other sweep and the folder of the trial, by the key of the trial.
    """
    found: dict[str, tuple[str, TrialStore]] = {}
    if started.fresh or started.scheduler == "pbt":  # members of a population continue from each other's states
        return found
    for other in store.sweeps():
        manifest = other.manifest()
        # A trial's key depends on its configuration, data and code. Its metrics also depend on these two.
        same_processor = manifest.processor == started.processor != ""
        same_packages = manifest.digests.get("packages") == started.digests.get("packages")
        if manifest.id != started.id and same_processor and same_packages:
            found |= {key: (manifest.id, other.trial(key)) for key in other.ended()}
            found |= {key: (manifest.id, one) for key, one in other.dropped().items() if one.outcome() is not None}
    return found


def _evaluated(trial: TrialStore, metric: str, compared: Collection[int]) -> bool:
    """Return whether a trial has a value of `metric` in each of the rounds `compared` that it reached."""
    return all(metric in record.metrics for record in trial.history() if record.round in compared)


def _outcome(trial: TrialStore) -> OutcomeName | None:
    """Return the outcome of a trial in another sweep, or None if the trial has none or its rounds are missing.

    Raises:
        UserError: A file of the trial is damaged.
    """
    trial.remote.pull()
    outcome = trial.read().outcome
    return None if outcome is None else outcome.outcome
