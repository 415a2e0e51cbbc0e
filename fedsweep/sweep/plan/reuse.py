"""Reuse of trials that another sweep has finished: the same configuration, code, data and processor."""

from fedsweep.results import Store, SweepManifest, SweepStore, TrialPlan, TrialStore
from fedsweep.results.provenance import TAKEN_FROM


class Reuse:
    """Trials of other sweeps in a store that one sweep can reuse; failed and running ones are not among them."""

    def __init__(self, store: Store, sweep: SweepStore) -> None:
        started = sweep.manifest()
        self.sweep = sweep
        self._found: dict[str, tuple[str, TrialStore]] = {}
        if started.fresh or started.scheduler == "pbt":  # members continue each other at rounds that others are beyond
            return
        for other in store.sweeps():
            manifest = other.manifest()
            if manifest.id != started.id and _computes_alike(started, manifest):
                self._found |= {key: (manifest.id, other.trial(key)) for key in other.ended()}

    def give(self, plan: TrialPlan, together: bool = False) -> TrialPlan:
        """Reuse the trial of another sweep if there is one, and return the plan with the origin among its tags.

        The outcome of a trial whose arms are judged `together` is not reused, because it depends on the other arms.
        """
        trial = self.sweep.trial(plan.key)
        if plan.key not in self._found or trial.planned:
            return plan
        origin, other = self._found[plan.key]
        other.remote.pull()
        outcome = other.outcome()
        if outcome is None or outcome.outcome == "failed":
            return plan
        marked = plan.model_copy(update={"marks": {**plan.marks, TAKEN_FROM: origin}})
        trial.take(other, ends=() if together else ("finished", "diverged"))
        trial.plan(marked)
        return marked


def _computes_alike(one: SweepManifest, other: SweepManifest) -> bool:
    """Return whether equal trials are bit-identical; a trial's key has its configuration, data and fedsweep's code."""
    return one.processor == other.processor != "" and one.digests.get("packages") == other.digests.get("packages")
