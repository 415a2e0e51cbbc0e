"""Declared comparisons in the table, the findings, the files and the page of a report, and in `fedsweep compare`."""

import io
import re

import numpy as np
import pandas as pd
import pytest

from fedsweep.report import write_report
from fedsweep.report.arm_statistics import summarise
from fedsweep.report.compare_sweeps import Pairing, Side
from fedsweep.report.declared_comparisons import SENTENCES, TITLE
from fedsweep.report.formats import data_frame, page
from fedsweep.report.formats.latex import latex
from fedsweep.report.formats.terminal import MOST_DECLARED
from fedsweep.results.arms import arm_argument
from fedsweep.results.declared_comparisons import DeclaredComparison
from tests.report.conftest import Trials, make_manifest
from tests.report.helpers import accepts_columns, printed, tabulate

ON, OFF = {"brick": True}, {"brick": False}
WITH_AND_WITHOUT = (
    DeclaredComparison(arm=ON, against=OFF),
    DeclaredComparison(arm=ON, against=OFF, metric="accuracy/worst_domain"),
)
NOISE = ([0.000, 0.011, -0.004, 0.006], [0.003, 0.009, -0.006, 0.004])


@pytest.fixture
def bricks(trials) -> Trials:
    """Add three methods with and without BRICKs: the gains are about 2, 5 and 0.1 points."""
    for method, gain in (("fedra", 0.02), ("inclusivefl", 0.05), ("depthfl", 0.001)):
        for brick in (False, True):
            for seed, noise in enumerate(NOISE[brick]):
                trials.add({"over": method, "brick": brick}, seed, [0.3, 0.5, 0.6 + gain * brick + noise])
    return trials


def table_of(bricks, comparisons=WITH_AND_WITHOUT, **changes):
    own = {"varied": ("over", "brick"), "baseline": {"over": "fedra", "brick": False}, "seeds": (0, 1, 2, 3)}
    return tabulate(make_manifest(comparisons=comparisons, **{**own, **changes}), bricks)


def section(table):
    (found,) = (one for one in table.sections if one.title == TITLE)
    return found


def test_the_section_has_one_row_per_declared_pair_and_metric(bricks):
    table = table_of(bricks)
    found = section(table)
    assert found.head == [
        "arm", "against", "metric", "n", "difference", "95% interval", "95% simultaneous", "Holm p",
    ]  # fmt: skip
    assert [row[:3] for row in found.rows] == [
        [f"over {method}, brick true", f"over {method}, brick false", metric]
        for metric in ("accuracy/mean", "accuracy/worst_domain")
        for method in ("fedra", "inclusivefl", "depthfl")
    ]
    assert [row[3:5] for row in found.rows[:3]] == [["4", "+1.93"], ["4", "+4.93"], ["4", "+0.03"]]
    assert "family of 10 tests: 5 with the baseline and 6 declared (1 in both groups)." in found.explained
    assert "in at least 95% of sweeps, all 10 intervals contain their true differences (Bonferroni)" in found.explained
    assert found.markdown() in table.markdown()


def test_the_metric_has_no_column_if_it_is_the_objective(bricks):
    assert "metric" not in section(table_of(bricks, WITH_AND_WITHOUT[:1])).head


def test_the_legend_and_the_table_have_the_correction_of_the_family(bricks):
    table = table_of(bricks)
    legend = "Holm-corrected for the family of 10 tests, which contains the declared comparisons."
    assert legend in " ".join(table.caption())
    (planned,) = (one for one in table.sections if one.title == "Comparisons with the baseline")
    assert "95% simultaneous" in planned.head
    assert "p after Holm's correction for the family of 10 tests, which contains the declared" in planned.explained
    alone = table_of(bricks, ())
    for one, other in zip(table.arms, alone.arms, strict=True):
        if one.comparison is not None:
            assert one.comparison.tests == 10 == 2 * other.comparison.tests
            assert one.comparison.p_holm >= other.comparison.p_holm
            assert one.comparison.interval == other.comparison.interval


def test_without_declared_comparisons_only_the_section_has_simultaneous_intervals(bricks):
    table = table_of(bricks, ())
    (planned, *_) = table.sections
    assert planned.head[planned.head.index("95% t") + 1] == "95% simultaneous"
    text = " ".join([*table.findings(), *table.caption(), printed(table), data_frame.csv(table), latex(table)])
    assert "simultaneous" not in text
    assert "declared" not in text.lower()
    assert "Holm-corrected for 5 arms" in text
    assert data_frame.declared_csv(table) is None
    assert TITLE not in table.markdown() + page.html(table, (), bricks.records)


def test_a_single_test_has_no_simultaneous_interval(trials):
    trials.arms({4: [0.50, 0.52, 0.49], 8: [0.60, 0.62, 0.58]})
    (planned, *_) = tabulate(make_manifest(), trials).sections
    assert "95% simultaneous" not in planned.head


def test_each_declared_comparison_has_one_finding(bricks):
    table = table_of(bricks)
    found = table.findings()
    for method in ("fedra", "inclusivefl", "depthfl"):
        starts = [f"over {method}, brick true against false: ", f"over {method}, brick true against false, accuracy/wo"]
        if method == "fedra":  # the only pair that is also compared as an arm with its baseline
            starts[0] = "brick true against false: "
        assert [sum(one.startswith(start) for one in found) for start in starts] == [1, 1]
    assert "no detectable difference" in next(one for one in found if one.startswith("over depthfl, brick true ag"))


def test_many_declared_comparisons_are_counted(trials):
    noise = np.random.default_rng(0).normal(0, 0.003, (8, 5))
    trials.arms({rank: list(0.5 + 0.03 * (rank > 4) + noise[rank]) for rank in range(8)})
    table = tabulate(make_manifest(comparisons="all", baseline={"lora.rank": 0}, seeds=(0, 1, 2, 3, 4)), trials)
    assert len(table.declared) == 28
    (found,) = (one for one in table.findings() if one.startswith("Declared comparisons: "))
    others = [row for row in table.declared if not row.test.with_baseline]
    decided = [row for row in others if row.found.verdict in ("higher", "lower")]
    assert len(others) == 21
    assert SENTENCES < len(decided) < 21
    assert f"{len(decided)} of 21 show a significant difference: rank " in found
    assert f"; and {len(decided) - SENTENCES} more. {21 - len(decided)} show no detectable difference." in found
    assert found.count(" against ") == SENTENCES
    assert not any(one.startswith("rank 6 against 5:") for one in table.findings())
    assert len(table.declared) > MOST_DECLARED
    assert "Declared comparisons: 28 (see declared.csv and table.md)." in printed(table)


def test_a_difference_that_only_holms_method_detects_is_marked(trials):
    trials.arms({8: [0.5] * 4, 4: [0.61, 0.62, 0.60, 0.615], 16: [0.51, 0.54, 0.525, 0.555]})
    table = tabulate(make_manifest(comparisons=(rank(16, 8),), seeds=(0, 1, 2, 3)), trials)
    (row,) = section(table).rows
    assert row[-2].endswith(" (direction only)")
    assert row[-2] in table.markdown().partition("## Comparisons with the baseline")[2].partition("##")[0]
    assert "Direction only: the Holm p shows the sign of the difference" in section(table).explained
    (said,) = (one for one in table.findings() if one.startswith("rank 16"))
    assert "significantly higher." in said
    assert re.search(r"Only the direction is significant: its simultaneous 95% interval \S+ to \S+ contains", said)
    assert "(direction only)" in latex(table)
    assert pd.read_csv(io.StringIO(data_frame.declared_csv(table)))["direction_only"].tolist() == [True]


def rank(arm: int, against: int, metric: str | None = None) -> DeclaredComparison:
    return DeclaredComparison(arm={"lora.rank": arm}, against={"lora.rank": against}, metric=metric)


def test_all_formats_show_the_same_comparisons(bricks, tmp_path, monkeypatch):
    monkeypatch.setattr("fedsweep.report.write_figures", lambda *_: ())
    table = table_of(bricks)
    made = write_report(table.manifest, bricks.records, tmp_path)
    assert tmp_path / "declared.csv" in made.paths
    found = pd.read_csv(tmp_path / "declared.csv")
    rows = section(table).rows
    assert found["arm"].tolist()[:2] == ["over=fedra, brick=true", "over=inclusivefl, brick=true"]
    assert found["metric"].tolist() == [row[2] for row in rows]
    for record, row in zip(found.to_dict("records"), rows, strict=True):
        assert f"{100 * record['difference']:+.2f}" == row[4]
        ends = f"{100 * record['simultaneous_low']:.2f} to {100 * record['simultaneous_high']:.2f}"
        assert row[6].removesuffix(" (direction only)") == ends
        assert row[7] == ("<0.001" if record["p_holm"] < 0.001 else f"{record['p_holm']:.3f}")
    wide, html = re.sub(r"\s+", " ", printed(table, 250)), (tmp_path / "report.html").read_text()
    second = (tmp_path / "table.tex").read_text().partition("\\end{table}")[2]
    for row in rows:
        assert " ".join(row) in wide
        assert all(f">{cell}</td>" in html for cell in row[2:] if cell != "<0.001")
        assert f"{row[0]} & {row[1]} & {row[2].replace('_', chr(92) + '_')} & 4 & ${row[4]}$" in second
    assert "\\label{tab:ablations:lora-rank:declared}" in second
    assert {"simultaneous_low", "simultaneous_high", "direction_only"} < {*pd.read_csv(tmp_path / "table.csv")}
    accepts_columns(table.manifest, bricks.records, [*found, *section(table).head, *data_frame.data_frame(table)])


def test_a_pair_that_is_not_finished_is_shown_without_a_test(bricks):
    bricks.records = [one for one in bricks.records if one.plan.arm["over"] != "depthfl" or not one.plan.seed]
    found = section(table_of(bricks, WITH_AND_WITHOUT[:1]))
    assert found.rows[2][2:] == ["1", "+0.40", "-", "-", "-"]
    assert "family of 4 tests: 3 with the baseline and 2 declared (1 in both groups)" in found.explained


def test_arms_on_different_images_are_marked(trials):
    for domain in ("photo", "sketch"):
        for seed in range(3):
            trials.add({"out": domain}, seed, [0.3, 0.5 + seed / 100 + 0.1 * (domain == "photo")], held_out=[domain])
    declared = DeclaredComparison(arm={"out": "photo"}, against={"out": "sketch"})
    table = tabulate(make_manifest(varied=("out",), baseline=None, comparisons=(declared,)), trials)
    assert section(table).rows[0][1] == "out sketch (different images)"
    assert any(one.startswith("out photo against sketch, on different images: ") for one in table.findings())


def pairing(bricks, first, second, comparisons=WITH_AND_WITHOUT, other_id=None):
    manifest = table_of(bricks, comparisons).manifest
    sides = [
        Side.of(f"mine:{number}", manifest.model_copy(update={"id": one}), bricks.records, arm_argument(arm))
        for number, (arm, one) in enumerate([(first, manifest.id), (second, other_id or manifest.id)])
    ]
    return Pairing.of(*sides, by_arm=False)


@pytest.mark.parametrize("turned", [False, True])
def test_compare_corrects_a_declared_pair_for_the_family_and_not_again(bricks, turned):
    off, on = {"over": "depthfl", "brick": False}, {"over": "depthfl", "brick": True}
    found = pairing(bricks, *((on, off) if turned else (off, on)))
    (one,), row = found.comparisons, table_of(bricks).declared[2]
    assert one.p_holm == row.found.p_holm
    assert one.difference == (-1 if turned else 1) * row.found.difference
    assert {"Holm p", "95% simultaneous"} < {*found.section().head}
    assert "Bonferroni p" not in found.section().head
    assert found.findings()[0] == (
        "The search space planned this comparison before the sweep. Its p-values are therefore corrected for the "
        "family of 10 tests, as in the report, and not for all pairs that you could have picked."
    )
    assert {"p_holm", "simultaneous_low"} < {*found.csv().splitlines()[0].split(",")}


def test_compare_corrects_other_pairs_for_all_that_could_have_been_picked(bricks):
    arms = {"over": "depthfl", "brick": False}, {"over": "inclusivefl", "brick": False}
    brick = {"over": "depthfl", "brick": True}
    assert pairing(bricks, *arms).choices == 15
    assert pairing(bricks, arms[0], brick, comparisons=()).choices == 15
    assert pairing(bricks, arms[0], brick, other_id="another").choices == 36
    planned = pairing(bricks, {"over": "fedra", "brick": False}, arms[0])
    assert (planned.choices, planned.comparisons[0].tests) == (1, 10)


def test_the_statistics_are_the_same_in_each_order_of_the_trials(bricks):
    table = table_of(bricks, "all")
    bricks.records = bricks.records[::-1]
    other = summarise(table.manifest, bricks.records)
    assert [one.declared for one in other] == [one.declared for one in table.arms]


def test_the_comparisons_by_the_other_mean_keep_a_correction_of_their_own(trials):
    for arm, more in ((4, 0.03), (8, 0.0), (16, 0.05)):
        for seed in range(3):
            trials.add({"lora.rank": arm}, seed, [0.3, 0.5 + more + 0.001 * (arm * seed % 5)], held_out=["sketch"])
    table = tabulate(make_manifest(comparisons=(rank(16, 4), rank(16, 4, "accuracy/worst_domain"))), trials)
    (other,) = (one for one in table.sections if one.title == "Comparisons with the baseline, out of domain")
    assert "p after Holm's correction for 2 arms." in other.explained
    assert "Holm-corrected for the family of 4 tests" in " ".join(table.caption())
    assert [row.found.tests for row in table.declared] == [4, 4]
    assert table.by_mean["out of domain"].declared == []
