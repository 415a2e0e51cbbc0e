"""The function `write_report`, which writes its files and returns the table, or raises an error of one sentence."""

import io

import pytest
from rich.console import Console

from fedsweep.common.errors import UserError
from fedsweep.report import write_report


def test_all_files_are_written_and_do_not_depend_on_the_order_of_trials(manifest, trials, tmp_path):
    trials.arms({4: [0.5, 0.52, 0.51], 8: [0.6, 0.63, 0.61]})
    made = write_report(manifest(), trials.records, tmp_path / "not" / "there")
    names = [f"{name}.{ending}" for name in ("curves", "domains", "forest", "heatmap") for ending in ("png", "svg")]
    tables = [f"table.{ending}" for ending in ("csv", "md", "parquet", "tex")]
    assert sorted(path.name for path in made.paths) == [*names, "report.html", *tables]
    assert set((tmp_path / "not" / "there").iterdir()) == set(made.paths)
    assert all(path.stat().st_size > 100 for path in made.paths)
    console = Console(file=io.StringIO(), width=100)
    console.print(made.renderable)
    assert "rank 4 against 8: " in console.file.getvalue()
    assert [one.n for one in made.arms] == [3, 3]
    back = write_report(manifest(), trials.records[::-1], tmp_path / "back")
    for one, other in zip(made.paths, back.paths, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_the_t_sne_figure_is_written_if_trials_have_one_and_otherwise_deleted(manifest, trials, tmp_path, tables):
    trials.arms({4: [0.5], 8: [0.6]})
    made = write_report(manifest(), tables(trials.records), tmp_path)
    assert made.figures[-1].name == "tsne"
    assert made.paths[-2:] == (tmp_path / "tsne.png", tmp_path / "tsne.svg")
    assert set(tmp_path.iterdir()) == {*made.paths, tmp_path / "tsne.csv"}
    again = write_report(manifest(), trials.records, tmp_path)
    assert made.paths == (*again.paths, tmp_path / "tsne.png", tmp_path / "tsne.svg")
    assert set(tmp_path.iterdir()) == {*again.paths, tmp_path / "tsne.csv"}


def test_without_any_round_the_error_is_one_sentence_and_no_file_is_written(manifest, trials, tmp_path):
    trials.add(4, 0, [], "failed")
    trials.add(8, 0, [], None)
    sentence = "nothing to report: no trial of sweep `20260101-a1` of ablations/lora_rank has recorded a round."
    for records in (trials.records, []):
        with pytest.raises(UserError) as error:
            write_report(manifest(), records, tmp_path / "report")
        assert str(error.value) == sentence
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("metric", ["loss/train", "accuracy/domain/photo"])
def test_a_sweep_with_only_round_zero_has_a_report(manifest, trials, tmp_path, metric):
    # The untuned model has no training loss. The report of a sweep that was stopped early must not fail.
    trials.add(8, 0, [0.2], None)
    write_report(manifest(metric=metric), trials.records, tmp_path)
    assert "unfinished at round 0" in (tmp_path / "table.md").read_text()
