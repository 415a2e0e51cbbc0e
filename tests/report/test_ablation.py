"""Reports of component ablations, which name arms by missing components and compare them with the full method."""

import csv
import io

import pytest

from fedsweep.report.figures import curves
from fedsweep.report.formats import data_frame
from fedsweep.report.table import AblationTable
from tests.report.helpers import printed, tabulate

FULL, CROSS, BOTH = [], ["method.cross"], ["method.cross", "lora.dropout"]
WORDS = {"full": FULL, "without cross": CROSS, "without cross, lora.dropout": BOTH}


def row(table: AblationTable, **cells: str) -> dict[str, str]:
    (found,) = (one for one in table.cells() if cells.items() <= one.items())
    return found


@pytest.fixture
def alone(manifest, trials) -> AblationTable:
    """Return the table of an ablation with three arms and three seeds."""
    for seed in range(3):
        for place, left_out in enumerate(WORDS.values()):
            trials.add({"without": left_out}, seed, [0.2, 0.6 + 0.01 * seed - 0.1 * place + 0.001 * seed * place])
    return tabulate(manifest(varied=("method.cross", "lora.dropout"), baseline={"without": FULL}), trials)


@pytest.fixture
def crossed(manifest, trials) -> AblationTable:
    """Return the table of an ablation at two ranks; the component adds 10 points at rank 4 and 1 point at rank 8."""
    for seed, noise in enumerate((0.001, 0.0, 0.002)):
        for rank, left_out, end in ((4, FULL, 0.5), (4, CROSS, 0.4), (8, FULL, 0.8), (8, CROSS, 0.79)):
            trials.add({"lora.rank": rank, "without": left_out}, seed, [0.2, end + noise * (1 + len(left_out))])
    return tabulate(manifest(varied=("lora.rank", "method.cross"), baseline={"without": FULL}), trials)


def test_arms_are_named_by_their_missing_components(alone):
    assert [one["arm"] for one in alone.cells()] == list(WORDS)
    assert "without" not in alone.cells()[0]
    assert [one["arm"] for one in csv.DictReader(io.StringIO(data_frame.csv(alone)))] == list(WORDS)
    assert "| arm | n | mean |" in alone.markdown()
    assert "## By domain\n\n| arm | n | photo |" in alone.markdown()


def test_findings_and_caption_name_the_full_method(alone):
    first, second = alone.findings()
    assert first.startswith("without cross against full: -9.90 points (95% interval")
    assert second.startswith("without cross, lora.dropout against full: -19.80 points")
    assert "Baseline: full. Difference: arm minus baseline" in " ".join(alone.caption())


def test_without_a_baseline_the_best_arm_is_named(manifest, trials, alone):
    table = tabulate(manifest(varied=("method.cross", "lora.dropout"), baseline=None), trials)
    assert table.findings()[0].startswith("Best: full with accuracy/mean 61.00%")


@pytest.mark.parametrize("width", [60, 80, 140])
def test_long_arm_names_are_folded_and_numbers_are_not_cut(alone, width):
    said = printed(alone, width)
    assert max(map(len, said.splitlines())) <= width
    assert "…" not in said
    for one in alone.cells():
        assert one["mean"] in said
        assert all(word in said for word in one["arm"].split())


def test_an_arm_is_compared_with_the_full_method_at_its_own_settings(crossed):
    assert [(one["lora.rank"], one["arm"]) for one in crossed.cells()] == [
        *(("4", "full"), ("4", "without cross"), ("8", "full"), ("8", "without cross")),
    ]
    assert [one["difference"] for one in crossed.cells()] == ["baseline", "-9.90", "baseline", "-0.90"]
    assert [one.comparison and one.comparison.p_holm > one.comparison.p for one in crossed.arms] == [
        *(None, True, None, False),
    ]
    at_4, at_8, effects = crossed.findings()
    assert at_4.startswith("rank 4, without cross against full: -9.90 points")
    sentence = "Shares of the variation between trials, with p-values after Holm's correction: 96% for rank ("
    assert effects.startswith(sentence)
    assert at_8.startswith("rank 8, without cross against full: -0.90 points")
    assert " ".join(crossed.caption()).count("Baseline: full with the same lora.rank as the arm.") == 1


def test_a_baseline_may_leave_an_axis_open_without_an_ablation(manifest, trials):
    for seed in range(2):
        for rank in (4, 8):
            for lr in (0.1, 0.3):
                trials.add({"lora.rank": rank, "optimizer.lr": lr}, seed, [0.02, 0.1 * lr + rank / 100 + seed / 100])
    table = tabulate(manifest(varied=("lora.rank", "optimizer.lr"), baseline={"lora.rank": 8}), trials)
    assert row(table, **{"lora.rank": "4", "optimizer.lr": "0.3"})["difference"] == "-4.00"
    assert [one.is_baseline for one in table.arms] == [False, False, True, True]
    assert [one.partition(":")[0] for one in table.findings()] == [
        "lr 0.1, rank 4 against 8",
        "lr 0.3, rank 4 against 8",
        "Shares of the variation between trials, with p-values after Holm's correction",
    ]


def test_an_arm_whose_full_method_has_no_trial_is_not_compared(manifest, trials):
    trials.add({"lora.rank": 4, "without": FULL}, 0, [0.2, 0.5])
    trials.add({"lora.rank": 4, "without": CROSS}, 0, [0.2, 0.4])
    trials.add({"lora.rank": 8, "without": CROSS}, 0, [0.2, 0.6])
    table = tabulate(manifest(varied=("lora.rank", "method.cross"), baseline={"without": FULL}), trials)
    assert row(table, **{"lora.rank": "8"})["difference"] == "-"
    assert [one.is_baseline for one in table.arms] == [True, False, False]
    assert len(table.findings()) == 1


def test_figures_use_the_same_arm_names(crossed, monkeypatch):
    labels = []
    monkeypatch.setattr(curves, "_label_ends", lambda axes, ends: labels.extend(end[2] for end in ends))
    curves.draw(crossed.manifest, crossed.arms)
    assert sorted(labels) == [
        "rank 4, full (baseline)", "rank 4, without cross", "rank 8, full (baseline)", "rank 8, without cross",
    ]  # fmt: skip
