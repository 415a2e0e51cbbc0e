"""The report of a sweep in which arms get further seeds until their comparison is decided."""

import io
from collections import Counter

import pandas as pd
import pytest

from fedsweep.report import write_report
from fedsweep.report.arm_statistics import summarise
from fedsweep.report.compare_sweeps import Pairing, Side
from fedsweep.report.declared_comparisons import TITLE
from fedsweep.report.formats import data_frame
from fedsweep.report.formats.latex import latex
from fedsweep.report.intervals_and_power import negated
from fedsweep.report.table import AblationTable
from fedsweep.results.declared_comparisons import DeclaredComparison
from fedsweep.results.seeds import UntilDecided
from tests.report.helpers import printed, rows_of, tabulate

UNTIL = UntilDecided(at_least=3, at_most=6, smallest_effect=3.0)
NOISE = (0.000, 0.002, -0.001, 0.001, -0.002, 0.001)


@pytest.fixture
def decided(manifest, trials):
    """Return the table of three arms: rank 4 is higher, rank 2 is equivalent, and rank 1 is open."""
    trials.arms({8: [0.50 + one for one in NOISE]})
    trials.arms({4: [0.60 + 2 * one for one in NOISE], 2: [0.50 + 2 * one for one in NOISE]})
    trials.arms({1: [0.50, 0.55, 0.49]})
    return tabulate(manifest(until_decided=UNTIL, seeds=UNTIL.seeds), trials)


def test_the_table_has_verdicts_instead_of_p_values(decided):
    head, _, *rows = rows_of(decided.markdown())
    assert head[:7] == ["lora.rank", "n", "mean", "sd", "difference", "95% interval", "verdict"]
    assert [(row[0], row[6]) for row in rows] == [("1", "open"), ("2", "within ±3.00"), ("4", "higher"), ("8", "-")]
    text = decided.markdown() + printed(decided)
    assert "Holm" not in text
    assert "t-test" not in text
    assert "95% of mean" not in text
    assert "valid at every look" in text
    assert "95% t" not in text
    assert "Each arm gets 3 to 6 seeds, until its comparison with the baseline is decided or out of reach." in text


def test_the_legend_says_what_the_seeds_vary(manifest, decided):
    assert "The seed determines only" not in decided.markdown()
    trials = [trial for one in decided.arms for trial in one.arm.trials]
    partial = decided.manifest.model_copy(update={"seed_streams": ("allocation",)})
    text = AblationTable(partial, summarise(partial, trials)).markdown()
    assert "The seed determines only: the blocks that each client trains." in text


def test_findings_state_the_verdict_and_the_seeds_at_which_it_was_reached(decided):
    found = {sentence.partition(" against")[0]: sentence for sentence in decided.findings()}
    assert "+10.03 points after 3 seeds (95% interval" in found["rank 4"]
    assert found["rank 4"].endswith("significantly higher.")
    assert "equivalent: within 3.0 points of the baseline (90% interval" in found["rank 2"]
    assert found["rank 1"].endswith("not decided yet: resume the sweep to run further seeds.")


def test_the_page_names_the_rule_instead_of_all_seeds(decided, tmp_path):
    trials = [trial for one in decided.arms for trial in one.arm.trials]
    text = (write_report(decided.manifest, trials, tmp_path).folder / "report.html").read_text()
    assert "<dt>Seeds</dt><dd>until decided, 3 to 6</dd>" in text


def test_seeds_after_a_decision_do_not_count(decided):
    by_rank = {one.arm.values["lora.rank"]: one for one in decided.arms}
    assert by_rank[4].n == by_rank[4].comparison.sequential.seeds == 3
    assert by_rank[4].mean == pytest.approx(0.60 + 2 * sum(NOISE[:3]) / 3)
    assert by_rank[8].n == 6  # rank 1 is open, so the baseline goes on
    assert by_rank[8].interval is None


def test_csv_has_the_intervals_of_the_tests_by_looks(decided):
    frame = data_frame.data_frame(decided).set_index("lora.rank")
    assert "p_holm" not in frame
    assert frame.loc[4, "interval_low"] > 0
    assert -0.03 < frame.loc[2, "equivalence_low"] < frame.loc[2, "equivalence_high"] < 0.03
    assert frame["seeds_of_verdict"].tolist()[:3] == [3, frame.loc[2, "seeds_of_verdict"], 3]
    assert frame.loc[[1, 2, 4], "verdict"].tolist() == ["open", "within", "higher"]


def test_latex_marks_decided_arms(decided):
    text = latex(decided)
    assert text.count(r"\rlap{$^*$}") == 1
    assert "An asterisk marks an arm that was decided to be higher or lower." in text
    assert r"within $\pm$3.00" in text


@pytest.mark.parametrize(("ends", "part"), [
    ([0.5] * 3, "equal on each of 3 seeds, so no test is possible yet: resume the sweep to run further seeds."),
    ([0.5] * 6, "equal on each of 6 seeds, so no test is possible."),
    ([0.75] * 6, "+25.00 points on each of 6 seeds, so no test is possible."),
    ([0.6, 0.39, 0.59, 0.42, 0.5], "undecided: up to 6 seeds would hardly decide it."),
    ([0.5, 0.56, 0.47, 0.55, 0.52, 0.57], "undecided"),
])  # fmt: skip
def test_undecided_comparisons_say_why_they_ended(manifest, trials, ends, part):
    trials.arms({8: [0.5] * 6, 4: ends})
    (found,) = [
        one for one in tabulate(manifest(until_decided=UNTIL, seeds=UNTIL.seeds), trials).findings() if "rank 4" in one
    ]
    assert part in found


def test_a_failed_seed_counts_as_a_seed_but_not_as_a_pair(manifest, trials):
    trials.arms({8: [0.5, 0.51, 0.5, 0.51]})
    for seed, end in enumerate((0.7, None, 0.71, 0.7)):
        trials.add(
            4, seed, [0.2] if end is None else [0.2, 0.3, 0.4, 0.5, end], "failed" if end is None else "finished"
        )
    (arm,) = (one for one in tabulate(manifest(until_decided=UNTIL, seeds=UNTIL.seeds), trials).arms if one.comparison)
    assert 1 not in arm.comparison.seeds
    assert len(arm.comparison.seeds) == arm.comparison.sequential.pairs == arm.comparison.sequential.seeds - 1


def compare(rank: int, other: int) -> DeclaredComparison:
    return DeclaredComparison(arm={"lora.rank": rank}, against={"lora.rank": other})


DECLARED = (compare(4, 2), compare(2, 1), compare(8, 4))


@pytest.fixture
def declared(manifest, trials):
    """Return the table of four arms with three declared comparisons, one of which is with the baseline."""
    trials.arms(
        {8: [0.50 + one for one in NOISE], 4: [0.60 + 2 * one for one in NOISE], 2: [0.5 - one for one in NOISE]}
    )
    trials.arms({1: [0.48, 0.462, 0.49]})
    return tabulate(manifest(until_decided=UNTIL, seeds=UNTIL.seeds, comparisons=DECLARED), trials)


def section(table):
    (found,) = (one for one in table.sections if one.title == TITLE)
    return found


def test_declared_comparisons_have_verdicts_instead_of_p_values(declared):
    found = section(declared)
    assert found.head == ["arm", "against", "n", "difference", "95% interval", "95% simultaneous", "verdict"]
    rows = [(row[0], row[1], row[2], row[-1]) for row in found.rows]
    assert rows[0] == ("rank 4", "rank 2", "3", "higher")
    assert rows[1] == ("rank 2", "rank 1", "3", "open")
    assert rows[2] == ("rank 8", "rank 4", "3", "lower"), (
        "in the opposite direction of the comparison with the baseline"
    )
    assert "corrected for the family of 5 tests: 3 with the baseline and 3 declared (1 in both groups)." in (
        found.explained
    )
    text = declared.markdown() + printed(declared, 200)
    assert not any(word in text for word in ("Holm", "t-test", "95% t", "95% of mean"))
    legend = " ".join(declared.caption())
    assert "Each arm gets 3 to 6 seeds, until all its comparisons, with the baseline or declared, are decided" in legend
    assert "corrected for the family of 5 tests, which contains the declared comparisons." in legend
    assert "in at least 95% of sweeps, all 5 intervals contain their true differences (Bonferroni)." in found.explained


def test_a_decision_that_the_simultaneous_interval_does_not_show_is_marked(manifest, trials):
    """Rank 2 is judged with the level that the clear decision about rank 4 has passed on."""
    trials.arms({8: [0.5] * 6, 4: [0.7 + one for one in NOISE], 2: [0.504 + one for one in NOISE]})
    trials.arms({1: [0.501, 0.498, 0.503, 0.496, 0.505, 0.494]})
    own = manifest(until_decided=UNTIL.model_copy(update={"smallest_effect": None}), seeds=UNTIL.seeds)
    table = tabulate(own, trials)
    found = {one.arm.values["lora.rank"]: one.comparison for one in table.arms if one.comparison is not None}
    assert {rank: one.direction_only for rank, one in found.items()} == {4: False, 2: True, 1: False}
    (section,) = (one for one in table.sections if one.title == "Comparisons with the baseline")
    cells = {row[0]: row[section.head.index("95% simultaneous")] for row in section.rows}
    assert [rank for rank, cell in cells.items() if "(direction only)" in cell] == ["2"]
    assert "the verdict shows the sign of the difference, but the simultaneous interval contains zero" in (
        section.explained
    )


def test_an_arm_has_the_seeds_of_its_longest_comparison_and_a_difference_those_of_its_own(declared):
    by_rank = {one.arm.values["lora.rank"]: one for one in declared.arms}
    assert by_rank[2].n == 6, "the comparison with rank 1 is open"
    for one in declared.arms:
        if one.comparison is not None:
            assert one.comparison.tests == 5
            assert one.comparison.seeds == tuple(range(one.comparison.sequential.seeds))
    assert len(by_rank[4].comparison.seeds) == len(by_rank[2].comparison.seeds) == 3
    row = declared.declared[2]
    assert row.found.interval == negated(by_rank[4].comparison.interval)
    assert row.found.sequential == by_rank[4].comparison.sequential.mirrored()
    assert row.found.sequential.mirrored() == by_rank[4].comparison.sequential


def test_findings_of_declared_comparisons_name_the_other_arm(manifest, trials):
    trials.arms({8: [0.5, 0.6, 0.7, 0.5], 4: [0.60 + one for one in NOISE], 2: [0.60 + 2 * one for one in NOISE]})
    own = manifest(until_decided=UNTIL, seeds=UNTIL.seeds, baseline=None, comparisons="all")
    found = tabulate(own, trials).findings()
    (said,) = [one for one in found if one.startswith("rank 4 against 2: ")]
    assert "equivalent: within 3.0 points of the other arm (90% interval" in said
    assert not any("baseline" in one for one in [*found, *tabulate(own, trials).caption()])
    assert "until all its declared comparisons are decided" in " ".join(tabulate(own, trials).caption())


def test_many_declared_comparisons_are_counted_by_verdict(manifest, trials):
    ends = {rank: [0.5 + 0.1 * (rank > 3) + (1 + rank % 3) * one for one in NOISE] for rank in range(6)}
    ends[6] = [0.5, 0.7]
    table = tabulate(
        manifest(until_decided=UNTIL, seeds=UNTIL.seeds, baseline={"lora.rank": 0}, comparisons="all"),
        trials.arms(ends),
    )
    (said,) = (one for one in table.findings() if one.startswith("Declared comparisons: "))
    others = Counter(row.found.verdict for row in table.declared if not row.test.with_baseline)
    assert said.endswith(f" {others['open']} are not decided yet.")
    assert sum(others.values()) == 15


def test_files_have_the_sequential_columns_of_declared_comparisons(declared):
    frame = pd.read_csv(io.StringIO(data_frame.declared_csv(declared)))
    assert [*frame.columns] == [
        "arm", "against", "metric", "n_common", "difference", "interval_low", "interval_high", "simultaneous_low",
        "simultaneous_high", "direction_only", "equivalence_low", "equivalence_high",
        "images_low", "images_high", "images_equivalence_low", "images_equivalence_high", "effect", "seeds_of_verdict",
        "verdict",
    ]  # fmt: skip
    assert frame["verdict"].tolist() == ["higher", "open", "lower"]
    for one in declared.arms:
        if one.comparison is not None:
            joint, own = one.comparison.simultaneous, one.comparison.interval
            assert joint[0] <= own[0] < own[1] <= joint[1]
    second = latex(declared).partition("\\end{table}")[2]
    assert second.count(r"\rlap{$^*$}") == 2
    assert "An asterisk marks an arm that was decided to be higher or lower." in second


@pytest.mark.parametrize("turned", [False, True])
def test_compare_shows_the_verdict_of_a_planned_pair(declared, trials, turned):
    names = ["lora.rank=2", "lora.rank=4"][:: -1 if turned else 1]
    sides = [Side.of(name, declared.manifest, trials.records, name) for name in names]
    found = Pairing.of(*sides, by_arm=False)
    assert found.comparisons[0].verdict == ("lower" if turned else "higher")
    assert found.section().head[-1] == "verdict"
    assert "95% interval" in found.section().head
    first, said, *_ = found.findings()
    assert "Its interval and its verdict are therefore corrected for the family of 5 tests" in first
    assert f"significantly {found.comparisons[0].verdict}" in said
    assert "seeds_of_verdict" in found.csv().splitlines()[0]
    assert "p_holm" not in found.csv()
