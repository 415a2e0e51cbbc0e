"""Trials that another sweep has run already: the same configuration, code, data and processor."""

from fedsweep.results import Store, SweepManifest, SweepStore, TrialPlan, TrialStore
from fedsweep.results.provenance import TAKEN_FROM


class Reuse:
    """What other sweeps of a store can give to one of them. Failures are tried anew, running trials left alone."""

    def __init__(self, store: Store, sweep: SweepStore) -> None:
        mine = sweep.manifest()
        self.sweep = sweep
        self._found: dict[str, tuple[str, TrialStore]] = {}
        # Members of a population go on from each other at rounds that a trial with more of them is beyond.
        alone = mine.fresh or mine.scheduler == "pbt"
        for other in store.sweeps() if not alone else []:
            manifest = other.manifest()
            if manifest.id != mine.id and _computes_alike(mine, manifest):
                self._found |= {key: (manifest.id, other.trial(key)) for key in other.ended()}

    def give(self, plan: TrialPlan, judged: bool = False) -> TrialPlan:
        """The plan as it is to be put down: where another sweep has the trial, that is taken and the plan says so.

        How a trial ends that is `judged` with others is not taken.
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
        trial.take(other, ends=() if judged else ("finished", "diverged"))
        trial.plan(marked)
        return marked


def _computes_alike(one: SweepManifest, other: SweepManifest) -> bool:
    """Whether equal trials come to equal bits; a trial's key has its configuration, its data and fedsweep's code."""
    return one.processor == other.processor != "" and one.digests.get("packages") == other.digests.get("packages")
