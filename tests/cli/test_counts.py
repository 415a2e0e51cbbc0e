"""Counts as a person reads them: every number whole, in any terminal."""

import json
import re

import pytest

from fedsweep.plain import read_yaml
from tests.cli.conftest import ROOT, Call

GOLDEN = json.loads((ROOT / "tests" / "golden" / "counts.json").read_text())
FEDMS = {
    149_774_337,  # CLIP with its adapters
    GOLDEN["fedms"]["clip_vit_b16"],
    GOLDEN["fedms"]["gate"],
    GOLDEN["fedms"]["gate_adapter"],
    GOLDEN["fedms"]["two_experts_and_gate"],
    GOLDEN["fedms"]["lora_r1_mlp"],
    GOLDEN["fedms"]["lora_r1_mlp"] + GOLDEN["fedms"]["gate_adapter"],
}
FEDBRICK = {86_391_652, 59_612_692, 24_576, 1_087_688}


@pytest.mark.parametrize("columns", [60, 80, 120, 300])
@pytest.mark.parametrize(("space", "numbers"), [("papers/fedms/table1", FEDMS), ("papers/fedbrick/table3", FEDBRICK)])
def test_no_number_is_cut_off_however_narrow_the_terminal(call: Call, monkeypatch, space, numbers, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    answer = call("tune", space)
    assert (answer.code, answer.err) == (0, "")
    shown = set(re.findall(r"[\d,.]+[MK]?", answer.out))
    assert {f"{number:,}" for number in numbers} <= shown
    assert "…" not in answer.out
    assert max(map(len, answer.out.splitlines())) <= max(columns, 80)


def test_many_arms_stand_in_as_many_tables_as_it_takes(call: Call, tmp_path):
    """Each arm's numbers once, under its own name."""
    space = read_yaml(ROOT / "search_spaces" / "papers" / "fedms" / "table1.yaml")
    path = tmp_path / "search_spaces" / "ranks.yaml"
    path.parent.mkdir()
    kept = {name: value for name, value in space.items() if name not in ("reference", "space", "baseline")}
    ranks = list(range(1, 21))
    path.write_text(json.dumps({**kept, "space": {"lora.rank": {"grid": ranks}}, "baseline": {"lora.rank": 1}}))
    answer = call("show", "ranks")
    assert (answer.code, answer.err) == (0, "")
    heads = [head for line in answer.out.splitlines() if "│ parameters" in line for head in line.split("│")[2:-1]]
    assert [head.strip() for head in heads] == [f"lora.rank={rank}" for rank in ranks]
    sizes = [size for line in answer.out.splitlines() if "lora per block" in line for size in line.split("│")[2:-1]]
    assert [int(size.replace(",", "")) for size in sizes] == [12_800 * rank for rank in ranks]
