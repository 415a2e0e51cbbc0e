"""Functions that record runs and trials, and that load exports with the code of their README."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsweep.export.which_trial import Named, find_trial
from fedsweep.federation.build_and_run import content_digests, run_resumably
from fedsweep.federation.run_config import RunConfig
from fedsweep.results import Outcome, Store, SweepStore, TrialPlan
from fedsweep.results.history import RoundRecord

WITHOUT_FEDSWEEP = """
import sys
import numpy as np

found = logits(torch.from_numpy(np.load("images.npy")))
np.save("logits.npy", found.numpy())
assert not [name for name in sys.modules if name.split(".")[0] == "fedsweep"]
"""


def play(store: Store, name: str, config: RunConfig) -> Named:
    """Run and record an experiment like `fedsweep run`, but without MLflow."""
    trial = store.run(name, "20260101-000000-abcd")
    resolved = config.model_dump(mode="json")
    digests = content_digests(config)
    trial.plan(TrialPlan(key=trial.folder.name, number=0, arm={}, seed=config.seed, config=resolved, digests=digests))
    *_, last = run_resumably(config, trial.checkpoint)
    trial.end(Outcome(outcome="finished", round=last.round))
    return find_trial(store, name)


def block(page: Path) -> str:
    """Return the only Python code block of a page."""
    found = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == 1
    return str(found[0])


def logits_without_fedsweep(folder: Path, images: Tensor) -> Tensor:
    """Return the logits of uint8 images, computed by the export's README code in a process without fedsweep."""
    np.save(folder / "images.npy", images.numpy())
    script = block(folder / "README.md") + WITHOUT_FEDSWEEP
    command = [sys.executable, "-I", "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.from_numpy(np.load(folder / "logits.npy"))


def planned(
    sweep: SweepStore, number: int, arm: dict[str, Any], seed: int, score: float | None, end: str | None
) -> str:
    """Record a trial whose accuracy grows by `score` per round and whose outcome is `end`, and return its key."""
    from fedsweep.results.checkpoint import Checkpoint, save
    from fedsweep.types import ServerState

    key = f"{'ab' if number < 2 else 'c'}{number:014d}"
    trial = sweep.trial(key)
    trial.plan(TrialPlan(key=key, number=number, arm=arm, seed=seed, config={}))
    if score is not None:
        history = tuple(RoundRecord(one, {"accuracy/mean": score * one}, 1.0) for one in range(3))
        save(trial.checkpoint, Checkpoint(2, ServerState({}, (0,)), history))
    if end is not None:
        outcome: Any = end
        trial.end(Outcome(outcome=outcome, round=2 if score is not None else 0))
    return key


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded
