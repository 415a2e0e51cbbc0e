"""Parsers for YAML files, JSON files and command-line overrides, and a function that makes class names readable."""

import json
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fedsweep.common.errors import UserError, one_line
from fedsweep.common.paths import shown_place

LONGEST_NUMBER = 20
"""Maximum number of characters of an integer. Longer ones are typing errors, and other libraries reject them."""
MOST_VALUES, MOST_CHARACTERS = 100_000, 1_000_000
"""Maximum numbers of values and of characters in a file after its aliases are expanded, to limit memory use."""
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]")
"""Characters that reports cannot contain: XML and HTML do not allow them. Tabs and line breaks are allowed."""
Json = str | int | float | bool | None | list[Any] | dict[str, Any]


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads numbers and booleans by the rules of YAML 1.2, and rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain name", key_node.start_mark)
            if key in lines:
                where = f"twice in line {line}" if lines[key] == line else f"in line {lines[key]} and in line {line}"
                raise _RepeatedKeyError(None, None, f"the key `{key}` occurs {where}", key_node.start_mark)
            lines[key] = line
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, one_line(error), node.start_mark) from None
        # PyYAML raises these errors for a tag such as `!!bool` before a value of another type.
        except (AttributeError, LookupError, TypeError):
            problem = "a tag (`!!`) does not match the value after it"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


class _RepeatedKeyError(yaml.constructor.ConstructorError):
    """The error raised if a mapping contains a key twice."""


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


@dataclass(eq=False)
class _ProblemError(Exception):
    """The error raised for a text that is not valid YAML, or that breaks a rule of fedsweep."""

    problem: str
    line: int | None = None
    """The number of the line, starting with 1, or None if it is not known."""
    column: int = 1
    is_rule: bool = False
    """True if `problem` is a whole clause. Otherwise, it says why the text is not valid YAML."""


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text that is not the content of a file, such as an override, and return its values.

    Args:
        text: The YAML text.
        where: Origin of the text. Error messages begin with it.

    Raises:
        UserError: The text is not valid YAML, repeats a key, or has too many values after its aliases are expanded.
    """
    try:
        return _parsed(text)
    except _ProblemError as error:
        line = f" at line {error.line}, column {error.column}" if error.line is not None else ""
        rule = f": {error.problem}" if error.is_rule else f" is not valid YAML{line}: {error.problem}"
        raise UserError(f"{where}{rule}.") from None


def _parsed(text: str) -> Any:
    """Return the values of a YAML text, or raise _ProblemError."""
    try:
        data = yaml.load(text, Loader=_Loader)  # noqa: S506 (a subclass of SafeLoader)
        values, characters = _size(data, {})
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line, column = (None, 1) if mark is None else (mark.line + 1, mark.column + 1)
        problem = error.problem or error.context or "cannot be read"
        raise _ProblemError(problem, line, column, isinstance(error, _RepeatedKeyError)) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise _ProblemError(one_line(error), line, column) from None
    except (yaml.YAMLError, ValueError) as error:
        raise _ProblemError(one_line(error)) from None
    except RecursionError:
        raise _ProblemError("its brackets are nested too deeply") from None
    for found, most, unit in ((values, MOST_VALUES, "values"), (characters, MOST_CHARACTERS, "characters")):
        if found > most:
            rule = f"there must be at most {most:,} {unit} after the aliases (`*`) are expanded"
            raise _ProblemError(rule, is_rule=True)
    return data


def compose_yaml(text: str) -> yaml.Node | None:
    """Return the syntax tree of a valid YAML text, whose nodes know their lines and columns; None if there is none."""
    node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    return node


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


def control_characters(data: Any) -> Iterator[tuple[str, str, str]]:
    """Yield a dotted name, a text and a control character for each key and each string that contains one."""
    for name, text in _texts(data):
        if found := _CONTROL.search(text):
            yield name, text, found[0]


def _texts(data: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key and each string in `data`, with the dotted name of the place that contains it."""
    if isinstance(data, str):
        yield name, data
    elif isinstance(data, list | tuple):
        for one in data:
            yield from _texts(one, name)
    elif isinstance(data, dict):
        for key, value in data.items():
            yield name or ascii(key), str(key)
            yield from _texts(value, f"{name}.{key}" if name else str(key))


def read_yaml(path: Path) -> dict[str, Json]:
    """Return the contents of a YAML file.

    Raises:
        UserError: The file cannot be read, is not valid YAML, repeats a key or does not contain a mapping. The message
            begins with the place of the mistake, e.g. `experiments/mine.yaml:3:1: `.
    """
    text = read_text(path)
    try:
        data = _parsed(text)
    except _ProblemError as error:
        rule = error.problem if error.is_rule else f"the file is not valid YAML: {error.problem}"
        raise UserError(f"{shown_place(path, error.line or 1, error.column)}: {rule}.") from None
    if not isinstance(data, dict):
        _reject(data, shown_place(path, *_start(text)), "the file")
    return data


def _start(text: str) -> tuple[int, int]:
    """Return the line and the column of the first value in a valid YAML text."""
    node = compose_yaml(text)
    return (1, 1) if node is None else place_of(node)


def place_of(node: yaml.Node) -> tuple[int, int]:
    """Return the line and the column of a node, both starting with 1."""
    return node.start_mark.line + 1, node.start_mark.column + 1


def read_json(path: Path) -> dict[str, Json]:
    """Return the contents of a JSON file, or raise UserError if the file is invalid or does not contain a mapping."""
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(data, dict):
        _reject(data, "", str(path))
    return data


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the text of a file, or raise UserError if it cannot be read."""
    try:
        return path.read_text(encoding)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read: it is not UTF-8 text (byte {error.start}).") from None


def _reject(data: Any, place: str, subject: str) -> NoReturn:
    """Raise UserError about a file that contains no mapping."""
    given = "is empty" if data is None else f"contains a value of type {type(data).__name__}"
    start = f"{place}: " if place else ""
    raise UserError(f"{start}{subject} must contain a mapping of names to values, but it {given}.")


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
