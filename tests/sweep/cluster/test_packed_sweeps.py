"""Sweeps whose trials share logical GPUs, through the command line, Ray and MLflow."""

from pathlib import Path

import pytest

from fedsweep.common.process_usage import COUNT, SIZE
from fedsweep.results import Attempt
from fedsweep.sweep.cluster.packing import needed
from tests.sweep.helpers import (
    GRID,
    assert_mlflow_equals_store,
    fedsweep,
    histories,
    newest,
    play_alone,
    runs,
    table,
    write_space,
)

pytestmark = pytest.mark.slow

CPUS = 0.5
SIZE_OF_ALL = 100.0
TWO = ("--at-once", "2")


def attempts(folder: Path) -> dict[tuple[int, int], list[Attempt]]:
    """Return the attempts to run each trial, keyed by (rank, seed)."""
    sweep = newest(folder, "tiny")
    return {
        (trial.plan.arm["lora.rank"], trial.plan.seed): [*sweep.trial(trial.plan.key).attempts().attempts]  # type: ignore[misc]
        for trial in sweep.trials()
    }


def tags(folder: Path) -> dict[str, tuple[str | None, str | None]]:
    _, children, _ = runs(folder, "tiny")
    found = {run.info.run_name: run.data.tags for run in children}
    return {name: (of.get("fedsweep.gpus"), of.get("fedsweep.out_of_memory")) for name, of in found.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_space(folder, "tiny", GRID)
    play_alone(folder, "tiny")
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a sweep in which as many trials as the cores allow share one large logical GPU; return its folder.

    The search space does not request the GPU, which the sweep uses because the machine has one.
    """
    folder = tmp_path_factory.mktemp("packed")
    write_space(folder, "tiny", {**GRID, "resources": {"cpus_per_trial": CPUS}})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(COUNT, "1")
        monkeypatch.setenv(SIZE, str(SIZE_OF_ALL))
        done = fedsweep(folder, "tune", "tiny", *TWO)
    assert "lora.rank=4: " in done.stderr
    assert "trials per GPU" in done.stderr
    return folder


def test_auto_gives_the_same_table_and_records_every_share(plain: Path, packed: Path) -> None:
    assert table(packed, "tiny") == table(plain, "tiny")
    assert histories(newest(packed, "tiny")) == histories(newest(plain, "tiny"))
    assert_mlflow_equals_store(packed, "tiny")
    fractions = {}
    for (rank, seed), tried in attempts(packed).items():
        probe = [(1.0, 1)] if seed == 0 else []
        assert [(one.gpus, one.round) for one in tried[:-1]] == probe
        assert all(one.total == SIZE_OF_ALL * 1e9 and one.peak and not one.out_of_memory for one in tried)
        fractions[rank, seed] = tried[-1].gpus
    most = round(1 / min(fractions.values()))
    assert most > 1  # several trials ran in parallel
    for rank in (1, 4):
        probe = attempts(packed)[rank, 0][:1]
        assert fractions[rank, 0] == needed(probe, most)
    assert tags(packed) == {f"rank {rank} · seed {seed}": (f"{one:g}", None) for (rank, seed), one in fractions.items()}


def test_a_share_that_is_too_small_is_doubled_and_the_table_is_the_same(
    plain: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = max(one.peak or 0 for tried in attempts(packed).values() for one in tried)
    monkeypatch.setenv(COUNT, "1")
    monkeypatch.setenv(SIZE, str(3 * taken / 1e9))
    write_space(tmp_path, "tiny", {**GRID, "resources": {"cpus_per_trial": CPUS, "gpus_per_trial": 0.25}})
    fedsweep(tmp_path, "tune", "tiny", *TWO)
    assert table(tmp_path, "tiny") == table(plain, "tiny")
    assert histories(newest(tmp_path, "tiny")) == histories(newest(plain, "tiny"))
    tried = attempts(tmp_path)
    assert any(one.out_of_memory for of in tried.values() for one in of)
    assert {of[-1].gpus for of in tried.values()} == {0.5}
    expected = {}
    for (rank, seed), of in tried.items():
        ran_out = [one.gpus for one in of if one.out_of_memory]
        assert set(ran_out) <= {0.25}
        expected[f"rank {rank} · seed {seed}"] = ("0.5", str(len(ran_out)) if ran_out else None)
    assert tags(tmp_path) == expected


def test_trials_on_a_gpu_that_is_too_small_fail_with_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COUNT, "1")
    monkeypatch.setenv(SIZE, "0.1")
    alone = {"space": {"lora.rank": {"grid": [4]}}, "seeds": [0]}
    write_space(tmp_path, "tiny", {**GRID, **alone, "resources": {"cpus_per_trial": CPUS, "gpus_per_trial": 0.5}})
    fedsweep(tmp_path, "tune", "tiny", code=1)
    for trial in newest(tmp_path, "tiny").trials():
        assert trial.outcome is not None
        assert trial.outcome.outcome == "failed"
        assert trial.outcome.error is not None
        assert "OutOfMemoryError: the worker used" in trial.outcome.error
        assert trial.outcome.error.strip().endswith("1 of a logical GPU of 0.10 GB")
    assert [one.gpus for of in attempts(tmp_path).values() for one in of][-1] == 1.0
    assert all(of[-1].out_of_memory for of in attempts(tmp_path).values())
