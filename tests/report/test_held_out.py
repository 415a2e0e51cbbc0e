"""Held-out domains in every format of the table, which are kept apart from the domains of clients."""

import csv
import io
import math
import re

import pandas as pd
import pyarrow.parquet as pq
import pytest
from scipy import stats

from fedsweep.report.arm_statistics import MEAN_OUT_OF_DOMAIN, domain_metric
from fedsweep.report.formats import data_frame
from fedsweep.report.formats.latex import latex
from fedsweep.report.holm_corrected_tests import holm
from fedsweep.report.units_and_labels import shown_p, title
from fedsweep.results.arms import Reference
from fedsweep.results.history import MEAN_ACCURACY
from fedsweep.training.evaluation import metric_names
from tests.report.helpers import accepts_columns, by_domain, printed, rows_of, tabulate

MEANS = [MEAN_ACCURACY, MEAN_OUT_OF_DOMAIN]
HELD_OUT = "data.held_out_domains"


def hold_out(trials, *arms, metric="accuracy/mean", **more):
    """Add three finished seeds for each arm, which is a list of held-out domains, and return `trials`."""
    for place, held_out in enumerate(arms):
        for seed in range(3):
            ends = [0.2, 0.5 + 0.05 * place + 0.001 * seed**2 * (place + 1)]
            trials.add({HELD_OUT: list(held_out)}, seed, ends, metric=metric, held_out=held_out, **more)
    return trials


@pytest.fixture
def swept(manifest):
    """Return a function that makes the manifest of a sweep over the held-out domains."""
    return lambda **more: manifest(varied=(HELD_OUT,), **{"baseline": {HELD_OUT: ["photo"]}, **more})


def test_metric_names_are_those_that_a_round_reports():
    known = [domain_metric("a"), domain_metric("b", held_out=True), MEAN_ACCURACY, MEAN_OUT_OF_DOMAIN]
    assert set(known) < set(metric_names(["a"], ["b"]))


@pytest.mark.parametrize(
    ("objective", "shown"),
    [
        ("accuracy/mean", {"out of domain": "33.33"}),
        ("accuracy/out_of_domain_mean", {"in domain": "55.33"}),
        ("loss/test", {"in domain": "55.33", "out of domain": "33.33"}),
    ],
)
def test_means_in_and_out_of_domain_appear_once_in_every_format(swept, trials, objective, shown):
    hold_out(trials, ["sketch"], metric=objective)
    for trial in trials.records:  # 1/3 of a point above 53 percent
        trial.history[-1].metrics.update({objective: 0.5333, MEAN_ACCURACY: 0.5533, MEAN_OUT_OF_DOMAIN: 0.3333})
    table = tabulate(swept(metric=objective, baseline=None), trials)
    (cells,) = table.cells()
    means = {name: cell for name, cell in cells.items() if name in ("in domain", "out of domain")}
    assert means == shown
    head, _, row = rows_of(table.markdown())
    assert shown.items() <= dict(zip(head, row, strict=True)).items()
    said = re.sub(r"\s+", " ", printed(table, 120))
    assert " ".join(row) in said
    assert "too narrow" not in said
    (line,) = csv.DictReader(io.StringIO(data_frame.csv(table)))
    columns = {"in domain": MEAN_ACCURACY, "out of domain": MEAN_OUT_OF_DOMAIN}
    assert [name for name in columns.values() if name in line] == [columns[name] for name in shown]
    assert all(float(line[columns[name]]) == pytest.approx(float(cell) / 100) for name, cell in shown.items())


def test_without_held_out_domains_none_are_mentioned(manifest, trials):
    trials.arms({4: [0.5, 0.52], 8: [0.6, 0.61]})
    table = tabulate(manifest(metric="accuracy/mean"), trials)
    for text in (table.markdown(), data_frame.csv(table), printed(table)):
        assert not re.search("out.of.domain|in domain|[0-9][*]", text)


def test_one_table_shows_all_domains_if_arms_hold_out_different_ones(swept, trials):
    table = tabulate(swept(), hold_out(trials, ["photo"], ["sketch"]))
    head, _, *rows = by_domain(table.markdown())
    assert head == [HELD_OUT, "n", "photo", "sketch", "mean in domain", "mean out of domain"]
    assert [[cell.endswith("*") for cell in row] for row in rows] == [
        [False, False, True, False, False, False],
        [False, False, False, True, False, False],
    ]
    for row, one in zip(rows, table.arms, strict=True):  # `make_history` in conftest.py defines the values
        mean = 100 * one.mean
        assert [float(cell.strip("*")) for cell in row[2:]] == pytest.approx(
            [mean + 10, mean - 10, mean, mean - 20], 1e-3
        )
    assert "Values marked * are out of domain: no client of that arm has images of the domain." in table.markdown()
    lines = list(csv.DictReader(io.StringIO(data_frame.csv(table))))
    names = [name for name in lines[0] if "domain/" in name]
    assert names == [domain_metric(name, out) for out in (False, True) for name in ("photo", "sketch")]
    filled = [[bool(line[name]) for name in names] for line in lines]
    assert filled == [[False, True, True, False], [True, False, False, True]]


def test_the_column_of_a_domain_marks_the_arms_that_hold_it_out(swept, trials):
    table = tabulate(swept(columns=("photo", "worst_domain")), hold_out(trials, ["photo"], ["sketch"]))
    assert [row["photo"] for row in table.cells()] == ["60.17*", "65.33"]
    marked = "Values marked * in the column photo are out of domain: no client of that arm has images of the domain."
    assert marked in table.caption()
    assert "| 60.17* |" in table.markdown()
    assert marked in " ".join(printed(table, 120).split())
    assert all(text in latex(table) for text in ("60.17{*}", marked.replace("*", "{*}")))
    (first, second) = csv.DictReader(io.StringIO(data_frame.csv(table)))
    assert "photo" not in first, "the table has a column of its own for accuracies in and out of domain"
    assert first["accuracy/out_of_domain/photo"]
    assert second["accuracy/domain/photo"]


def test_the_column_of_a_domain_that_no_arm_holds_out_has_no_mark(swept, trials):
    table = tabulate(swept(columns=("photo",), baseline=None), hold_out(trials, ["sketch"], []))
    assert not any("*" in row["photo"] for row in table.cells())
    assert "Values marked" not in " ".join(table.caption())


@pytest.mark.parametrize("metric", ["accuracy/mean", "accuracy/domain/photo"])
def test_arms_with_different_domains_are_tested_on_different_images(manifest, trials, metric):
    for domains in (["photo", "sketch"], ["photo"]):
        for seed in range(3):
            trials.add({"data.domains": domains}, seed, [0.2, 0.5 + 0.01 * seed * len(domains)], metric=metric)
            for record in trials.records[-1].history:
                if "sketch" not in domains:
                    del record.metrics["accuracy/domain/sketch"]
    varied = {"varied": ("data.domains",), "metric": metric}
    (finding, *_) = tabulate(manifest(baseline={"data.domains": ["photo"]}, **varied), trials).findings()
    assert ("on different images: " in finding) == (metric == "accuracy/mean")
    table = tabulate(manifest(baseline=None, **varied), trials)
    sentence = "the arms have different domains, so accuracy/mean is computed on different images."
    assert (f"No arm is the best: {sentence}" in table.findings()) == (metric == "accuracy/mean")
    assert "The arms have different domains, so their means are computed on different images." in table.caption()


def test_the_column_of_a_domain_that_only_some_arms_have_is_not_empty(manifest, trials):
    for domains in (["photo"], ["photo", "clay"]):
        for seed in range(3):
            trials.add({"data.domains": domains}, seed, [0.2, 0.5 + 0.01 * seed])
            if "clay" in domains:
                trials.records[-1].history[-1].metrics["accuracy/domain/clay"] = 0.3
    for known in (("photo", "sketch"), ("photo", "sketch", "clay")):
        sweep = manifest(varied=("data.domains",), baseline=None, columns=("clay",), domains=known)
        assert sorted(row["clay"] for row in tabulate(sweep, trials).cells()) == ["-", "30.00"]


@pytest.mark.parametrize(
    ("arms", "differ"), [([["photo"], ["sketch"]], True), ([["sketch"], []], True), ([["sketch"]], False)]
)
def test_means_over_different_images_have_a_warning(swept, trials, arms, differ):
    said = tabulate(swept(), hold_out(trials, *arms)).caption()
    assert ("The arms hold out different domains, so their means are computed on different images." in said) == differ
    assert sum(sentence.startswith("Out of domain: ") for sentence in said) == 1


@pytest.mark.parametrize(
    ("metric", "same"), [("accuracy/mean", False), ("loss/test", False), ("accuracy/domain/other", True)]
)
def test_no_arm_is_the_best_on_different_images(swept, trials, metric, same):
    table = tabulate(swept(metric=metric, baseline=None), hold_out(trials, ["photo"], ["sketch"], metric=metric))
    assert any(sentence.startswith("Best: ") for sentence in table.findings()) == same
    assert any(sentence.startswith("No arm is the best: ") for sentence in table.findings()) == (not same)
    compared = tabulate(swept(metric=metric), trials)
    assert ["on different images" in sentence for sentence in compared.findings()] == [not same]


def components(trials, finals):
    """Add finished trials of arms that hold out sketch; `finals` has a pair (in, out of domain) per seed and arm."""
    for without, ends in finals.items():
        for seed, (inside, outside) in enumerate(ends):
            trials.add({"without": without}, seed, [0.2, inside], held_out=["sketch"])
            trials.records[-1].history[-1].metrics[MEAN_OUT_OF_DOMAIN] = outside
    return trials


COMPONENTS = {
    "nothing": [(0.70, 0.50), (0.72, 0.52), (0.71, 0.53)],
    "momentum": [(0.71, 0.40), (0.71, 0.43), (0.72, 0.42)],
    "quality": [(0.60, 0.51), (0.63, 0.51), (0.61, 0.52)],
}
TOLD = {"varied": ("without",), "baseline": {"without": "nothing"}}
OBJECTIVES = {"accuracy/mean": "out of domain", "accuracy/out_of_domain_mean": "in domain"}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_printed_name_of_a_column_is_accepted(manifest, trials, objective):
    components(trials, COMPONENTS)
    table = tabulate(manifest(metric=objective, columns=("rounds_to=0.5", "photo"), **TOLD), trials)
    seen = {*data_frame.data_frame(table), *table.cells()[0]}.union(*(one.head for one in table.sections))
    prefix = OBJECTIVES[objective].replace(" ", "_")
    assert {f"{prefix}_p", "photo", "pairs", "95% t", "mean out of domain", "rounds_to=0.5_seeds"} <= seen
    accepts_columns(table.manifest, trials.records, seen)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_arms_are_also_tested_by_the_other_mean_with_a_holm_correction_of_its_own(manifest, trials, objective):
    components(trials, COMPONENTS)
    table = tabulate(manifest(metric=objective, **TOLD), trials)
    (other,) = [metric for metric in OBJECTIVES if metric != objective]
    main, second = (one for one in table.sections if one.title.startswith("Comparisons"))
    assert second.title == f"Comparisons with the baseline, {OBJECTIVES[objective]}"
    assert second.explained.startswith(f"Metric: {other} instead of the objective {objective}, with a Holm correction")
    assert f"## {second.title}" in table.markdown()
    of_other = tabulate(manifest(metric=other, **TOLD), trials).sections[0]
    assert (second.head, second.rows) == (of_other.head, of_other.rows)
    assert main.rows != second.rows
    place = second.head.index("Holm p")
    pairs = [[ends[MEANS.index(other)] for ends in COMPONENTS[name]] for name in ("nothing", "momentum", "quality")]
    expected = holm([float(stats.ttest_rel(arm, pairs[0]).pvalue) for arm in pairs[1:]])
    assert sorted(row[place] for row in second.rows) == sorted(["-", *map(shown_p, expected)])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_tests_by_the_other_mean_are_in_every_format(manifest, trials, objective):
    components(trials, COMPONENTS)
    table, other = (
        tabulate(manifest(metric=metric, **TOLD), trials) for metric in (objective, *(OBJECTIVES.keys() - {objective}))
    )
    name, prefix = OBJECTIVES[objective], f"{OBJECTIVES[objective].replace(' ', '_')}_"
    columns = ["arm", "n", "mean", "sd", "difference", "95% interval", "Holm p"]
    expected = [{column: row[column] for column in columns} for row in other.cells()]
    assert table.by_mean[name].comparison_cells() == expected

    said = re.sub(r"[ \n]+", " ", printed(table, 120).partition(f"Comparisons with the baseline, {name}")[2])
    assert all(" ".join(row.values()) in said for row in expected)
    assert f"Metric: {other.manifest.metric} instead of the objective {objective}, with a Holm correction of" in said

    own = data_frame.data_frame(table)
    of_other = data_frame.data_frame(other)
    renamed = [one for one in own if one.startswith(prefix)]
    assert {"difference", "interval_low", "interval_high", "p", "p_holm", "verdict", "n", "sd", "seeds_needed"} < {
        one.removeprefix(prefix) for one in renamed
    }
    for column in renamed:
        pd.testing.assert_series_equal(own[column], of_other[column.removeprefix(prefix)], check_names=False)
    stored = pq.read_table(io.BytesIO(data_frame.parquet(table)))
    assert stored[f"{prefix}p_holm"].to_pylist() == [None if math.isnan(p) else p for p in own[f"{prefix}p_holm"]]

    text = latex(table)
    second = text[text.index(rf"\label{{tab:ablations:lora-rank:{name.replace(' ', '-')}}}") :]
    assert re.findall(r"^(.*?) & ", second, re.MULTILINE)[1:] == [row["arm"] for row in expected]
    assert second.count(r"\rlap{$^*$}") == 1
    cells = [re.findall(r"\$([-+]\d+\.\d+)\$", line)[0] for line in second.splitlines() if "[" in line and "&" in line]
    assert cells == [row["difference"] for row in expected if row["difference"] != "baseline"]


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_names_the_hidden_columns_of_the_second_comparison(manifest, trials, width):
    table = tabulate(manifest(metric="accuracy/mean", **TOLD), components(trials, COMPONENTS))
    said = printed(table, width).partition("Comparisons with the baseline, out of domain")[2]
    assert ("Columns that do not fit: sd (see table.csv)." in re.sub(r"\s+", " ", said)) == (width < 70)
    assert max(map(len, said.splitlines())) <= width


def test_without_a_comparison_by_the_other_mean_no_format_has_one(swept, trials):
    table = tabulate(swept(), hold_out(trials, ["photo"], ["sketch"]))
    assert table.by_mean == {}
    assert "Comparisons" not in printed(table) + latex(table)
    assert not [column for column in data_frame.data_frame(table) if column.startswith("out_of_domain_")]
    assert latex(table).count(r"\begin{table}") == 1


def test_a_mean_is_not_tested_between_arms_that_hold_out_different_domains(swept, trials):
    table = tabulate(swept(), hold_out(trials, ["photo"], ["sketch"]))
    assert [one.title for one in table.sections if one.title.startswith("Comparisons")] == [
        "Comparisons with the baseline"
    ]


def test_an_arm_that_has_not_started_holds_out_no_domains(swept, trials):
    hold_out(trials, ["photo"])
    trials.add({HELD_OUT: ["sketch"]}, 0, [], "failed")
    table = tabulate(swept(), trials)
    assert "different images" not in table.markdown()
    assert table.findings()[0].endswith("no seed finished in both arms, so they cannot be compared.")


def test_an_arm_without_held_out_domains_has_no_mean_out_of_domain(swept, trials):
    table = tabulate(swept(baseline={HELD_OUT: []}), hold_out(trials, ["sketch"], []))
    assert [row["out of domain"] == "-" for row in table.cells()] == [False, True]


def test_the_worst_domain_is_never_a_held_out_one(swept, trials):
    table = tabulate(swept(baseline={HELD_OUT: []}), hold_out(trials, ["sketch"], []))
    assert [one.worst_domain_name for one in table.arms] == ["photo", "sketch"]


@pytest.mark.parametrize("width", [60, 80, 90, 100, 120])
def test_the_out_of_domain_column_is_hidden_last(swept, trials, width):
    arms = [["photo"], ["sketch"]]
    table = tabulate(swept(metric="loss/test", mode="min"), hold_out(trials, *arms, metric="loss/test"))
    said = printed(table, width)
    assert max(map(len, said.splitlines())) <= width
    dropped = re.search(r"Columns hidden because the terminal is too narrow: (.+) \(see", re.sub(r"\s+", " ", said))
    hidden = dropped[1].split(", ") if dropped else []
    order = ["worst domain", "MB sent", "in domain", "out of domain"]
    assert hidden == order[: {100: 1, 120: 0}.get(width, len(hidden))]
    assert all(cell in said for row in table.cells() for name, cell in row.items() if name not in hidden)


def test_lists_are_readable_as_arm_names(swept, trials):
    table = tabulate(swept(), hold_out(trials, ["photo"], ["sketch"], ["photo", "sketch"]))
    assert [row[HELD_OUT] for row in table.cells()] == ["[photo]", "[sketch]", "[photo, sketch]"]
    assert [sentence.partition(":")[0] for sentence in table.findings()] == [
        "held_out_domains [sketch] against [photo], on different images",
        "held_out_domains [photo, sketch] against [photo], on different images",
    ]


def test_values_of_a_paper_appear_in_or_out_of_domain_like_the_arm(swept, trials):
    values = {domain_metric("photo"): 70, domain_metric("sketch", held_out=True): 30, MEAN_OUT_OF_DOMAIN: 31}
    arms = [{"arm": {HELD_OUT: ["sketch"]}, "values": values}]
    paper = Reference.of({"source": "Table 1", "arms": arms}, "test")
    _, _, _, own, printed_values = by_domain(
        tabulate(swept(reference=paper), hold_out(trials, ["photo"], ["sketch"])).markdown()
    )
    assert own[0] == "[sketch]"
    assert printed_values == ["*paper*", "-", "70.00", "30.00*", "-", "31.00"]


def test_axis_titles_mark_out_of_domain_metrics():
    assert title(MEAN_OUT_OF_DOMAIN) == "Mean accuracy out of domain (%)"
    assert title(domain_metric("sketch", held_out=True)) == "Accuracy on sketch, out of domain (%)"
