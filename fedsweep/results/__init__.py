"""The results folder, which contains the records of all sweeps and runs as plain files. MLflow shows a copy of them.

The files of a trial are written atomically. The key of a trial is a digest of the trial's configuration, code and data.

<root>/sweeps/<search space>/<sweep id>/
    sweep.json                      description of the sweep (SweepManifest)
    experiment.yaml search_space.yaml   copies of the YAML files
    decisions.jsonl                 decisions of the scheduler asha_async or median
    warm_start.json                 trials of an earlier sweep, if the search learns from them
    trials/<key>/trial.json         configuration of the trial (TrialPlan)
    trials/<key>/checkpoint.safetensors   state and history after the last complete round
    trials/<key>/right.json         test images that are predicted correctly after the last round (RightImages)
    trials/<key>/tsne.csv tsne.png  t-SNE of the features after the last round, if the experiment requests it
    trials/<key>/outcome.json       outcome of the trial (Outcome); absent until the trial has ended
    trials/<key>/error.json         error of the trial (Outcome), even if its outcome is not decided yet
    trials/<key>/gpus.json          attempts to run the trial on a GPU (Attempts)
    trials/<key>/.taken             lock file of the worker that runs the trial
    .lock .driver.json .joined/     lock of the process that runs the sweep, and the processes of the sweep
    .requests/                      requests to change the sweep, and the answers
<root>/runs/<experiment>/<time>/    a run outside of a sweep, with the same files as a trial

If `--store` is a URI, these files are objects in a remote store. <root> is then a local folder with copies of the files
that this machine needs.
"""

from fedsweep.results.folders import SweepStore, TrialStore
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
from fedsweep.results.store import Store

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
