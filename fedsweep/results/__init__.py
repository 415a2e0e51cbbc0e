"""The results folder: plain files; each file of a trial is written atomically. MLflow only shows a copy of them.

<root>/sweeps/<search space>/<sweep id>/
    sweep.json                      SweepManifest
    experiment.yaml search_space.yaml
    decisions.jsonl                 the scheduler's decisions, if it makes any
    warm_start.json                 trials of earlier sweeps that the search starts from, if any
    trials/<key>/trial.json         TrialPlan
    trials/<key>/checkpoint.safetensors   state and history after the last whole round
    trials/<key>/tsne.csv tsne.png  features after the last round, if the experiment asks for them
    trials/<key>/outcome.json       Outcome; absent until the trial has ended
    trials/<key>/gpus.json          Attempts

If the store is a URI, these are remote objects, and the root is a local mirror of those that are needed here.
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
