"""The formats CSV, Parquet, LaTeX, Markdown and terminal, which show the same values."""

import csv
import io
import re
import shutil
import subprocess

import pandas as pd
import pyarrow.parquet as pq
import pytest

from fedsweep.report.formats import data_frame
from fedsweep.report.formats.latex import PREAMBLE, latex
from fedsweep.results import SweepManifest
from fedsweep.results.arms import Reference, ReferenceArm
from tests.report.helpers import printed, tabulate
from tests.report.test_held_out import COMPONENTS, components

PDFLATEX = shutil.which("pdflatex")
PAPER = Reference(source="FedMS, Fig. 9", arms=(ReferenceArm(arm={"lora.rank": 4}, values={"accuracy/mean": 54.73}),))
COLUMNS = ("worst_domain", "megabytes_up", "megabytes_down", "rounds_to=0.5", "loss/test", "parameters_trained")


@pytest.fixture
def ablation(trials):
    trials.arms({4: [0.5010, 0.5220, 0.4915], 8: [0.6012, 0.6204, 0.5921], 16: [0.61, 0.6137, 0.60]})
    trials.add(32, 0, [0.2, 0.3], "pruned")
    return trials


def _empty(value: object) -> bool:
    return value is None or value != value


@pytest.mark.parametrize("columns", [(), COLUMNS])
def test_parquet_and_csv_are_the_same_numbers(manifest, ablation, columns):
    table = tabulate(manifest, ablation, columns=columns, reference=PAPER)
    stored = pq.read_table(io.BytesIO(data_frame.parquet(table)))
    read = list(csv.DictReader(io.StringIO(data_frame.csv(table))))
    assert list(read[0]) == stored.column_names
    assert len(read) == stored.num_rows == 4
    for row, other in zip(read, stored.to_pylist(), strict=True):
        for name, cell in row.items():
            value = other[name]
            shown = "" if _empty(value) else str(value)
            assert cell == shown or float(cell) == value, name
    assert SweepManifest.model_validate_json(stored.schema.metadata[b"fedsweep.manifest"]) == table.manifest


def test_the_table_shows_the_rounded_csv_values(manifest, ablation):
    table = tabulate(manifest, ablation, columns=COLUMNS)
    numbers = data_frame.data_frame(table).to_dict("records")
    said = re.sub(r"\s+", " ", printed(table, 220))
    for row, record in zip(table.cells(), numbers, strict=True):
        if row["mean"] == "-":
            assert pd.isna(record["mean"])
            continue
        assert row["mean"] == f"{100 * record['mean']:.2f}"
        assert row["sd"] == f"{100 * record['sd']:.2f}"
        assert row["worst domain"] == f"{100 * record['worst_domain_accuracy']:.2f} {record['worst_domain']}"
        assert float(row["MB up"]) == pytest.approx(record["megabytes_up"], abs=5e-4)
        assert " ".join(row.values()) in said
        assert f"| {' | '.join(row.values())} |" in table.markdown()


@pytest.mark.parametrize("seeds", [3, 7])
def test_csv_and_parquet_have_an_exact_p_only_if_the_text_has_one(manifest, trials, seeds):
    trials.arms({4: [0.5 + seed / 90 for seed in range(seeds)], 8: [0.5] * seeds, 2: [0.5] * seeds})
    table = tabulate(manifest, trials, seeds=tuple(range(seeds)))
    read = list(csv.DictReader(io.StringIO(data_frame.csv(table))))
    stored = pq.read_table(io.BytesIO(data_frame.parquet(table))).to_pylist()
    comparisons = next(one for one in table.sections if one.title.startswith("Comparisons"))
    for name in ("p_exact", "p_exact_holm"):
        assert [row[name] != "" for row in read] == [not _empty(row[name]) for row in stored]
    shown = [row[comparisons.head.index("exact p")] != "-" for row in comparisons.rows]
    assert [row["p_exact_holm"] != "" for row in read] == shown == [seeds == 7, seeds == 7, False]


def test_requested_columns_replace_the_default_columns(manifest, ablation):
    head = list(tabulate(manifest, ablation, columns=COLUMNS).cells()[0])
    assert head[-7:] == ["worst domain", "MB up", "MB down", "rounds to 50%", "loss/test", "trained parameters", "note"]
    assert "MB sent" not in head


@pytest.mark.parametrize("width", [60, 80, 200])
def test_requested_columns_are_printed_and_explained_at_any_width(manifest, ablation, width):
    table = tabulate(manifest, ablation, columns=COLUMNS)
    said = printed(table, width)
    assert max(map(len, said.splitlines())) <= width
    said = re.sub(r"\s+", " ", said)
    for heading in list(table.cells()[0])[-7:-1]:
        assert said.count(heading) >= 2, heading  # above its numbers and in the legend
        explained = [sentence for sentence in table.caption() if heading.lower() in sentence.lower()]
        assert [sentence.startswith("Other columns") for sentence in explained] == [True], heading  # explained once
    for row in table.cells():
        assert all(cell in said for cell in row.values())
    assert "mb sent" not in said.lower()  # a default column


def test_rounds_to_a_target_have_no_mean_if_a_seed_never_reaches_it(manifest, ablation):
    table = tabulate(manifest, ablation, columns=("rounds_to=0.52",))
    four, eight, *_ = table.cells()
    assert (four["rounds to 52%"], eight["rounds to 52%"]) == ("by 1 of 3", "4.0")
    assert data_frame.data_frame(table)["rounds_to=0.52"].isna().tolist() == [True, False, False, True]
    assert data_frame.data_frame(table)["rounds_to=0.52_seeds"].tolist() == [1, 3, 3, 0]


def test_parquet_distinguishes_values_of_different_types(manifest, trials):
    for seed, value in enumerate([1, True, "1", None, [1, 2], {"name": "a"}]):
        trials.add({"x": value}, seed, [0.1, 0.2])
    sweep = manifest(baseline=None, varied=("x",))
    table = tabulate(sweep, trials)
    stored = pq.read_table(io.BytesIO(data_frame.parquet(table)))["x"].to_pylist()
    assert len({str(value) for value in stored}) == 6


def test_values_of_a_paper_are_grey_and_detectable_differences_have_an_asterisk(manifest, ablation):
    text = latex(tabulate(manifest, ablation, reference=PAPER))
    assert r"\textcolor{gray}{54.73}" in text
    assert r"$-9.97$\rlap{$^*$}" in text
    assert r"[$-10.26$, $-9.68$]" in text
    assert text.index(r"\toprule") < text.index(r"\midrule") < text.index(r"\bottomrule")


def test_values_of_arms_are_not_formatted_as_numbers_of_the_table(manifest, trials):
    """LaTeX would read `[3]` after a line break as a length, and a prompt may contain `to`."""
    for seed in range(3):
        trials.add({"depths": [3], "prompt": "a to b to c"}, seed, [0.2, 0.3 + seed / 100])
        trials.add({"depths": [12], "prompt": "+1 photo"}, seed, [0.2, 0.4])
    text = latex(tabulate(manifest, trials, varied=("depths", "prompt"), baseline={"depths": [12]}))
    assert "\n{[}3{]} & a to b to c & 3 & " in text
    assert " & +1 photo & 3 & " in text


NASTY = {"method": 'a_b & 50% #1 {x} ~ ^ \\ $ <y> | "q" \N{MULTIPLICATION SIGN} \N{MIDDLE DOT}'}


@pytest.mark.skipif(PDFLATEX is None, reason="pdflatex is not installed")
@pytest.mark.slow
def test_latex_compiles_with_any_arm_names_and_fits_on_the_page(manifest, trials, ablation, tmp_path):
    tables = [
        latex(tabulate(manifest, ablation)),
        latex(tabulate(manifest, ablation, reference=PAPER)),
        latex(tabulate(manifest, ablation, columns=COLUMNS)),
    ]
    trials.records.clear()
    for seed in range(3):
        trials.add({"depths": [3, 4]}, seed, [0.2, 0.3 + seed / 100])
        trials.add({"depths": "*"}, seed, [0.2, 0.4])
    tables.append(latex(tabulate(manifest, trials, varied=("depths",), baseline={"depths": "*"})))
    trials.records.clear()
    for seed in range(3):
        trials.add(NASTY, seed, [0.2, 0.3 + seed / 100])
        trials.add({"method": "plain"}, seed, [0.2, 0.4])
    tables.append(latex(tabulate(manifest, trials, varied=("method",), baseline={"method": "plain"})))
    trials.records.clear()
    held_out = tabulate(manifest, components(trials, COMPONENTS), varied=("without",), baseline={"without": "nothing"})
    assert held_out.by_mean
    tables.append(latex(held_out))
    body = "\n".join(tables)
    document = rf"\documentclass{{article}}{PREAMBLE}\begin{{document}}{body}\end{{document}}"
    (tmp_path / "all.tex").write_text(document)
    command = [str(PDFLATEX), "-halt-on-error", "-interaction=nonstopmode", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "all.pdf").stat().st_size > 20_000
    assert "Overfull" not in (tmp_path / "all.log").read_text(errors="replace")
