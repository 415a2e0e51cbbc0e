"""The system metrics of a round, such as CPU and GPU usage, which are recorded apart from all other metrics."""

import json
from types import SimpleNamespace

import pytest
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor

from fedsweep.common import process_usage as system_metrics
from fedsweep.common.process_usage import SystemMeter
from fedsweep.federation.build_and_run import run_resumably
from fedsweep.federation.run_config import RunConfig
from fedsweep.results.history import RoundRecord, from_json, to_json


def test_machine_metrics_have_mlflows_names_and_process_metrics_their_own() -> None:
    theirs = CPUMonitor()
    theirs.collect_metrics()
    found = SystemMeter().read()
    assert {f"system/{name}" for name in theirs.aggregate_metrics()} <= set(found)
    assert {"system/process_cpu_utilization_percentage", "system/process_memory_usage_megabytes"} <= set(found)
    assert all(value >= 0 for value in found.values())
    assert found["system/system_memory_usage_percentage"] <= 100
    assert 0 < found["system/process_memory_usage_megabytes"] <= found["system/system_memory_usage_megabytes"] * 2


class NVMLError(Exception):
    """The error class of the GPU driver's library."""


def does_not_tell(handle: int) -> None:
    raise NVMLError("Not Supported")


SLICE = SimpleNamespace(
    NVMLError=NVMLError,
    nvmlInit=lambda: None,
    nvmlDeviceGetCount=lambda: 1,
    nvmlDeviceGetHandleByIndex=lambda number: number,
    nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=2_000_000, total=8_000_000),
    nvmlDeviceGetUtilizationRates=does_not_tell,
)
"""A GPU driver that reports the memory of a GPU but not its utilisation."""


def test_a_gpu_without_some_metrics_reports_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "pynvml", SLICE)
    found = {name: value for name, value in SystemMeter().read().items() if "gpu" in name}
    assert found == {"system/gpu_0_memory_usage_megabytes": 2.0, "system/gpu_0_memory_usage_percentage": 25.0}


def test_a_history_stores_system_metrics_without_changing_the_others() -> None:
    plain = [RoundRecord(0, {"accuracy/mean": 0.1}, 0.5)]
    measured = [RoundRecord(0, {"accuracy/mean": 0.1}, 0.5, system={"system/cpu_utilization_percentage": 7.0})]
    assert from_json(to_json(measured))[0].system == {"system/cpu_utilization_percentage": 7.0}
    assert measured == plain
    assert json.loads(to_json(plain)) == [{"round": 0, "metrics": {"accuracy/mean": 0.1}, "seconds": 0.5}]


def test_measuring_does_not_change_the_metrics(tiny: RunConfig, tmp_path) -> None:
    config = tiny.override({"federation.rounds": 1, "data.domains": ["plain"], "federation.depths": [3]}, "test")
    plain = list(run_resumably(config, tmp_path / "a" / "checkpoint"))
    measured = list(run_resumably(config, tmp_path / "b" / "checkpoint", measure=SystemMeter().read))
    assert [one.metrics for one in plain] == [one.metrics for one in measured]
    assert [set(one.system) for one in plain] == [set(), set()]
    assert all("system/process_memory_usage_megabytes" in one.system for one in measured)
    again = list(run_resumably(config, tmp_path / "b" / "checkpoint"))  # read from disk
    assert [one.system for one in again] == [one.system for one in measured]
