"""The values of a paper, which appear in every format of the table and change no measured number."""

import csv
import io
import re

import pytest

from fedsweep.report.formats import data_frame
from fedsweep.results import SweepManifest
from fedsweep.results.arms import Reference, ReferenceArm
from tests.report.conftest import make_manifest
from tests.report.helpers import by_domain, printed, rows_of, tabulate

SOURCE = "A Paper, Table 1"
PAPER = Reference.of(
    {
        "source": SOURCE,
        "arms": [
            {
                "arm": {"lora.rank": 4},
                "values": {"accuracy/mean": 54.73, "accuracy/domain/photo": 85.01, "loss/test": 1.5},
            },
            {"arm": {"lora.rank": 16}, "values": {"accuracy/domain/sketch": 7}},
        ],
    },
    "test",
)


@pytest.fixture
def finished(trials):
    return trials.arms({4: [0.50, 0.52, 0.49], 8: [0.60, 0.62, 0.59], 16: [0.61, 0.62, 0.60]})


def test_the_table_has_the_papers_value_after_our_mean(manifest, finished):
    table = tabulate(manifest(reference=PAPER), finished)
    head, _, *rows = rows_of(table.markdown())
    assert head[:5] == ["lora.rank", "n", "mean", "paper", "sd"]
    assert [row[:4] for row in rows] == [
        ["4", "3", "50.33", "54.73"],
        ["8", "3", "60.33", "-"],
        ["16", "3", "61.00", "-"],
    ]
    said = re.sub(r"\s+", " ", printed(table, 120))
    assert "4 3 50.33 54.73 1.53" in said
    for text in (said, table.markdown()):
        assert f"Paper: values as printed in {SOURCE}. They are not part of any mean or test" in text


def test_a_reference_changes_no_measured_number(manifest, finished):
    """Apart from the cells of the paper, each output equals the output of a sweep without a reference."""
    with_paper, without = (tabulate(manifest(reference=one), finished) for one in (PAPER, None))
    assert with_paper.arms == without.arms
    assert [
        {name: cell for name, cell in row.items() if name != "paper"} for row in with_paper.cells()
    ] == without.cells()
    assert with_paper.findings() == without.findings()
    found = data_frame.data_frame(with_paper)
    assert {"reference", "reference_source"} < set(found)
    assert found.drop(columns=["reference", "reference_source"]).equals(data_frame.data_frame(without))
    assert [row for row in by_domain(with_paper.markdown()) if row[0] != "*paper*"] == by_domain(without.markdown())


def test_without_a_reference_no_paper_is_mentioned(manifest, finished):
    table = tabulate(manifest(), finished)
    for text in (table.markdown(), data_frame.csv(table), printed(table)):
        assert "paper" not in text.lower()
        assert "reference" not in text


def test_the_csv_contains_the_reference_as_a_fraction_and_every_domain(manifest, finished):
    rows = list(csv.DictReader(io.StringIO(data_frame.csv(tabulate(manifest(reference=PAPER), finished)))))
    assert [(row["reference"], row["reference_source"]) for row in rows] == [("0.5473", SOURCE), ("", ""), ("", "")]
    for row in rows:  # in conftest.py, photo is 0.1 above the mean and sketch 0.1 below it
        assert float(row["accuracy/domain/photo"]) == pytest.approx(float(row["mean"]) + 0.1)
        assert float(row["accuracy/domain/sketch"]) == pytest.approx(float(row["mean"]) - 0.1)


def test_losses_of_a_paper_are_not_percentages(manifest, trials):
    for seed, end in enumerate((1.2, 1.3)):
        trials.add(4, seed, [2.0, end], metric="loss/test")
    loss = manifest(metric="loss/test", mode="min", baseline=None, reference=PAPER)
    table = tabulate(loss, trials)
    assert table.cells()[0]["paper"] == "1.500"
    assert float(next(csv.DictReader(io.StringIO(data_frame.csv(table))))["reference"]) == 1.5


def test_the_row_of_the_paper_follows_the_row_of_the_arm(manifest, finished):
    head, rule, *rows = by_domain(tabulate(manifest(reference=PAPER), finished).markdown())
    assert head == ["lora.rank", "n", "photo", "sketch", "mean"]
    assert rule == ["---", "---:", "---:", "---:", "---:"]
    assert rows == [
        ["4", "3", "60.33", "40.33", "50.33"],
        ["*paper*", "-", "85.01", "-", "54.73"],
        ["8", "3", "70.33", "50.33", "60.33"],
        ["16", "3", "71.00", "51.00", "61.00"],
        ["*paper*", "-", "-", "7.00", "-"],
    ]


def test_pruned_seeds_are_not_part_of_means_by_domain(manifest, finished):
    before = by_domain(tabulate(manifest(), finished).markdown())
    finished.add(4, 3, [0.2, 0.9], "pruned")
    finished.add(32, 0, [0.2, 0.3], "pruned")
    assert by_domain(tabulate(manifest(), finished).markdown()) == before


def test_accuracies_by_domain_need_several_domains_and_a_finished_trial(manifest, trials):
    trials.add(4, 0, [0.2, 0.3], None)
    assert "## By domain" not in tabulate(manifest(reference=PAPER), trials).markdown()
    trials.add(4, 1, [0.2, 0.3])
    assert "## By domain" in tabulate(manifest(), trials).markdown()
    assert "## By domain" not in tabulate(manifest(domains=("photo",)), trials).markdown()


def test_domains_named_like_columns_keep_their_own_columns(manifest, trials):
    trials.add(4, 0, [0.2, 0.3])
    for trial in trials.records:
        for record in trial.history:
            record.metrics.update({"accuracy/domain/mean": 0.25, "accuracy/domain/n|": 0.35})
    head, _, row = by_domain(tabulate(manifest(domains=("mean", "n|")), trials).markdown().replace("\\|", "!"))
    assert head == ["lora.rank", "n", "mean", "n!", "mean"]
    assert row == ["4", "1", "25.00", "35.00", "30.00"]


@pytest.mark.parametrize("width", [56, 80, 100])
@pytest.mark.parametrize("long", [False, True])
def test_no_number_is_cut_with_values_of_a_paper(manifest, finished, width, long):
    names = ("lora.rank", "optimizer.lr", "method") if long else ("lora.rank",)
    more = {"optimizer.lr": 0.012345, "method": {"name": "all_small", "depth": 3}} if long else {}
    for place, trial in enumerate(finished.records):
        plan = trial.plan.model_copy(update={"arm": {**trial.plan.arm, **more}})
        finished.records[place] = type(trial)(plan, trial.outcome, trial.history)
    arms = [one.model_copy(update={"arm": {**one.arm, **more}}) for one in PAPER.arms]
    paper = PAPER.model_copy(update={"arms": tuple(arms)})
    table = tabulate(manifest(varied=names, baseline={"lora.rank": 8, **more}, reference=paper), finished)
    said = printed(table, width)
    assert max(map(len, said.splitlines())) <= width
    assert "…" not in said
    dropped = re.search(r"Columns hidden because the terminal is too narrow: (.+) \(see", re.sub(r"\s+", " ", said))
    shown = set(table.cells()[0]) - set(dropped[1].split(", ") if dropped else ()) - {*names}
    assert {"n", "mean", "sd", "difference", "Holm p"} <= shown
    if width >= 80 or not long:
        assert all(cell in said for row in table.cells() for name, cell in row.items() if name in shown)
    assert ("54.73" in said) == ("paper" in shown)
    assert "paper" in shown or width < 100


def test_records_and_lists_in_arm_names_have_no_quotes(manifest, trials):
    small = {"name": "all_small", "depth": 3}
    for method, depths, end in (("fedra", [4, 4], 0.5), (small, [4, 4], 0.4), (small, [12], 0.6)):
        for seed in range(3):
            trials.add({"method": method, "federation.depths": depths}, seed, [0.2, end + seed / 100 * end])
    base = {"method": "fedra", "federation.depths": [4, 4]}
    table = tabulate(manifest(varied=("method", "federation.depths"), baseline=base), trials)
    assert [row[:2] for row in rows_of(table.markdown())[2:]] == [
        ["fedra", "[4, 4]"],
        ["all_small (depth 3)", "[4, 4]"],
        ["all_small (depth 3)", "[12]"],
    ]
    assert [sentence.partition(":")[0] for sentence in table.findings()] == [
        "method all_small (depth 3) against fedra",
        "method all_small (depth 3), depths [12] against method fedra, depths [4, 4]",
    ]
    assert not re.search("[{}'\"]", re.sub("seed's|Student's t|Holm's|Hedges' g", "", table.markdown()))


def test_manifests_of_older_sweeps_can_be_read(manifest):
    older = make_manifest().model_dump(mode="json")
    del older["reference"]
    assert SweepManifest.of(older, "sweep.json").reference is None
    now = manifest(reference=PAPER)
    assert SweepManifest.of(now.model_dump(mode="json"), "sweep.json") == now


def test_line_breaks_in_the_source_of_a_paper_are_joined(manifest, finished):
    def caption(source):
        paper = ReferenceArm(arm={"lora.rank": 4}, values={"accuracy/mean": 50})
        return tabulate(manifest, finished, reference=Reference(source=source, arms=(paper,))).caption()

    assert caption("A Paper\n- Table 2\n\n- Table 3") == caption("A Paper - Table 2 - Table 3")
