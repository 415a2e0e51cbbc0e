"""Parsers for YAML files, JSON files and command-line overrides, and a function that makes class names readable."""

import json
import re
from collections.abc import Hashable
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from fedsweep.common.errors import UserError, one_line

LONGEST_NUMBER = 20
"""Maximum number of characters of an integer. Longer ones are typing errors, and other libraries reject them."""
MOST_VALUES, MOST_CHARACTERS = 100_000, 1_000_000
"""Maximum numbers of values and of characters in a file after its aliases are expanded, to limit memory use."""
Json = str | int | float | bool | None | list[Any] | dict[str, Any]


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads numbers and booleans by the rules of YAML 1.2, and rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain name", key_node.start_mark)
            if key in seen:
                problem = f"the key `{key}` occurs twice (line {key_node.start_mark.line + 1})"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# PyYAML follows YAML 1.1: `1e-3` is a string, `no` is False, `010` is 8, `<<` merges. Use the core schema of 1.2.
_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _starts in (
    ("null", r"^(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?[0-9]+$", list("-+0123456789")),
    ("float", r"^[-+]?((\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.inf|\.nan)$", list("-+0123456789.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), _starts)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > LONGEST_NUMBER:
        raise yaml.constructor.ConstructorError(
            None, None, f"an integer of {len(text)} digits is too long", node.start_mark
        )
    return int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text and return its values.

    Args:
        text: The YAML text.
        where: Origin of the text, such as a file. Error messages begin with it.

    Raises:
        UserError: The text is not valid YAML, repeats a key, or has too many values after its aliases are expanded.
    """
    try:
        data = yaml.load(text, Loader=_Loader)  # noqa: S506 (a subclass of SafeLoader)
        values, characters = _size(data, {})
        for found, most, unit in ((values, MOST_VALUES, "values"), (characters, MOST_CHARACTERS, "characters")):
            if found > most:
                raise UserError(f"{where} must contain at most {most:,} {unit} after its aliases (`*`) are expanded.")
        return data
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = error.problem or error.context or "cannot be read"
        if "occurs twice" in problem:
            raise UserError(f"{where}: {problem}.") from None
        raise UserError(f"{where} is not valid YAML{line}: {problem}.") from None
    except (yaml.YAMLError, ValueError) as error:
        problem = one_line(error)
    except RecursionError:
        problem = "its brackets are nested too deeply"
    # PyYAML raises these errors for a tag such as `!!bool` before a value of another type.
    except (AttributeError, LookupError, TypeError):
        problem = "a tag (`!!`) does not match the value after it"
    raise UserError(f"{where} is not valid YAML: {problem}.")


def _size(data: Any, counted: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the numbers of values and of characters in parsed YAML after its aliases are expanded.

    A value that contains itself is counted once.

    `counted` caches the numbers for lists and dicts, keyed by their `id`.
    """
    if not isinstance(data, dict | list):
        return 1, len(data) if isinstance(data, str) else 0
    if id(data) not in counted:
        counted[id(data)] = 1, 0
        below = [*data, *data.values()] if isinstance(data, dict) else data
        sizes = [(1, 0), *(_size(one, counted) for one in below)]
        counted[id(data)] = sum(values for values, _ in sizes), sum(characters for _, characters in sizes)
    return counted[id(data)]


def read_yaml(path: Path) -> dict[str, Json]:
    """Return the contents of a YAML file, or raise UserError if the file is invalid or does not contain a mapping."""
    return _mapping(parse_yaml(read_text(path), str(path)), path)


def read_json(path: Path) -> dict[str, Json]:
    """Return the contents of a JSON file, or raise UserError if the file is invalid or does not contain a mapping."""
    try:
        return _mapping(json.loads(read_text(path)), path)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the text of a file, or raise UserError if it cannot be read."""
    try:
        return path.read_text(encoding)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read: it is not UTF-8 text (byte {error.start}).") from None


def _mapping(data: Any, path: Path) -> dict[str, Json]:
    if not isinstance(data, dict):
        given = "is empty" if data is None else f"contains a value of type {type(data).__name__}"
        raise UserError(f"{path} must contain a mapping of names to values, but it {given}.")
    return data


def parse_overrides(words: list[str]) -> dict[str, Json]:
    """Parse overrides such as ``["federation.rounds=5"]`` into a dict of values, keyed by dotted name.

    Values are written in YAML, e.g. `[12, 6]`, `1e-3` and `null`.

    Raises:
        UserError: An override has no name or no `=`, its value is not valid YAML, or a name is given twice.
    """
    changes: dict[str, Json] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not name:
            raise UserError(
                f"an override must have the form NAME=VALUE, as in `federation.rounds=5`, but it is `{_short(word)}`."
            )
        if name in changes:
            raise UserError(f"the override `{name}` is given twice.")
        changes[name] = parse_yaml(value, f"the override `{_short(word)}`")
    return changes


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def readable(name: str) -> str:
    """Return the name of an image class with spaces between its words.

    >>> readable("apple_pie"), readable("ApplyEyeMakeup"), readable("7"), readable("dog"), readable("TV")
    ('apple pie', 'Apply Eye Makeup', '7', 'dog', 'TV')
    """
    spaced = "".join(f" {one}" if one.isupper() and last.islower() else one for last, one in pairwise(f" {name}"))
    return " ".join(spaced.replace("_", " ").split())
