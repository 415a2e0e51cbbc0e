"""The shares of a GPU that trials get, which are measured and grow if memory runs out. No Ray is started."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.common.errors import UserError
from fedsweep.common.process_usage import COUNT, SIZE, logical_gpus, resident_peak
from fedsweep.results import Attempt, SweepStore, TrialPlan
from fedsweep.sweep.cluster import cluster
from fedsweep.sweep.cluster.cluster import check_resources, concurrency, most_on_a_gpu
from fedsweep.sweep.cluster.gpus import LogicalMeter, count_gpus, ran_out
from fedsweep.sweep.cluster.packing import MARGIN, Packing, larger, needed, share, side_by_side
from fedsweep.sweep.space.settings import Resources

BYTES = st.integers(1, 10**12)
MOST = st.integers(1, 64)


@given(peak=BYTES, total=BYTES, most=MOST)
def test_the_trials_that_share_a_gpu_fit_and_one_more_would_not(peak: int, total: int, most: int) -> None:
    number = side_by_side(peak, total, most)
    assert 1 <= number <= most
    assert number == 1 or number * peak <= (1 - MARGIN) * total
    assert number == most or (number + 1) * peak > (1 - MARGIN) * total


@given(peak=BYTES, more=BYTES, total=BYTES, most=MOST)
def test_a_trial_that_needs_more_memory_gets_no_smaller_share(peak: int, more: int, total: int, most: int) -> None:
    small, large = (needed([Attempt(gpus=1, peak=one, total=total)], most) for one in (peak, peak + more))
    assert small is not None
    assert large is not None
    assert small <= large


@given(peak=BYTES, beside=BYTES, total=BYTES, most=MOST)
def test_memory_besides_the_tensors_counts_for_each_process(peak: int, beside: int, total: int, most: int) -> None:
    apart = Attempt(gpus=1, peak=peak, beside=beside, total=total)
    assert needed([apart], most) == needed([Attempt(gpus=1, peak=peak + beside, total=total)], most)


@given(number=st.integers(1, 10_000))
def test_the_shares_of_a_gpu_add_up_to_at_most_one(number: int) -> None:
    assert round(share(number) * 10_000) * number <= 10_000


@given(gpus=st.floats(0.0001, 1.0))
def test_doubling_ends_with_a_whole_gpu(gpus: float) -> None:
    tried = [gpus]
    while (after := larger(tried[-1])) is not None:
        tried.append(after)
        assert len(tried) < 20
    assert tried[-1] == 1.0
    assert all(one < other <= 2 * one for one, other in pairwise(tried))


@given(peak=BYTES, gpus=st.sampled_from([0.1, 0.25, 0.5, 1.0]), otherwise=st.sampled_from([None, 0.25]))
def test_a_trial_that_ran_out_of_memory_gets_more_at_every_call(
    peak: int, gpus: float, otherwise: float | None
) -> None:
    known = [Attempt(gpus=1, peak=peak, total=10**12), Attempt(gpus=gpus, out_of_memory=True)]
    first = needed(known, 16, otherwise)
    assert first is not None
    assert first >= min(2 * gpus, 1.0) or gpus == 1.0
    assert first == needed(known, 16, otherwise) == needed(known + known, 16, otherwise)


def plans(arms: int, seeds: int) -> list[TrialPlan]:
    return [
        TrialPlan(key=f"{arm}-{seed}", number=seed * arms + arm, arm={"lora.rank": arm}, seed=seed, config={})
        for seed in range(seeds)
        for arm in range(arms)
    ]


def report(round: int, peak: int = 0, kind: str | None = None) -> dict[str, Any]:
    told: dict[str, Any] = {"round": round, "seconds": 1.0, "memory/peak": peak, "memory/total": 1000}
    return told if kind is None else {**told, "kind": kind, "error": "a traceback"}


def test_each_arm_is_measured_by_one_round_of_one_trial_which_then_continues(tmp_path: Path) -> None:
    packing = Packing("auto", 4, SweepStore(tmp_path))
    first, second, other, _ = trials = plans(2, 2)
    wanted = [(plan, 9) for plan in trials]
    for plan in (first, second):
        offer = packing.choose(wanted)
        assert offer is not None
        assert (offer.plan, offer.until, offer.gpus) == (plan, 1, 1.0)
    assert packing.choose(wanted) is None  # no other trial may start before both measurements
    packing.ended(first, report(1, peak=400))
    assert packing.choose(wanted) is None
    packing.ended(second, report(1, peak=100))
    given = {}
    for plan in trials:
        offer = packing.choose([(plan, 9)])
        assert offer is not None
        given[plan.key] = (offer.until, offer.gpus)
    assert given == {"0-0": (9, 0.5), "0-1": (9, 0.5), "1-0": (9, 0.25), "1-1": (9, 0.25)}
    packing.ended(other, report(9, peak=400))


def test_measurements_of_a_worker_are_recorded_and_used(tmp_path: Path) -> None:
    sweep, (plan,) = SweepStore(tmp_path), plans(1, 1)
    packing = Packing("auto", 4, sweep)
    packing.choose([(plan, 9)])
    packing.ended(plan, report(1, peak=400) | {"memory/beside": 100})
    told = Attempt(gpus=1.0, round=1, peak=400, beside=100, total=1000, seconds=1.0)
    assert sweep.trial(plan.key).attempts().attempts == (told,)
    assert packing.fraction(plan) == 1.0  # two trials of 400 bytes would fit, two of 500 bytes do not


def test_after_a_failed_probe_the_next_trial_is_the_probe(tmp_path: Path) -> None:
    packing = Packing("auto", 4, SweepStore(tmp_path))
    first, second = plans(1, 2)
    for plan, result in ((first, report(0, kind="diverged") | {"memory/peak": None}), (second, None)):
        offer = packing.choose([(plan, 9)])
        assert offer is not None
        assert (offer.plan.key, offer.gpus) == (plan.key, 1.0)
        packing.ended(plan, result)
    assert not packing.probing


@pytest.mark.parametrize("asked", ["auto", 0.25])
def test_after_memory_runs_out_larger_shares_are_tried_up_to_a_whole_gpu(tmp_path: Path, asked: Any) -> None:
    sweep, (plan,) = SweepStore(tmp_path), plans(1, 1)
    packing = Packing(asked, 4, sweep)
    if asked == "auto":
        packing.choose([(plan, 9)])
        packing.ended(plan, report(1, peak=1))
    for gpus in (0.25, 0.5, 1.0):
        offer = packing.choose([(plan, 9)])
        assert offer is not None
        assert offer.gpus == gpus
        packing.ended(plan, report(1, kind="memory"))
    kept = sweep.trial(plan.key).attempts()
    assert [one.gpus for one in kept.attempts if one.out_of_memory] == [0.25, 0.5, 1.0]
    assert packing.marks(plan) == kept.marks() == {"gpus": "1", "out_of_memory": "3"}
    assert Packing(asked, 4, sweep, [plan]).fraction(plan) == packing.fraction(plan) == 1.0


def test_samples_are_measured_together(tmp_path: Path) -> None:
    packing = Packing("auto", 8, SweepStore(tmp_path), apart=False)
    first, second = plans(2, 1)
    packing.choose([(first, 3)])
    assert packing.probing
    packing.ended(first, report(1, peak=200))
    assert packing.fraction(second) == 0.25
    packing.choose([(second, 3)])
    packing.ended(second, report(3, peak=400))
    assert packing.fraction(first) == packing.fraction(second) == 0.5


def test_without_a_gpu_nothing_is_recorded(tmp_path: Path) -> None:
    packing, (plan,) = Packing(0, 1, SweepStore(tmp_path)), plans(1, 1)
    offer = packing.choose([(plan, 9)])
    assert offer is not None
    assert (offer.until, offer.gpus) == (9, 0.0)
    packing.ended(plan, report(9))
    assert packing.marks(plan) == {}
    assert not list(tmp_path.iterdir())


def test_measurements_are_printed_for_eight_arms_and_then_summarised(tmp_path: Path) -> None:
    told: list[str] = []
    packing = Packing("auto", 16, SweepStore(tmp_path), tell=told.append)
    for plan in plans(12, 1):
        packing.choose([(plan, 9)])
        packing.ended(plan, report(1) | {"memory/peak": 2 * 10**9 + plan.number * 10**8, "memory/total": 141 * 10**9})
    assert len(told) == 8
    assert told[1] == (
        "lora.rank=1: 2.1 GB of 141 GB of GPU memory per trial "
        "(16 trials per GPU; one round takes 1.0 s with the GPU to itself)."
    )
    assert packing.summary() == (
        "12 arms, from 2.0 GB of 141 GB of GPU memory per trial "
        "(16 trials per GPU; one round takes 1.0 s with the GPU to itself) to 3.1 GB of 141 GB of GPU memory per trial "
        "(16 trials per GPU; one round takes 1.0 s with the GPU to itself)."
    )


def test_logical_gpus_are_counted_like_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "available_cpus", lambda: 8)
    monkeypatch.setenv(COUNT, "3")
    monkeypatch.setenv(SIZE, "2.5")
    resources = Resources(gpus_per_trial="auto")
    check_resources(resources)
    assert (count_gpus(), resources.device, concurrency(resources), most_on_a_gpu(resources)) == (3, "cpu", 8, 3)
    assert concurrency(Resources(gpus_per_trial=0.5)) == 6
    with pytest.raises(UserError, match="available on this machine is 3"):
        check_resources(Resources(gpus_per_trial=4))


@pytest.mark.parametrize(("count", "size"), [("0", "1"), ("two", "1"), ("1", ""), ("1", "0"), ("1", "inf")])
def test_impossible_logical_gpus_are_rejected(monkeypatch: pytest.MonkeyPatch, count: str, size: str) -> None:
    monkeypatch.setenv(COUNT, count)
    monkeypatch.setenv(SIZE, size)
    with pytest.raises(UserError, match="FEDSWEEP_LOGICAL_GPU"):
        logical_gpus()


def test_auto_without_a_gpu_names_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COUNT, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UserError, match=f"`--gpus-per-trial 0` to run .* {COUNT}=1 and {SIZE} to simulate"):
        check_resources(Resources(gpus_per_trial="auto"))


def test_a_worker_that_exceeds_its_share_of_a_logical_gpu_runs_out_of_memory() -> None:
    taken = resident_peak()
    assert LogicalMeter(0.5, 4 * taken).read()["memory/total"] == 4 * taken
    with pytest.raises(RuntimeError, match=r"its share is .* 0.25 of a logical GPU of") as error:
        LogicalMeter(0.25, 2 * taken).read()
    assert ran_out(error.value)


def test_the_peak_is_reset_before_the_next_measurement() -> None:
    meter = LogicalMeter(1.0, 10**15)
    held = bytearray(b"x") * (200 * 2**20)
    before = meter.read()["memory/peak"]
    del held
    meter.start()
    assert meter.read()["memory/peak"] < before - 100 * 2**20


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (MemoryError(), False),
    ],
)
def test_errors_of_gpu_memory_are_recognised(error: Exception, memory: bool) -> None:
    assert ran_out(error) is memory
