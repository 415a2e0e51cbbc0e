"""Reports of sweeps in which some hyperparameters exist only in some arms."""

from typing import Any

import pytest

from fedsweep.report import write_report
from fedsweep.report.arm_statistics import summarise
from fedsweep.report.sentences import caption, findings
from tests.report.conftest import Trials, make_manifest

VARIED = ("method", "method.beta", "lora.rank")
ARMS: list[dict[str, Any]] = [
    {"method": "fedra", "lora.rank": 4},
    {"method": "fedra", "lora.rank": 8},
    {"method": "inclusivefl", "method.beta": 0.2, "lora.rank": 4},
    {"method": "inclusivefl", "method.beta": 0.2, "lora.rank": 8},
    {"method": "inclusivefl", "method.beta": 0.4, "lora.rank": 8},
]


def sweep(baseline: dict[str, Any], arms: list[dict[str, Any]]) -> tuple[Any, list[Any]]:
    trials = Trials()
    for seed in (0, 1, 2):
        for place, arm in enumerate(arms):
            value = 0.4 + 0.05 * place + 0.01 * seed * (place + 1)
            trials.add(arm, seed, [0.1, 0.2, 0.3, 0.4, value])
    return make_manifest(varied=VARIED, baseline=baseline), trials.records


def said(baseline: dict[str, Any], arms: list[dict[str, Any]]) -> list[str]:
    manifest, trials = sweep(baseline, arms)
    return [sentence.split(":")[0] for sentence in findings(manifest, summarise(manifest, trials))]


def test_a_partial_baseline_is_completed_with_the_values_of_each_arm():
    assert said({"method": "fedra"}, ARMS) == [
        "rank 4, method inclusivefl, beta 0.2 against method fedra",
        "rank 8, method inclusivefl, beta 0.2 against method fedra",
        "rank 8, method inclusivefl, beta 0.4 against method fedra",
    ]
    manifest, trials = sweep({"method": "fedra"}, ARMS)
    lines = caption(manifest, summarise(manifest, trials), ())
    assert any(line.startswith("Baseline: method fedra with the same lora.rank as the arm. ") for line in lines)


def test_a_complete_baseline_is_the_same_for_all_arms():
    assert sorted(said(ARMS[3], [ARMS[1], ARMS[2], ARMS[3], ARMS[4]])) == [
        "beta 0.4 against 0.2",
        "method fedra against method inclusivefl, beta 0.2",
        "rank 4 against 8",
    ]


@pytest.mark.parametrize("baseline", [{"method": "fedra"}, None])
def test_the_whole_report_is_written(tmp_path, baseline):
    manifest, trials = sweep(baseline, ARMS)
    write_report(manifest, trials, tmp_path / "report")
    lines = (tmp_path / "report" / "table.csv").read_text().splitlines()
    assert len(lines) == 1 + len(ARMS)
