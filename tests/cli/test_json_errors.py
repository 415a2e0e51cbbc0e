"""The mistakes in the JSON document of a command that ends with an error."""

import json
from typing import Any

import pytest

from fedsweep.cli import json_output
from fedsweep.cli.json_errors import MISTAKE, mistakes
from fedsweep.common.errors import with_all_mistakes
from tests.cli.conftest import GRID, Call, write
from tests.cli.test_report import ONE, SPACE, record

NOTHING: dict[str, Any] = dict.fromkeys(("file", "line", "column", "where", "name", "value"), None) | {"near": []}
SENTENCES: dict[str, dict[str, Any]] = {
    "there is no search space `mine/rnk`; did you mean `mine/rank`?": {
        "name": "mine/rnk",
        "rule": "there is no search space `mine/rnk`",
        "near": ["mine/rank"],
    },
    "a/bad.yaml:4:28: arm lora.rank=-8: `lora.rank` must be greater than 0, but it is -8.": {
        "file": "a/bad.yaml",
        "line": 4,
        "column": 28,
        "where": "arm lora.rank=-8",
        "name": "lora.rank",
        "rule": "`lora.rank` must be greater than 0",
        "value": -8,
    },
    "search space a: `seeds` must be distinct and not negative, but they are [0, 0].": {
        "where": "search space a",
        "name": "seeds",
        "rule": "`seeds` must be distinct and not negative",
        "value": [0, 0],
    },
    "`method.name` must be one of fedra, fedag, but it is `fedraa`; did you mean `fedra` or `fedag`?": {
        "name": "method.name",
        "rule": "`method.name` must be one of fedra, fedag",
        "value": "fedraa",
        "near": ["fedra", "fedag"],
    },
    "there is no sweep of a/rnk in /tmp/mlruns; did you mean `a/rank`?": {
        "name": "a/rnk",
        "rule": "there is no sweep of a/rnk in /tmp/mlruns",
        "near": ["a/rank"],
    },
    "no process is running sweep a/rank@20261128-105306-ed73.": {
        "name": "a/rank@20261128-105306-ed73",
        "rule": "no process is running sweep a/rank@20261128-105306-ed73",
    },
    "`subsets` all needs components in `ablate`, but there are none.": {
        "name": "subsets",
        "rule": "`subsets` all needs components in `ablate`, but there are none",
    },
    "the results folder /proc/x cannot be written: No such file or directory.": {
        "name": "/proc/x",
        "rule": "the results folder /proc/x cannot be written: No such file or directory",
    },
    "no such command 'tun'; did you mean 'tune', 'run'?": {
        "name": "tun",
        "rule": "no such command 'tun'",
        "near": ["tune", "run"],
    },
}
"""Error messages, and the parts of the mistakes that they state."""


@pytest.mark.parametrize("sentence", SENTENCES)
def test_an_error_message_is_taken_apart(sentence):
    (found,) = mistakes(sentence)
    assert found.keys() == MISTAKE.keys()
    assert sentence.endswith(found.pop("sentence"))
    assert found == NOTHING | SENTENCES[sentence]


def test_each_of_several_mistakes_has_its_own_parts():
    where = "search space a"
    message = with_all_mistakes(where, [f"{where}: `seeds` is missing.", "a.yaml:3:2: arm full: `lora.rank` is wrong."])
    found = mistakes(message)
    assert [(one["where"], one["file"], one["name"]) for one in found] == [
        (where, None, "seeds"),
        ("arm full", "a.yaml", "lora.rank"),
    ]


def test_the_errors_of_commands_name_the_command_and_their_mistakes(call: Call, tmp_path):
    write("search_spaces", "mine", GRID)
    write("search_spaces", "bad", GRID, ("lora.rank: {", "lora.rnk: {"))
    record(tmp_path / "mlruns", "s1", ONE)
    asked: dict[tuple[str, ...], tuple[str | None, str, Any, str | None]] = {
        ("tune", "mime"): ("tune", "mime", None, "mine"),
        ("tune", "bad"): ("tune", "lora.rnk", None, "lora.rank"),
        ("tune", "mine", "lora.dropout=2"): ("tune", "lora.dropout", 2, None),
        ("tune", "mine", "--seeds", "0,a"): ("tune", "--seeds", "0,a", None),
        ("tune", "mine", "--at-once", "0"): ("tune", "--at-once", "0", None),
        ("tune", "mine", "--at-once=0"): ("tune", "--at-once", "0", None),
        ("report", "ablations/lora_rnk"): ("report", "ablations/lora_rnk", None, SPACE),
        ("list", "methods", "--formt", "json"): ("list", "--formt", None, "--format"),
        ("data", "show", "--formt"): ("data show", "--formt", None, "--format"),
        ("tun",): (None, "tun", None, "tune"),
    }
    for words, (command, name, value, close) in asked.items():
        answer = call(*words, "--format", "json")
        found = json.loads(answer.out)
        assert answer.code == 2, words
        assert found.keys() == {"format", *json_output.ERROR}
        assert found["command"] == command, words
        (one,) = found["mistakes"]
        assert (one["name"], one["value"]) == (name, value), words
        assert close is None or close in one["near"], words


def test_an_error_in_a_file_has_a_place(call: Call):
    path = write("search_spaces", "bad", GRID, ("lora.rank: {", "lora.rnk: {"))
    (one,) = json.loads(call("tune", "bad", "--format", "json").out)["mistakes"]
    line = path.read_text().splitlines()[one["line"] - 1]
    assert line[one["column"] - 1 :].startswith("lora.rnk")
    assert path.samefile(one["file"])


def test_only_invalid_input_has_mistakes(capsys):
    json_output.error("the command was interrupted.", 130, ["tune", "mine"])
    found = json.loads(capsys.readouterr().out)
    assert (found["command"], found["mistakes"]) == ("tune", [])
