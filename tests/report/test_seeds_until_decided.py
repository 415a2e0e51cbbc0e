"""The report of a sweep in which arms get further seeds until their comparison is decided."""

import pytest

from fedsweep.report import write_report
from fedsweep.report.formats import data_frame
from fedsweep.report.formats.latex import latex
from fedsweep.results.until_decided import UntilDecided
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
    ([0.5] * 3, "+0.00 points after 3 seeds, undecided: up to 6 seeds would hardly decide it."),
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
