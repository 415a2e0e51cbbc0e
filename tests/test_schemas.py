"""The JSON schemas for editors accept every shipped file, and reject common mistakes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from fedsweep.common.yaml_values import parse_yaml, read_yaml
from tests.scripts import SCRIPTS, load_script

ROOT = SCRIPTS.parent
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "schemas").glob("*.json"))}
VALIDATORS = {name: Draft7Validator(schema) for name, schema in SCHEMAS.items()}
FILES = sorted([*(ROOT / "experiments").rglob("*.yaml"), *(ROOT / "search_spaces").rglob("*.yaml")])
COMMENT = re.compile(r"# yaml-language-server: \$schema=(\S+)\n")


def schema_of(path: Path) -> str:
    """Return the name of the schema in the first line of a file."""
    found = COMMENT.match(path.read_text())
    assert found is not None, path
    schema = (path.parent / found[1]).resolve()
    assert schema.parent == ROOT / "schemas"
    return schema.stem


def faults(name: str, text: str) -> list[str]:
    return [one.json_path for one in VALIDATORS[name].iter_errors(parse_yaml(text, name))]


def test_the_schemas_are_valid_and_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    documents = load_script("json_schemas").documents()
    assert {path.name: path.read_text() for path in (ROOT / "schemas").iterdir()} == documents
    assert [*SCHEMAS] == ["experiment", "pretrain", "search_space"]
    for name, schema in SCHEMAS.items():
        Draft7Validator.check_schema(schema)
        assert len(documents[f"{name}.json"]) < 300_000


def test_every_shipped_file_is_valid():
    kinds = {"experiment": 0, "pretrain": 0, "search_space": 0}
    for path in FILES:
        name = schema_of(path)
        kinds[name] += 1
        assert [one.message for one in VALIDATORS[name].iter_errors(read_yaml(path))] == [], path
    assert kinds == {"experiment": 20, "pretrain": 2, "search_space": 191}  # a new file changes these counts


MISTAKES = {
    "experiment": [
        ("rank: 8", "rnk: 8"),
        ("rank: 8", "rank: eight"),
        ("rank: 8", "rank: 0"),
        ("name: fedra ", "name: fedrra "),
        ("name: fedra ", "title: fedra "),
        ("seed: 0", "lr: 0.1"),
        ("missing_layers: keep_previous", "missing_layers: keep"),
        ("name: digits_vit", "name: clip"),  # leaves out the required `model`
    ],
    "search_space": [
        ("lora.rank: {grid", "lora.rnk: {grid"),
        ("lora.rank: {grid: [1, 4, 8, 16]}", "lora.rank: {grid: [1, four]}"),
        ("lora.rank: {grid: [1, 4, 8, 16]}", "lora.rank: [1, 4]"),
        ("lora.rank: {grid: [1, 4, 8, 16]}", "lora.rank: {grd: [1, 4]}"),
        ("baseline: {lora.rank: 8}", "baseline: {lora.rnk: 8}"),
        ("search: {name: grid}", "search: {name: gird}"),
        ("search: {name: grid}", "search: gird"),
        ("search: {name: grid}", "search: {}"),
        ("experiment: fedra_digits", "experimnt: fedra_digits"),
        ("mode: max", "mode: most"),
        ("fixed:", "fixed:\n  lora.dropot: 0.1"),
        ("fixed:", "fixed:\n  lora.dropout: 2"),
        ("fixed:", "fixed:\n  method: fedrra"),
    ],
}
"""Changes of a valid file, each with one mistake, by schema."""
VALID = [
    ("experiment", "method:\n  name: fedra", "method: fedms #"),
    ("search_space", "search: {name: grid}", "search: grid"),
    ("search_space", "fixed:", "fixed:\n  method: all_small"),
    ("search_space", "fixed:", "fixed:\n  method: {name: fedms, global_rounds: 2}"),
    ("search_space", "fixed:", "ablate: {lora.patch_embed: off, lora.dropout: 0.0}\nfixed:"),
    ("search_space", "fixed:", "tune_each: {space: {optimizer.lr: {loguniform: [0.001, 0.1]}}}\nfixed:"),
    ("search_space", "  lora.rank: {", '  "lora.alpha, lora.scaling": {grid: [[1, null]]}\n  lora.rank: {'),
]
SOURCES = {"experiment": "experiments/fedra_digits.yaml", "search_space": "search_spaces/ablations/lora_rank.yaml"}


@pytest.mark.parametrize(
    ("name", "old", "new"), [(name, *one) for name, several in MISTAKES.items() for one in several]
)
def test_a_common_mistake_is_found(name, old, new):
    text = (ROOT / SOURCES[name]).read_text()
    assert text.count(old) == 1
    assert faults(name, text) == []
    assert faults(name, text.replace(old, new)) != []


@pytest.mark.parametrize(("name", "old", "new"), VALID)
def test_both_spellings_and_all_entries_are_valid(name, old, new):
    text = (ROOT / SOURCES[name]).read_text()
    assert text.count(old) == 1
    if name == "experiment":  # the rest of the mapping goes with the name
        text = re.sub(r"(?m)^  missing_layers:.*\n", "", text)
    assert faults(name, text.replace(old, new)) == []


def test_every_hyperparameter_has_a_description_in_a_search_space():
    names: dict[str, Any] = SCHEMAS["search_space"]["$defs"]["changes"]["properties"]
    assert {"lora.rank", "method", "method.name", "method.over.missing_layers", "optimizer.lr"} <= {*names}
    assert len(names) > 150
    described = [name for name in names if "description" in SCHEMAS["search_space"]["$defs"][name]]
    assert [name for name in names if name not in described and not name.endswith(".name")] == []
