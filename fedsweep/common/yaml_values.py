"""YAML and JSON as plain values, overrides as they are typed, names as words. What they configure is not known here."""

import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from fedsweep.common.errors import UserError

LONGEST_NUMBER = 20  # digits of a whole number with its sign; more is a slip, and no library below takes it

Json = str | int | float | bool | None | list[Any] | dict[str, Any]


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers and booleans; duplicate keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain name", key_node.start_mark)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key}` stands twice (line {line})", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# PyYAML follows YAML 1.1: `1e-3` is a string, `no` is False, `010` is 8, `<<` merges. Keep 1.2's core schema instead.
_OF_YAML_1_1 = (":bool", ":int", ":float", ":timestamp", ":merge", ":value")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if not tag.endswith(_OF_YAML_1_1)]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?((\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.inf|\.nan)$"),
    list("-+0123456789."),
)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > LONGEST_NUMBER:
        raise yaml.constructor.ConstructorError(None, None, f"a number of {len(text)} digits", node.start_mark)
    return int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text.

    Raises:
        UserError: it is broken (with its line) or holds a key twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a subclass of SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = error.problem or error.context or "cannot be read"
        if "stands twice" in problem:
            raise UserError(f"{where}: {problem}.") from None
        raise UserError(f"{where} is not valid YAML{line}: {problem}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where} is not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise UserError(f"{where} is not valid YAML: its brackets are nested too deeply.") from None
    except (AttributeError, LookupError, TypeError):  # PyYAML's, from a tag such as `!!bool` before what is none
        raise UserError(
            f"{where} is not valid YAML: a tag (`!!`) does not fit the value that it stands before."
        ) from None


def read_yaml(path: Path) -> dict[str, Json]:
    """Read a YAML file that must hold a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read: it is not UTF-8 text (byte {error.start}).") from None
    data = parse_yaml(text, str(path))
    if data is None:
        raise UserError(f"{path} must hold names and values, but it is empty.")
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold names and values, but it holds {type(data).__name__}.")
    return data


def read_json(path: Path) -> dict[str, Json]:
    """Read a JSON file that must hold a mapping.

    Raises:
        UserError: it cannot be read or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold names and values, but it holds {type(data).__name__}.")
    return data


def parse_overrides(words: list[str]) -> dict[str, Json]:
    """``["federation.rounds=5"]`` as a mapping; values are read as YAML, so `[12, 6]`, `1e-3` and `null` work."""
    changes: dict[str, Json] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not name:
            raise UserError(f"an override must look like `federation.rounds=5`, but got `{_short(word)}`.")
        if name in changes:
            raise UserError(f"the override `{name}` is given twice.")
        changes[name] = parse_yaml(value, f"the override `{_short(word)}`")
    return changes


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def readable(name: str) -> str:
    """A class's name as words.

    >>> readable("apple_pie"), readable("ApplyEyeMakeup"), readable("7"), readable("dog"), readable("TV")
    ('apple pie', 'Apply Eye Makeup', '7', 'dog', 'TV')
    """
    spaced = "".join(
        f" {one}" if one.isupper() and place and name[place - 1].islower() else one for place, one in enumerate(name)
    )
    return " ".join(spaced.replace("_", " ").split())
