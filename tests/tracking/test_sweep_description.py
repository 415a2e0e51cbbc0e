"""The description of a sweep on MLflow's page."""

from pathlib import Path

import pytest

from fedsweep.tracking.sweep_description import LONGEST_NOTE, command_line, origin, shortened, sweep_note
from tests.tracking.helpers import MANIFEST

TABLE = (
    "# tiny, on experiment fedra_digits\n\n| lora.rank | n |\n| --- | --- |\n| 4 | 3 |\n\n- no detectable difference.\n"
)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    (tmp_path / "table.md").write_text(TABLE)
    return tmp_path


def test_a_note_has_the_question_the_table_the_findings_and_the_commands(report: Path) -> None:
    note = sweep_note(MANIFEST, "Does it matter?", report)
    assert note.startswith("Does it matter?\n\n| lora.rank | n |\n")
    assert "- no detectable difference.\n" in note
    for command in ("report tiny --sweep s1", "tune tiny --resume --sweep s1", "ui tiny --sweep s1"):
        assert f"\nfedsweep {command}\n" in note


def test_a_note_without_a_report_states_this(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        note = sweep_note(MANIFEST, "", folder)
        assert note.startswith("There is no report yet. Experiment: `fedra_digits`. Seeds: 1. Rounds per trial: 3.")


def test_a_long_table_is_cut_after_a_row_with_a_note(report: Path) -> None:
    rows = [f"| {number} | a long name of an arm |" for number in range(1000)]
    (report / "table.md").write_text("\n".join(["# title", *rows]))
    note = sweep_note(MANIFEST, "Why?", report)
    assert LONGEST_NOTE - 100 < len(note) <= LONGEST_NOTE
    assert "The whole table is in the artifact `report/table.md`." in note
    kept = [line for line in note.splitlines() if line.startswith("| ")]
    assert 100 < len(kept) < 1000
    assert kept == rows[: len(kept)]
    assert note.endswith("```")


@pytest.mark.parametrize("text", ["x" * 500, "a\n" * 300, "short"])
@pytest.mark.parametrize("longest", [200, 300])
def test_a_shortened_text_is_never_longer(text: str, longest: int) -> None:
    assert len(shortened(text, longest)) <= max(longest, len("short"))


def test_the_source_of_a_run_is_its_command_without_a_password() -> None:
    words = ["/bin/fedsweep", "tune", "x y", "--mlflow=https://ada:c/ret@host:81"]
    assert command_line(words) == "fedsweep tune 'x y' '--mlflow=https://***@host:81'"
    assert command_line(["/x/fedsweep/__main__.py", "list"]) == "fedsweep list"
    assert origin()["mlflow.source.type"] == "JOB", "of other sources, MLflow shows only what follows the last slash"
    assert origin()["mlflow.source.name"]
