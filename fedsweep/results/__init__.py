"""The durable truth of a sweep: plain files, those of a trial each written atomically. MLflow is a view of this.

<root>/sweeps/<search space>/<sweep id>/
    sweep.json                      SweepManifest
    experiment.yaml search_space.yaml
    decisions.jsonl                 the scheduler's memory, where it has one
    warm_start.json                 what the search knew from the start, if anything
    trials/<key>/trial.json         what is to be run
    trials/<key>/checkpoint.safetensors   state and history after the last whole round
    trials/<key>/tsne.csv tsne.png  features after the last round, where the experiment asks for them
    trials/<key>/outcome.json       how it ended; absent while it has not
    trials/<key>/gpus.json          what it was given of a GPU, and took, each time that it was handed out

Where the store is a URI, these are objects, and the root is a folder of this machine with what it needs of them.
"""

from fedsweep.results.folders import Store, SweepStore, TrialStore
from fedsweep.results.records import (
    Attempt,
    Attempts,
    Outcome,
    OutcomeName,
    Start,
    SweepManifest,
    TrialPlan,
    TrialRecord,
    count_outcomes,
)

__all__ = [
    "Attempt",
    "Attempts",
    "Outcome",
    "OutcomeName",
    "Start",
    "Store",
    "SweepManifest",
    "SweepStore",
    "TrialPlan",
    "TrialRecord",
    "TrialStore",
    "count_outcomes",
]
