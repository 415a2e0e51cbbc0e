"""Sweeps whose trials share a GPU: trials per hour, memory and results with several shares of the GPU."""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from fedsweep.federation.build_and_run import Device
from fedsweep.results import Store, TrialRecord

SHARES = ("1", "auto", "0.25", "0.125")
QUERY = ["nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits", "-lms", "500"]


@contextmanager
def watched(device: Device) -> Iterator[list[tuple[float, float]]]:
    """Collect the GPU's used memory (MiB) and utilization (%) twice a second until the `with` statement ends."""
    samples: list[tuple[float, float]] = []
    if device == "cpu":
        yield samples
        return
    watch = subprocess.Popen(QUERY, stdout=subprocess.PIPE, text=True)

    def read() -> None:
        for line in watch.stdout or ():
            memory, busy = map(float, line.split(",")[:2])
            samples.append((memory, busy))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield samples
    finally:
        watch.terminate()
        watch.wait()
        thread.join()


def sweep(share: str, store: Path, device: Device, quick: bool) -> dict[str, Any]:
    """Run `ablations/lora_rank` with this share of the GPU for each trial, and return what was measured."""
    rounds, seeds = (1, "0") if quick else (3, "0,1")
    command = [sys.executable, "-m", "fedsweep", "tune", "ablations/lora_rank", f"federation.rounds={rounds}"]
    command += ["--seeds", seeds, "--gpus-per-trial", share, "--store", str(store)]
    logical = {} if device == "cuda" else {"FEDSWEEP_LOGICAL_GPUS": "1", "FEDSWEEP_LOGICAL_GPU_GB": "16"}
    begun = time.perf_counter()
    with watched(device) as samples:
        done = subprocess.run(command, env={**os.environ, **logical}, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begun
    trials = Store.at(store).sweeps()[0].trials() if done.returncode == 0 else []
    if not trials:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
        return {"share": share, "exit_code": done.returncode}
    return {
        "share": share,
        "exit_code": done.returncode,
        "seconds": round(seconds, 1),
        **measured(trials, seconds),
        "gpu_memory_mib": max((memory for memory, _ in samples), default=None),
        "gpu_busy": round(statistics.fmean(busy for _, busy in samples) / 100, 3) if samples else None,
        "said": [line for line in (done.stdout + done.stderr).splitlines() if "GPU" in line][:8],
    }


def measured(trials: Sequence[TrialRecord], seconds: float) -> dict[str, Any]:
    """Return numbers of trials and their speed and memory, given the sweep's trials and its duration in seconds.

    `trials_per_hour` counts the whole command, with the start of Ray and of the workers.
    """
    round_seconds = statistics.median(record.seconds for trial in trials for record in trial.history[1:])
    trial_seconds = statistics.median(sum(record.seconds for record in trial.history) for trial in trials)
    return {
        "trials": len(trials),
        "finished": sum(trial.outcome is not None and trial.outcome.outcome == "finished" for trial in trials),
        "shares": sorted({one.gpus for trial in trials for one in trial.attempts}),
        "out_of_memory": sum(one.out_of_memory for trial in trials for one in trial.attempts),
        "peak_mb": round(max((one.peak or 0) for trial in trials for one in trial.attempts) / 1e6, 1),
        "beside_mb": round(max(one.beside for trial in trials for one in trial.attempts) / 1e6, 1),
        "seconds_per_round": round(round_seconds, 3),
        "seconds_per_trial": round(trial_seconds, 2),
        "trials_per_hour": round(3600 * len(trials) / seconds),
        "histories": {trial.plan.key: [dict(record.metrics) for record in trial.history] for trial in trials},
    }


def measure(device: Device, quick: bool) -> Iterator[dict[str, Any]]:
    """Run a sweep with each share of the GPU, and yield what was measured."""
    first: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for share in SHARES[:2] if quick else SHARES:
            row = sweep(share, Path(folder) / share, device, quick)
            histories = row.pop("histories", {})
            first = first or histories
            yield {**row, "equal_bits": bool(histories) and histories == first}


def accepted(row: dict[str, Any]) -> bool:
    """Return whether all trials finished, with the metrics that they have in the first sweep."""
    return bool(row["equal_bits"] and row["finished"] == row["trials"])


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of all sweeps."""
    found = Table("share", "s", "finished", "trials/h", "s per round", "MB", "GPU MiB", "busy", "same")
    names = ("share", "seconds", "finished", "trials_per_hour", "seconds_per_round")
    for row in rows:
        values = [row.get(name) for name in (*names, "peak_mb", "gpu_memory_mib", "gpu_busy", "equal_bits")]
        found.add_row(*map(str, values))
    return found
