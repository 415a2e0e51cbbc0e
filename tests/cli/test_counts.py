"""The tables of parameter counts, in which no number is truncated at any width of the terminal."""

import json
import re
from collections.abc import Callable

import pytest

from fedsweep.common.yaml_values import read_yaml
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


@pytest.mark.parametrize(
    ("space", "numbers", "columns"),
    [("papers/fedms/table1", FEDMS, 60), ("papers/fedms/table1", FEDMS, 120), ("papers/fedbrick/table3", FEDBRICK, 60)],
)
def test_no_number_is_truncated_in_a_narrow_terminal(call: Call, tmp_path, monkeypatch, space, numbers, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    answer = call("tune", space)
    assert (answer.code, answer.err) == (0, "")
    shown = set(re.findall(r"[\d,.]+[MK]?", answer.out))
    assert {f"{number:,}" for number in numbers} <= shown
    assert "…" not in answer.out
    assert max(map(len, answer.out.splitlines())) <= max(columns, 80)
    assert list(tmp_path.iterdir()) == []  # nothing is recorded


@pytest.fixture
def counting(call: Call, tmp_path) -> Callable[[str, list], str]:
    """Return a function that prints CLIP's parameter counts for a grid over the given values of one hyperparameter."""
    space = read_yaml(ROOT / "search_spaces" / "papers" / "fedms" / "table1.yaml")
    kept = {name: value for name, value in space.items() if name not in ("reference", "space", "baseline")}

    def shown(name: str, values: list) -> str:
        path = tmp_path / "search_spaces" / "mine.yaml"
        path.parent.mkdir()
        path.write_text(json.dumps({**kept, "space": {name: {"grid": values}}, "baseline": {name: values[0]}}))
        answer = call("show", "mine")
        assert (answer.code, answer.err) == (0, "")
        return answer.out

    return shown


def test_long_names_of_arms_truncate_no_number(counting, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    prompts = [
        f"{kind} picture that someone has taken of a large or a small {{}}" for kind in ("A", "No", "The", "One")
    ]
    shown = counting("backbone.prompt", prompts)
    assert len(re.findall(r"\b149,774,337\b", shown)) == 8  # twice per arm: the model, and the client in stage 1
    assert max(map(len, shown.splitlines())) <= 80
    assert all(line[-1] in "╮│┤╯" for line in shown.splitlines() if line.startswith(("╭", "│", "├", "╰")))


def test_many_arms_are_split_over_several_tables(counting, monkeypatch):
    """The numbers of each arm appear once, below the name of the arm."""
    monkeypatch.setenv("COLUMNS", "80")
    ranks = list(range(1, 7))
    shown = counting("lora.rank", ranks)
    heads = [head for line in shown.splitlines() if "│ parameters" in line for head in line.split("│")[2:-1]]
    assert shown.count("│ parameters") > 1
    assert [head.strip() for head in heads] == [f"lora.rank={rank}" for rank in ranks]
    sizes = [size for line in shown.splitlines() if "lora per block" in line for size in line.split("│")[2:-1]]
    assert [int(size.replace(",", "")) for size in sizes] == [12_800 * rank for rank in ranks]
