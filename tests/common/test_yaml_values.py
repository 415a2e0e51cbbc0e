"""The values of YAML files and overrides, which are read by the rules of YAML 1.2 instead of PyYAML's 1.1."""

import math

import pytest

from fedsweep.common import yaml_values
from fedsweep.common.errors import UserError, near
from fedsweep.common.yaml_values import parse_overrides, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("1e3", 1000.0), ("-2.5E+1", -25.0), (".5", 0.5), ("5.", 5.0), ("+1", 1), ("-0", 0),
        ("010", 10), ("08", 8), ("0", 0), ("12", 12), (".inf", math.inf), ("-.inf", -math.inf), ("true", True),
        ("True", True), ("FALSE", False), ("null", None), ("~", None), ("", None), ("no", "no"), ("off", "off"),
        ("Yes", "Yes"), ("tRue", "tRue"),
        ("y", "y"), ("0x10", "0x10"), ("1_000", "1_000"), ("12:30", "12:30"), ("2020-01-01", "2020-01-01"),
        ("1e", "1e"), ("'1e-3'", "1e-3"), ("e5", "e5"), (".", "."), ("[12, 1e-1, no]", [12, 0.1, "no"]),
    ],
)  # fmt: skip
def test_values_are_read_by_the_rules_of_yaml_1_2(text, value):
    read = parse_yaml(f"key: {text}", "test")["key"]
    assert read == value
    assert type(read) is type(value)


def test_nan_is_a_float():
    assert math.isnan(parse_yaml(".nan", "test"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb: 2\na: 3", "runs.yaml: the key `a` occurs in line 1 and in line 3."),
        ("x:\n  a: 1\n  a: 1", "runs.yaml: the key `a` occurs in line 2 and in line 3."),
        ("{a: 1, 'a': 2}", "runs.yaml: the key `a` occurs twice in line 1."),
        (
            "a: 1\nb: [1",
            "runs.yaml is not valid YAML at line 2, column 6: expected ',' or ']', but got '<stream end>'.",
        ),
        (
            "a:\n\tb: 1",
            "runs.yaml is not valid YAML at line 2, column 1: found character '\\t' that cannot start any token.",
        ),
        ("a: 1\nb: *c", "runs.yaml is not valid YAML at line 2, column 4: found undefined alias 'c'."),
        ("[1]: 2", "runs.yaml is not valid YAML at line 1, column 1: a key must be a plain name."),
        ("a: !!int x", "runs.yaml is not valid YAML at line 1, column 4: invalid literal for int() with base 10: 'x'."),
        (
            "a: \x00",
            "runs.yaml is not valid YAML at line 1, column 4: unacceptable character #x0000: special characters are "
            'not allowed in "<unicode string>", position 3.',
        ),
        (
            "a: !!python/name:os.system",
            "runs.yaml is not valid YAML at line 1, column 4: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system'.",
        ),
    ],
)
def test_the_error_for_invalid_yaml_has_the_line(text, sentence):
    with pytest.raises(UserError) as refusal:
        parse_yaml(text, "runs.yaml")
    assert str(refusal.value) == sentence


def test_aliases_with_too_many_values_are_rejected():
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
    with pytest.raises(
        UserError, match=r"^runs\.yaml: there must be at most 100,000 values after the aliases \(`\*`\) are expanded"
    ):
        parse_yaml("\n".join(lines), "runs.yaml")
    shared = f"text: &text {'x' * 500}\nmany: [{', '.join(['*text'] * 3000)}]"
    with pytest.raises(UserError, match=r"^runs\.yaml: there must be at most 1,000,000 characters after the aliases"):
        parse_yaml(shared, "runs.yaml")
    assert parse_yaml("\n".join(lines[:3]), "x")["a2"] == [[["x", "x"]] * 2] * 2


@pytest.mark.parametrize(
    ("name", "accepted", "rejected"),
    [("MOST_VALUES", "[x, x]", "[x, x, x]"), ("MOST_CHARACTERS", "[a, bc]", "[ab, cd]")],
)
def test_the_largest_allowed_size_is_accepted(monkeypatch, name, accepted, rejected):
    monkeypatch.setattr(yaml_values, name, 3)  # a list counts as a value
    assert parse_yaml(accepted, "runs.yaml") == accepted.strip("[]").split(", ")
    with pytest.raises(UserError, match="must be at most 3 "):
        parse_yaml(rejected, "runs.yaml")


MAPPING = "the file must contain a mapping of names to values, but it"
TAG = "the file is not valid YAML: a tag (`!!`) does not match the value after it."


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"# only a comment\n", f"{{}}:1:1: {MAPPING} is empty."),
        (b"\n- a\n- b\n", f"{{}}:2:1: {MAPPING} contains a value of type list."),
        (b"hello\n", f"{{}}:1:1: {MAPPING} contains a value of type str."),
        (b'name: "\xe9"\n', "{} cannot be read: it is not UTF-8 text (byte 7)."),
        ("name: 1".encode("utf-16-le"), "{}:1:2: the file is not valid YAML: unacceptable character #x0000: special "
         'characters are not allowed in "<unicode string>", position 1.'),
        (b"a: 1\nb: [1, 2\nc: 3\n", "{}:3:2: the file is not valid YAML: expected ',' or ']', but got ':'."),
        (b"a: 1\n---\nb: 1\n", "{}:2:1: the file is not valid YAML: but found another document."),
        (b"a: 1\nb: 1" + b"0" * 400, "{}:2:4: the file is not valid YAML: an integer of 401 digits is too long."),
        (b"[" * 700, "{}:1:1: the file is not valid YAML: its brackets are nested too deeply."),
        (b"a: !!bool maybe\n", f"{{}}:1:4: {TAG}"),
        (b"a: !!timestamp soon\n", f"{{}}:1:4: {TAG}"),
    ],
)  # fmt: skip
def test_a_file_without_a_mapping_is_rejected(tmp_path, content, sentence):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as refusal:
        read_yaml(path)
    assert str(refusal.value) == sentence.format(path)


def test_the_error_names_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"^.*missing\.yaml cannot be read: No such file or directory\."):
        read_yaml(tmp_path / "missing.yaml")


def test_overrides_are_names_with_yaml_values():
    words = ["federation.rounds=5", "optimizer.lr=1e-3", "federation.depths=[12, 6]", "lora.alpha=null", "method=fedra",
             "name=a=b"]  # fmt: skip
    assert parse_overrides(words) == {
        "federation.rounds": 5, "optimizer.lr": 0.001, "federation.depths": [12, 6], "lora.alpha": None,
        "method": "fedra", "name": "a=b",
    }  # fmt: skip
    assert parse_overrides([]) == {}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["seed"], "an override must have the form NAME=VALUE, as in `federation.rounds=5`, but it is `seed`."),
        (["=5"], "an override must have the form NAME=VALUE, as in `federation.rounds=5`, but it is `=5`."),
        (["seed=1", "seed=1"], "the override `seed` is given twice."),
        (
            ["a=[1"],
            "the override `a=[1` is not valid YAML at line 1, column 3: expected ',' or ']', but got '<stream end>'.",
        ),
    ],
)
def test_a_malformed_override_is_rejected(words, sentence):
    with pytest.raises(UserError) as refusal:
        parse_overrides(words)
    assert str(refusal.value) == sentence


def test_a_hint_contains_only_similar_names():
    assert near("federation.round", ["federation.rounds", "seed"]) == "; did you mean `federation.rounds`?"
    assert near("lora.rak", ["lora.rank", "lora.bank"]) == "; did you mean `lora.rank` or `lora.bank`?"
    assert near("x", ["federation.rounds"]) == near("x", []) == ""
