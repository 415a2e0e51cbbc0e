"""The made-up manifest and trials of a small sweep, which tests write to MLflow."""

import datetime
from pathlib import Path

from fedsweep.results import Outcome, SweepManifest, TrialPlan, TrialRecord
from fedsweep.results.history import RoundRecord

PLAN = TrialPlan(
    key="k1",
    number=0,
    arm={"lora.rank": 4, "optimizer.lr": 0.0123456},
    seed=2,
    config={
        "seed": 2,
        "lora": {"rank": 4, "alpha": None},
        "data": {"name": "digits", "domains": ["plain"]},
        "partition": {"name": "feature_skew"},
        "method": {"name": "fedra"},
    },
    digests={"data": "0123456789abcdef" * 4},
)
MANIFEST = SweepManifest(
    id="s1",
    name="tiny",
    experiment="fedra_digits",
    created=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).isoformat(),
    metric="accuracy/mean",
    mode="max",
    rounds=3,
    varied=("lora.rank",),
    seeds=(2,),
    scheduler="none",
    search="grid",
    domains=("plain",),
    digests={},
)


def trial(rounds: int, outcome: Outcome | None = None, plan: TrialPlan = PLAN) -> TrialRecord:
    history = [
        RoundRecord(i, {"accuracy/mean": i / 7, "bytes/up": 10.0, "bytes/down": 20.0}, 0.5) for i in range(rounds)
    ]
    return TrialRecord(plan, outcome, history)


def finished(rounds: int, plan: TrialPlan = PLAN) -> TrialRecord:
    """Return a finished trial with made-up metrics for all of its `rounds` rounds."""
    return trial(rounds + 1, Outcome(outcome="finished", round=rounds), plan)


def sweep_folder(folder: Path) -> Path:
    """Write placeholders for the files of a sweep to a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("search_space.yaml", "experiment.yaml", "sweep.json"):
        (folder / name).write_text("seed: 0\n")
    return folder
