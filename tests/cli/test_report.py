"""The output, the files and the error messages of `fedsweep report` and `fedsweep compare`."""

import io
import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from fedsweep.report import write_report
from fedsweep.results import Store
from fedsweep.results.checkpoint import Checkpoint, save
from fedsweep.types import ServerState
from tests.cli.conftest import GRID, Call, Refused, write
from tests.places import without_place
from tests.report.conftest import Trials, make_manifest

SPACE = "ablations/lora_rank"
ONE = Trials().arms({4: [0.50, 0.52, 0.49], 8: [0.60, 0.62, 0.58]})
OTHER = Trials().arms({4: [0.55, 0.56, 0.57], 8: [0.60, 0.62, 0.58], 16: [0.7, 0.72, 0.71]})


def record(store: Path, sweep: str, trials: Trials, name: str = SPACE) -> Path:
    """Write a sweep to disk, and return its folder."""
    kept = Store(store).sweep(name, sweep)
    kept.create(make_manifest(id=sweep, name=name, created=f"2026-01-01T00:00:0{sweep[-1]}Z"), {})
    for one in trials.records:
        trial = kept.trial(one.plan.key)
        trial.plan(one.plan)
        state = ServerState({"w": torch.zeros(1)}, (0,))
        save(trial.checkpoint, Checkpoint(one.last_round, state, tuple(one.history)))
        assert one.outcome is not None
        trial.end(one.outcome)
    return kept.folder


@pytest.fixture(autouse=True)
def sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Write two sweeps whose reports have no figures, and return their folders."""
    monkeypatch.setattr("fedsweep.report.write_figures", lambda *_: ())
    return [record(tmp_path / "mlruns", "s1", ONE), record(tmp_path / "mlruns", "s2", OTHER)]


@pytest.mark.parametrize(
    ("format", "name"),
    [("markdown", "table.md"), ("csv", "table.csv"), ("latex", "table.tex"), ("html", "report.html")],
)
def test_the_printed_report_is_the_written_file(call: Call, sweeps, format, name):
    answer = call("report", SPACE, "--sweep", "s1", "--format", format)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == (sweeps[0] / "report" / name).read_text()


def test_parquet_is_written_to_a_file_but_not_to_a_terminal(call: Call, refused: Refused, sweeps, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout.isatty", lambda: True)
        assert refused("report", SPACE, "--format", "parquet").startswith(
            "`--format parquet` is binary; redirect it to a file"
        )
    file = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", io.TextIOWrapper(file, write_through=True))
        assert call("report", SPACE, "--format", "parquet").code == 0
        written = file.getvalue()
    assert written == (sweeps[1] / "report" / "table.parquet").read_bytes()


def test_without_a_format_report_prints_the_table_of_the_newest_sweep(call: Call, sweeps):
    answer = call("report", SPACE)
    assert answer.out.startswith(SPACE)
    assert "rank 16 against 8: " in answer.out
    assert answer.out.endswith("Written to mlruns/sweeps/ablations/lora_rank/s2/report.\n")


def test_every_format_has_the_given_columns(call: Call, sweeps):
    asked = ("--columns", "worst_domain,megabytes_up,rounds_to=0.52,accuracy/domain/photo")
    heading = ["worst domain", "MB up", "rounds to 52%", "accuracy/domain/photo"]
    shown = call("report", SPACE, *asked).out
    assert " ".join(shown.splitlines()[1].split()).endswith(" ".join(heading))
    assert f"| {' | '.join(heading)} |" in call("report", SPACE, *asked, "--format", "markdown").out
    assert " & ".join(heading).replace("%", r"\%") in call("report", SPACE, *asked, "--format", "latex").out
    assert ">MB up<" in call("report", SPACE, *asked, "--format", "html").out
    table = pd.read_csv(io.StringIO(call("report", SPACE, *asked, "--format", "csv").out))
    assert table["megabytes_up"].tolist() == [2.0, 2.0, 2.0]


def test_each_printed_column_name_is_accepted_as_a_column(call: Call):
    shown = call("report", SPACE, "--columns", "worst_domain,rounds_to=0.7,MB up", "--format", "markdown").out
    headings = next(line for line in shown.splitlines() if line.startswith("| lora.rank"))
    printed = [one.strip() for one in headings.strip("|").split("|")][1:]
    assert {"mean", "worst domain", "rounds to 70%", "MB up"} <= {*printed}
    again = call("report", SPACE, "--columns", ",".join(printed), "--format", "markdown").out
    assert again == shown
    in_csv = pd.read_csv(io.StringIO(call("report", SPACE, "--format", "csv").out)).columns
    assert len(in_csv) > 20
    assert call("report", SPACE, "--columns", ",".join(in_csv.drop("worst_domain"))).code == 0


@pytest.mark.parametrize("sides", [(f"{SPACE}@s1", f"{SPACE}@s2"), (f"{SPACE}:rank 4", f"{SPACE}:rank 8")])
def test_each_column_name_of_a_comparison_is_accepted_as_a_column(call: Call, sides):
    heading, in_csv = (
        next(line for line in call("compare", *sides, "--format", format).out.splitlines() if "effect" in line)
        for format in ("markdown", "csv")
    )
    printed = [[one.strip() for one in heading.strip("|").split("|")], in_csv.split(",")]
    assert [len(names) for names in printed] == [15, 31]
    for names in printed:
        assert call("report", SPACE, "--columns", ",".join(names)).code == 0, names


def test_each_heading_of_the_page_and_the_terminal_is_accepted_as_a_column(call: Call):
    page = call("report", SPACE, "--format", "html").out
    names = {*re.findall(r'<th scope="col"[^>]*>([^<]+)</th>', page)}
    assert {"lora.rank", "outcome", "trial", "exact p", "photo"} <= names
    shown = call("report", SPACE).out.splitlines()[1].split()
    assert shown[0] == "rank"
    for name in {*names, shown[0]}:
        assert call("report", SPACE, "--columns", name).code == 0, name


@pytest.mark.parametrize("names", ["mean,lora.rank", "rank,detectable", "n of A,space_b"])
def test_columns_that_cannot_be_chosen_add_nothing(call: Call, names):
    usual = call("report", SPACE, "--format", "markdown").out
    assert "| MB sent |" in usual
    assert call("report", SPACE, "--columns", names, "--format", "markdown").out == usual


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--format", "latx"),
         "`--format` must be terminal, json, markdown, csv, parquet, latex or html, but it is `latx`; did you mean "
         "`latex`?"),
        (("--columns", "worst_domian"),
         "`--columns` lists `worst_domian`, which is not a column; did you mean `worst_domain` or `worst_client` or "
         "`accuracy/worst_domain`?"),
        (("--columns", "loss/train"), "`--columns` lists `loss/train`, which is not a column"),
        (("--columns", "seconds,seconds"), "`--columns` lists `seconds` twice."),
        (("--columns", "rounds_to=soon"),
         "`--columns` needs a number after `rounds_to=`, as in `rounds_to=0.7`, but it contains `rounds_to=soon`."),
    ],
)  # fmt: skip
def test_a_wrong_report_is_rejected(refused: Refused, sweeps, words, sentence):
    assert refused("report", SPACE, *words).startswith(sentence)
    assert not (sweeps[1] / "report").exists()


def test_files_that_cannot_be_written_or_read_are_one_error_message(refused: Refused, sweeps):
    (sweeps[1] / "report").write_text("no folder")
    assert refused("report", SPACE) == (
        "the report cannot be written to mlruns/sweeps/ablations/lora_rank/s2/report: File exists."
    )
    damaged = next((sweeps[0] / "trials").iterdir()) / "checkpoint.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:20])
    assert refused("report", SPACE, "--sweep", "s1").startswith(f"{damaged} is damaged or an incomplete copy: ")
    (sweeps[0] / "sweep.json").write_text("{")
    assert refused("report", SPACE, "--sweep", "s1").startswith(f"{sweeps[0] / 'sweep.json'} is not valid JSON: ")


def test_a_damaged_sweep_is_one_warning_unless_it_is_asked_for(call: Call, refused: Refused, sweeps, tmp_path: Path):
    other = record(tmp_path / "mlruns", "s9", ONE, "other") / "sweep.json"
    other.write_text("")
    answer = call("report", SPACE)
    assert answer.code == 0
    assert answer.out.startswith(SPACE)
    assert [line for line in answer.err.splitlines() if "warning" in line] == [
        f"fedsweep: warning: a sweep of other is left out: {other} is not valid JSON: Expecting value: line 1 column 1 "
        "(char 0); use the version of fedsweep that wrote it, restore it from a backup, or delete the sweep's folder "
        f"{other.parent}."
    ]
    for words in (("report", "other"), ("report", "s9"), ("compare", "other@s9", SPACE)):
        assert refused(*words).startswith(f"{other} is not valid JSON: "), words


def test_columns_of_a_search_space_are_used_in_its_report_and_checked(refused: Refused):
    text = GRID + "\ncolumns: [worst_domain, megbytes_up]\n"
    write("search_spaces", "mine", text)
    assert without_place(refused("tune", "mine")) == (
        "`columns` lists `megbytes_up`, which is not a column; did you mean `megabytes_up` or "
        "`megabytes` or `bytes/up`?"
    )
    assert refused("tune", SPACE, "--columns", "bytes").startswith(
        f"search space {SPACE}: `columns` lists `bytes`, which is not a column"
    )


def test_two_sweeps_are_compared_by_the_arms_that_both_have(call: Call):
    found = pd.read_csv(io.StringIO(call("compare", f"{SPACE}@s1", f"{SPACE}@s2", "--format", "csv").out))
    assert found[["arm_a", "arm_b", "sweep_a", "sweep_b", "n_common"]].values.tolist() == [
        ["lora.rank=4", "lora.rank=4", "s1", "s2", 3],
        ["lora.rank=8", "lora.rank=8", "s1", "s2", 3],
    ]
    assert found["difference"].tolist() == pytest.approx([0.17 / 3, 0.0])
    assert found["verdict"].tolist() == ["no detectable difference"] * 2


@pytest.mark.parametrize("name", ["lora.rank=8", "lora.rank=8.0", "lora.rank 8", "rank 8", "rank 8 (baseline)"])
def test_an_arm_is_compared_by_each_of_its_printed_names(call: Call, name):
    usual = call("compare", f"{SPACE}@s2:lora.rank=8", f"{SPACE}@s2:lora.rank=16").out
    assert call("compare", f"s2:{name}", f"{SPACE}@s2:rank 16").out == usual


def test_two_arms_are_compared_by_the_statistics_of_the_report(call: Call, tmp_path: Path):
    found = pd.read_csv(
        io.StringIO(call("compare", f"{SPACE}@s2:lora.rank=8", f"{SPACE}@s2:lora.rank=16", "--format", "csv").out)
    )
    pair = [one for one in OTHER.records if one.plan.arm != {"lora.rank": 4}]
    made = write_report(make_manifest(), pair, tmp_path / "pair")
    (row,) = [row for _, row in pd.read_csv(made.folder / "table.csv").iterrows() if row["lora.rank"] == 16]
    for name in ("difference", "interval_low", "interval_high", "p", "effect"):
        assert found[name][0] == row[name], name
    assert found["p_bonferroni"][0] == pytest.approx(3 * row["p"])  # one of three pairs was picked


@pytest.mark.parametrize("format", ["terminal", "markdown"])
def test_a_comparison_prints_findings_and_differing_hyperparameters(call: Call, format):
    said = " ".join(
        call("compare", f"{SPACE}@s1:lora.rank=4", f"{SPACE}@s2:lora.rank=16", "--format", format).out.split()
    )
    assert "lora.rank=4 / lora.rank=16, B against A: +20.67 points" in said
    assert f"A: {SPACE}, sweep s1, experiment fedra_digits. B: {SPACE}, sweep s2" in said
    assert "Differences are B minus A." in said


@pytest.mark.parametrize("width", [50, 60, 80, 100, 140])
def test_no_number_of_a_comparison_is_truncated_at_any_width(call: Call, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    said = call("compare", f"{SPACE}@s1", f"{SPACE}@s2").out
    assert max(map(len, said.splitlines())) <= width
    assert "…" not in said
    table = said[: said.index("B against A")]
    assert all(number in table for number in ("50.33", "56.00", "+5.67", "60.00", "+0.00"))
    assert ("Columns that do not fit: " in " ".join(said.split())) == ("bootstrap" not in table)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((SPACE, "ablations/lora_rnak"),
         "there is no sweep of ablations/lora_rnak in mlruns; did you mean `ablations/lora_rank`?"),
        ((f"{SPACE}@s1", f"{SPACE}@s1"), "`ablations/lora_rank@s1` and `ablations/lora_rank@s1` must be "
         "different sweeps or arms, but they are the same."),
        ((f"{SPACE}@s1", f"{SPACE}@s3"), "there is no sweep `s3` of ablations/lora_rank in mlruns"),
        ((f"{SPACE}:lora.rank=4", SPACE),
         "`ablations/lora_rank:lora.rank=4` and `ablations/lora_rank` must both name an arm, or both name a sweep."),
        ((f"{SPACE}:lora.rank=5", f"{SPACE}:lora.rank=4"),
         "`ablations/lora_rank:lora.rank=5` must name one arm by its values, but no arm has these values. The arms "
         "are: lora.rank=4; lora.rank=8; lora.rank=16."),
        ((f"{SPACE}@s1", f"{SPACE}@s2", "--format", "latex"),
         "`--format` must be terminal, json, markdown or csv, but it is `latex`."),
    ],
)  # fmt: skip
def test_a_wrong_comparison_is_rejected(refused: Refused, tmp_path, words, sentence):
    assert refused("compare", *words).replace(str(tmp_path / "mlruns"), "mlruns").startswith(sentence)
