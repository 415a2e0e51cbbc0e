"""The table of rounds that `fedsweep run` prints."""

from fedsweep.history import RoundRecord
from fedsweep.terminal import RoundTable

METRICS = ["accuracy/mean", "accuracy/worst_domain", "accuracy/domain/sketch", "accuracy/domain/art_painting"]


def test_columns_stand_under_whole_headings(capsys):
    with RoundTable(1, ["sketch", "art_painting"], as_json=False) as table:
        table.add(RoundRecord(0, dict.fromkeys(METRICS, 0.5), 1.0))
        table.add(RoundRecord(1, dict.fromkeys(METRICS, 1.0) | {"loss/train": 0.25}, 1.0))
    headings, untuned, first = capsys.readouterr().out.splitlines()
    assert headings.split("  ")[-2:] == ["art_painting", "train loss"]
    assert len(headings) == len(untuned) == len(first)
    assert untuned.split() == ["0", *["50.00%"] * 4]
    assert first.split() == ["1", *["100.00%"] * 4, "0.2500"]
