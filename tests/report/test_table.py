"""The report's table, which has the same values in the terminal, in Markdown and in CSV."""

import csv
import io
import re
from dataclasses import replace

import pytest

from fedsweep.common.randomness import STREAMS
from fedsweep.report import write_report
from fedsweep.report.formats import data_frame
from fedsweep.report.sentences import NEW_SEEDS
from tests.report.helpers import printed, rows_of, tabulate


@pytest.fixture
def ablation(trials):
    """Return the trials of an ablation with the baseline rank 8.

    Rank 4 is significantly worse than the baseline, rank 16 is not significantly different, and rank 32 was pruned. Of
    the three seeds of rank 2, one failed and one was pruned.
    """
    trials.arms({4: [0.5010, 0.5220, 0.4915], 8: [0.6012, 0.6204, 0.5921], 16: [0.61, 0.61, 0.60]})
    for seed in range(3):
        trials.add(32, seed, [0.2, 0.3], "pruned")
    trials.add(2, 0, [0.2, 0.3, 0.4, 0.4, 0.5])
    trials.add(2, 1, [0.2, 0.3, 0.4], "failed")
    trials.add(2, 2, [0.2, 0.3, 0.4, 0.4], "pruned")
    return trials


def test_the_markdown_table_contains_the_expected_cells(manifest, ablation):
    head, _, *rows = rows_of(tabulate(manifest(), ablation).markdown())
    assert head == [
        *("lora.rank", "n", "mean", "sd", "difference", "95% interval", "Holm p", "worst domain", "MB sent", "note"),
    ]
    cells = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert list(cells) == ["2", "4", "8", "16", "32"]
    assert cells["8"]["mean"] == "60.46"
    assert cells["8"]["difference"] == "baseline"
    assert cells["4"]["difference"] == "-9.97"
    assert cells["4"]["worst domain"] == "40.48 sketch"
    assert cells["4"]["MB sent"] == "6.000"
    assert cells["2"]["note"] == "seed 1 failed after round 2; seed 2 pruned at round 3"
    assert cells["32"]["n"] == "0"
    assert cells["32"]["mean"] == "-"
    assert cells["32"]["note"] == "seeds 0, 1, 2 pruned at round 1 (30.00)"


def test_terminal_and_markdown_show_the_same_cells(manifest, ablation):
    table = tabulate(manifest(), ablation)
    said = re.sub(r"\s+", " ", printed(table, 200))
    _, _, *rows = rows_of(table.markdown())
    assert len(rows) == 5
    for row in rows:
        assert " ".join(row) in said
    for sentence in [*table.findings(), *table.caption()]:
        assert sentence in said
        assert sentence in table.markdown()


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("names", [("lora.rank",), ("lora.rank", "optimizer.lr", "local.batch_size")])
def test_no_number_is_cut_at_any_width(manifest, ablation, width, names):
    for place, trial in enumerate(ablation.records):
        values = (trial.plan.arm["lora.rank"], 0.012345, 32)
        plan = trial.plan.model_copy(update={"arm": dict(zip(names, values, strict=False))})
        ablation.records[place] = type(trial)(plan, trial.outcome, trial.history)
    baseline = dict(zip(names, (8, 0.012345, 32), strict=False))
    table = tabulate(manifest(varied=names, baseline=baseline), ablation)
    said = printed(table, width)
    assert max(map(len, said.splitlines())) <= width
    always = ["lora.rank", "n", "mean", "sd", "difference", "Holm p"] + (["95% interval"] if width > 60 else [])
    for row in table.cells():
        for name in always:
            assert row[name] in said
    if width >= 100 and len(names) == 1:
        assert all(cell in said for row in table.cells() for name, cell in row.items() if name != "note")
        assert "too narrow" not in said
    words = re.sub(r"\s+", " ", said)
    assert "seed 1 failed" in words
    assert "…" not in said


def test_hidden_columns_are_listed(manifest, ablation):
    said = re.sub(r"\s+", " ", printed(tabulate(manifest(), ablation), 70))
    assert "Columns hidden because the terminal is too narrow: MB sent, worst domain (see table.md)." in said
    assert "rank 32: seeds 0, 1, 2 pruned at round 1 (30.00)." in said


def test_csv_values_are_read_back_bit_identically(manifest, ablation):
    table = tabulate(manifest(), ablation)
    rows = list(csv.DictReader(io.StringIO(data_frame.csv(table))))
    assert [row["lora.rank"] for row in rows] == ["2", "4", "8", "16", "32"]
    for row, one in zip(rows, table.arms, strict=True):
        found = one.comparison
        for name, value in [
            ("mean", one.mean),
            ("sd", one.sd),
            ("mean_of_last_4_rounds", one.mean_of_last),
            ("worst_domain_accuracy", one.columns["worst_domain"]),
            ("p_holm", found and found.p_holm),
            ("difference", found and found.difference),
            ("interval_low", found and found.interval and found.interval[0]),
        ]:
            assert row[name] == "" if value is None else float(row[name]) == value
    assert [row["pruned"] for row in rows] == ["1", "0", "0", "0", "3"]
    assert [row["failed"] for row in rows] == ["1", "0", "0", "0", "0"]
    assert [row["last_round"] for row in rows] == ["4", "4", "4", "4", "1"]
    assert [row["n_common"] for row in rows] == ["1", "3", "", "3", "0"]
    assert rows[0]["verdict"] == "too few seeds"
    assert {(row["p_exact"], row["p_exact_holm"]) for row in rows} == {("", "")}  # as the text says: too few pairs
    last = rows[3]
    assert (last["seeds_needed"], last["seeds_needed_low"], last["seeds_needed_high"]) == ("256", "113", "2404")


def test_findings_are_sentences_about_each_arm(manifest, ablation):
    assert tabulate(manifest(), ablation).findings() == [
        "rank 2 against 8: -10.12 points on the only seed that finished in both arms. A test needs at least two seeds.",
        "rank 4 against 8: -9.97 points (95% interval -10.26 to -9.68), significantly lower.",
        "rank 16 against 8: +0.21 points (95% interval -2.48 to 2.90), no detectable difference. "
        "With 3 seeds, the test detects differences of 5.01 points or more (with a power of 80%). "
        "Detecting the observed difference would take 110 to 2,400 seeds.",
        "rank 32 against 8: no seed finished in both arms, so they cannot be compared.",
    ]


def test_findings_without_a_spread_have_no_interval(manifest, trials):
    trials.arms({8: [0.6, 0.5, 0.4], 2: [0.6, 0.5, 0.4], 4: [0.61, 0.51, 0.41]})
    assert tabulate(manifest(), trials).findings() == [
        "rank 2 against 8: equal on each of 3 seeds, no detectable difference.",
        "rank 4 against 8: +1.00 points on each of 3 seeds. No test is possible, because the difference does not vary.",
    ]


def test_an_interval_without_zero_that_is_not_significant_after_holm_is_explained(manifest, trials):
    # p = 1 - sqrt(75 / 77) = 0.01307 for rank 4: significant among three arms, not among four.
    noise = [0.49, 0.50, 0.52]
    trials.arms({8: [0.5] * 3, 4: [0.54, 0.55, 0.56], 2: noise, 16: noise})
    found = "rank 4 against 8: +5.00 points (95% interval 2.52 to 7.48), "
    assert f"{found}significantly higher." in tabulate(manifest(), trials).findings()
    trials.arms({32: noise})
    corrected = f"{found}no detectable difference after Holm's correction (p 0.052)."
    assert any(one.startswith(corrected) for one in tabulate(manifest(), trials).findings())


def test_findings_count_the_seeds_of_a_comparison(manifest, trials):
    trials.arms({8: [0.5, 0.52, 0.54], 4: [0.4, 0.45]})
    trials.add(4, 2, [0.2, 0.3], "pruned")
    table = tabulate(manifest(), trials)
    assert " over 2 of 3 seeds (95% interval " in table.findings()[0]
    assert "If seeds of an arm were pruned, its mean covers only the surviving seeds" in table.caption()[-2]


@pytest.mark.parametrize(("baseline", "better"), [(4, "higher, which is worse"), (8, "lower, which is better")])
def test_losses_are_not_percentages_and_lower_is_better(manifest, trials, baseline, better):
    for rank, ends in {4: [0.4, 0.41, 0.42], 8: [0.5, 0.512, 0.522]}.items():
        for seed, end in enumerate(ends):
            trials.add(rank, seed, [1.0, end], metric="loss/test")
    loss = manifest(metric="loss/test", mode="min", baseline={"lora.rank": baseline})
    table = tabulate(loss, trials)
    assert table.cells()[0]["mean"] == "0.4100"
    assert better in table.findings()[0]
    assert "points" not in table.markdown()
    assert "lower is better" in table.markdown()


def test_every_format_names_a_scaling_that_changes_with_the_rank(manifest, ablation, tmp_path):
    assert not [one for one in tabulate(manifest(), ablation).caption() if "differs between" in one]
    for place, trial in enumerate(ablation.records):
        plan = trial.plan.model_copy(update={"derived": {"scaling": 8 / trial.plan.arm["lora.rank"]}})
        ablation.records[place] = replace(trial, plan=plan)
    write_report(manifest(), ablation.records, tmp_path)
    written = [(tmp_path / name).read_text() for name in ("table.md", "table.tex", "report.html")]
    expected = "Besides what the arms name, scaling differs between arms: 4, 2, 1, 0.5, 0.25 (lora.alpha / lora.rank)."
    for text in [printed(tabulate(manifest(), ablation), 120), *written]:
        assert expected in re.sub(r"\s+", " ", text)


def test_the_caption_counts_unfinished_trials(manifest, ablation):
    ablation.add(16, 3, [0.2], None)
    markdown = tabulate(manifest(), ablation).markdown()
    for part in (
        "Objective: accuracy/mean in percent after 4 rounds, higher is better.",
        "Baseline: lora.rank 8.",
        "Holm p: p-value of the paired t-test, Holm-corrected for 2 arms.",
        "Trials: 10 finished, 4 pruned, 1 failed, 1 unfinished;",
    ):
        assert part in markdown


def test_a_sampled_search_is_ranked_and_warns_that_the_best_arm_is_optimistic(manifest, trials):
    for rank, rate, end in ((4, 0.1, 0.5), (8, 0.02, 0.6)):
        trials.add({"lora.rank": rank, "optimizer.lr": rate}, 0, [0.2, end])
    trials.add({"lora.rank": 2, "optimizer.lr": 0.5}, 0, [0.2, 0.1], "pruned")
    table = tabulate(manifest(baseline=None, seeds=(0,)), trials)
    head, _, *rows = rows_of(table.markdown())
    assert head == ["lora.rank", "optimizer.lr", "n", "mean", "worst domain", "MB sent", "note"]
    assert [row[:4] for row in rows] == [
        ["8", "0.02", "1", "60.00"],
        ["4", "0.1", "1", "50.00"],
        ["2", "0.5", "0", "-"],
    ]
    assert table.findings()[0] == "Best: rank 8, lr 0.02 with accuracy/mean 60.00% (n = 1)."
    assert table.findings()[1] == (
        "This arm was chosen from 3 arms by its mean on the test images, which is therefore optimistic. "
        f"{NEW_SEEDS} Choose it by validation images instead (guides/tuning.md in the documentation)."
    )
    assert "the test images stay the same" in NEW_SEEDS
    assert "p_holm" not in data_frame.csv(table)


@pytest.mark.parametrize("best_seeds", [(0,), (0, 1)])
def test_the_best_arm_with_fewer_seeds_than_others_is_named_with_a_warning(manifest, trials, best_seeds):
    for rank, seeds, end in ((4, (0, 1), 0.5), (8, best_seeds, 0.6)):
        for seed in seeds:
            trials.add({"lora.rank": rank}, seed, [0.2, end])
    findings = tabulate(manifest(baseline=None, seeds=(0, 1)), trials).findings()
    assert findings[0] == f"Best: rank 8 with accuracy/mean 60.00% (n = {len(best_seeds)})."
    warning = "Other arms have up to 2 finished seeds, so the means are over different seeds."
    assert (warning in findings) == (len(best_seeds) < 2)


@pytest.mark.parametrize("scheduler", ["none", "arms", "asha", "median", "pbt"])
def test_the_legend_warns_of_a_scheduler_that_chose_on_the_test_images(manifest, trials, scheduler):
    table = tabulate(manifest(scheduler=scheduler), trials.arms({4: (0.5, 0.6, 0.55), 8: (0.4, 0.5, 0.45)}))
    warned = [one for one in table.caption() if "optimistic" in one]
    assert warned == [
        f"The scheduler {scheduler} chooses between trials by accuracy/mean on the test images, so its best values are "
        f"optimistic. {NEW_SEEDS}"
    ] * (scheduler != "none")


def test_findings_name_only_the_hyperparameters_that_differ(manifest, trials):
    for rank, rate in ((8, 0.1), (8, 0.2), (4, 0.2)):
        trials.add({"lora.rank": rank, "optimizer.lr": rate}, 0, [0.2, 0.5])
    table = tabulate(manifest(baseline={"lora.rank": 8, "optimizer.lr": 0.1}), trials)
    said = [sentence.partition(":")[0] for sentence in table.findings()]
    assert said == ["rank 4, lr 0.2 against rank 8, lr 0.1", "lr 0.2 against 0.1"]


def test_values_of_any_kind_stay_in_their_cell(manifest, trials):
    for seed, value in enumerate(["a|b", [12, 6], "[bold]x", None]):
        trials.add({"x": value}, seed, [0.1, 0.2])
    table = tabulate(manifest(baseline=None, varied=("x",)), trials)
    assert "a\\|b" in table.markdown()
    assert "[bold]x" in printed(table)
    rows = csv.DictReader(io.StringIO(data_frame.csv(table)))
    assert [row["x"] for row in rows] == ["a|b", "[12, 6]", "[bold]x", ""]


def test_texts_that_look_like_formulas_are_inert_in_csv(manifest, trials):
    for seed, value in enumerate(["=1+1", "+a", "-a", "@a", "\ta", -2.5]):
        trials.add({"x": value}, seed, [0.1, 0.2])
    rows = [*csv.DictReader(io.StringIO(data_frame.csv(tabulate(manifest(baseline=None, varied=("x",)), trials))))]
    assert {row["x"] for row in rows} == {"'=1+1", "'+a", "'-a", "'@a", "'\ta", "-2.5"}


def test_names_with_html_are_text_in_markdown(manifest, trials):
    evil = "<img src=x onerror=alert(1)><!--"
    for seed, arm in enumerate([evil, "plain"]):
        trials.add({"arm": arm}, seed, [0.1, 0.2])
    markdown = tabulate(manifest(baseline={"arm": "plain"}, varied=("arm",), name=f"x/{evil}"), trials).markdown()
    assert markdown.count("&lt;img src=x onerror=alert(1)>&lt;!--") >= 3
    assert not re.search("<[A-Za-z/!?]", re.sub("(?<=- Command: )`.*`", "", markdown))


def test_a_sweep_without_finished_trials_has_a_table(manifest, trials):
    trials.add(4, 0, [0.2, 0.3], None)
    trials.add(8, 0, [], None)
    table = tabulate(manifest(), trials)
    notes = [row["note"] for row in table.cells()]
    assert notes == ["seed 0 unfinished at round 1 (30.00)", "seed 0 not started"]
    assert "nan" not in (table.markdown() + data_frame.csv(table) + printed(table)).lower()


@pytest.mark.parametrize("streams", [None, ("allocation",), ("batches", "initial")])
def test_the_caption_says_what_the_seeds_vary(manifest, ablation, streams):
    caption = " ".join("\n".join(tabulate(manifest(seed_streams=streams), ablation).caption()).split())
    named = [name for name, group in STREAMS.items() if group.meaning in caption]
    assert named == list(streams or ())
    assert ("Everything else that is random is the same for all seeds" in caption) == bool(streams)
