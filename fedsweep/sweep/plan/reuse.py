"""Reuse of trials that other sweeps have run with the same configuration, code, data, packages and processor."""

from fedsweep.common.errors import UserError, warn
from fedsweep.results import Store, SweepStore, TrialPlan, TrialStore
from fedsweep.results.records import TAKEN_FROM


class Reuse:
    """The trials that a new sweep can reuse, because they have ended in another sweep in the same results folder."""

    def __init__(self, store: Store, sweep: SweepStore) -> None:
        self.sweep, started = sweep, sweep.manifest()
        self._found: dict[str, tuple[str, TrialStore]] = {}
        if started.fresh or started.scheduler == "pbt":  # members of a population continue from each other's states
            return
        for other in store.sweeps():
            manifest = other.manifest()
            # A trial's key depends on its configuration, data and code. Its metrics also depend on these two.
            same_processor = manifest.processor == started.processor != ""
            same_packages = manifest.digests.get("packages") == started.digests.get("packages")
            if manifest.id != started.id and same_processor and same_packages:
                self._found |= {key: (manifest.id, other.trial(key)) for key in other.ended()}

    def give(self, plan: TrialPlan, together: bool = False) -> TrialPlan:
        """Reuse a trial of an earlier sweep, if possible.

        The results are copied from the earlier sweep, and the returned plan has a tag that names the earlier sweep. The
        plan is returned unchanged if no other sweep has run the trial, if the trial failed in the other sweep, or if
        this sweep already contains the trial.

        Args:
            plan: The plan of the trial.
            together: Whether the scheduler compares whole arms. If so, the outcome of the trial depends on the other
                arms of this sweep, so the recorded rounds are copied without the outcome.
        """
        trial = self.sweep.trial(plan.key)
        if plan.key not in self._found or trial.planned:
            return plan
        origin, other = self._found[plan.key]
        other.remote.pull()
        try:
            outcome = other.read().outcome
        except UserError as error:
            warn(f"a trial of sweep {origin} is not reused but run again: {error}")
            return plan
        if outcome is None or outcome.outcome == "failed":
            return plan
        marked = plan.model_copy(update={"marks": {**plan.marks, TAKEN_FROM: origin}})
        # An outcome that depends on the other arms is decided anew in this sweep.
        trial.take(other, ends=() if together else ("finished", "diverged"))
        trial.plan(marked)
        return marked
