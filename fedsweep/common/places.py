"""The lines and columns of the values in a YAML file, with which error messages about the file begin.

The places are not kept when a file is read. They are found by composing the file again after a mistake was found.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, permutations, takewhile
from pathlib import Path

import yaml

from fedsweep.common.errors import UserError
from fedsweep.common.paths import shown_place
from fedsweep.common.yaml_values import compose_yaml, place_of, read_text

Place = tuple[int, int]
"""A line and a column, both starting with 1."""
_HINT = re.compile(r", but (it|one|they) |; ")
"""The beginning of the part of an error message that shows the invalid value or proposes another one."""
_NAME = re.compile(r"`([^`]+)`")
_UNKNOWN = re.compile(r"\A`[^`]+` is not an? ")
"""The beginning of an error message about an unknown name."""
_ONE = re.compile(r"but one is `?([^`]+?)`?\.\Z|\A`[^`]+` (\S+) is not reported ")
"""The value in an error message about one item of a list, or about one metric."""
_NAMELESS = " must have a `name`."
"""The end of an error message about a mapping that lacks the entry `name`."""


@dataclass
class Places:
    """The places of all names and values of a YAML file, keyed by dotted name.

    The items of a list have the names `NAME.0`, `NAME.1` and so on. A key that contains dots adds several parts to the
    dotted name, e.g. `optimizer.lr` in `space.optimizer.lr`.
    """

    keys: dict[str, Place] = field(default_factory=dict)
    """The places of the keys. Items of lists have none."""
    values: dict[str, Place] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """The text of each plain value, as written in the file but without quotes."""
    mappings: set[str] = field(default_factory=set)
    """The dotted names whose values are mappings."""
    first: Place = (1, 1)
    """The place of the first key."""

    @classmethod
    def of(cls, path: Path) -> "Places":
        """Return the places in a valid YAML file."""
        found = cls()
        if (root := compose_yaml(read_text(path))) is not None:
            found.first = place_of(root)
            found._add(root, "", ())
        return found

    def _add(self, node: yaml.Node, name: str, outer: tuple[int, ...]) -> None:
        if id(node) in outer:  # a value that contains itself
            return
        start = f"{name}." if name else ""
        if isinstance(node, yaml.ScalarNode):
            self.texts[name] = str(node.value)
        elif isinstance(node, yaml.MappingNode):
            self.mappings.add(name)
            for key, value in node.value:
                self.keys.setdefault(f"{start}{key.value}", place_of(key))
                # A value that is left out, as in `NAME:`, has the place of its key.
                left_out = value.start_mark.index == value.end_mark.index
                self.values.setdefault(f"{start}{key.value}", place_of(key if left_out else value))
                self._add(value, f"{start}{key.value}", (*outer, id(node)))
        else:
            for number, item in enumerate(node.value):
                self.values.setdefault(f"{start}{number}", place_of(item))
                self._add(item, f"{start}{number}", (*outer, id(node)))

    def closest(self, name: str) -> str:
        """Return `name` or the innermost part of the file that should contain it; empty for the whole file."""
        while name and name not in self.values:
            name = name.rpartition(".")[0]
        return name

    def most_specific(self, names: Sequence[str], sentence: str = "") -> str | None:
        """Return the name with the most parts that is in the file, or None if no name is in the file.

        The names may also belong together: `when` and `space.lora.rank` are also sought as `space.lora.rank.when`, and
        `columns` and `loss` also as the item `loss` of the list `columns`. The items that the sentence quotes after
        these names are sought, too.
        """
        return max(self._present(names, sentence), key=lambda name: name.count("."), default=None)

    def _present(self, names: Sequence[str], sentence: str) -> Iterator[str]:
        yield from (name for name in names if name in self.values)
        yield from (name for outer, inner in permutations(names, 2) if (name := f"{outer}.{inner}") in self.values)
        one = _quoted(sentence)
        for outer in names:
            items = takewhile(self.values.__contains__, (f"{outer}.{number}" for number in count()))
            yield from (item for item in items if item in self.texts and self.texts[item] in (one, *names))
            if one:
                yield from (name for name in self.keys if name.startswith(f"{outer}.") and name.endswith(f".{one}"))

    def place(self, name: str, sentence: str) -> Place:
        """Return the place to which an error message about the dotted name `name` refers.

        Args:
            name: A dotted name. If it is not in the file, the closest part of the file is used.
            sentence: The error message. If it is about an unknown name, the place is that of the key. If it is about a
                missing name, the place is that of the key whose mapping lacks the name. Otherwise, it is that of the
                value.
        """
        found = self.closest(name)
        if not found:
            return self.first
        lacking = found in self.mappings and (found != name or sentence.endswith(_NAMELESS))
        unknown = found == name and (is_unknown(sentence) or found.endswith(f".{_quoted(sentence) or '.'}"))
        at_key = found in self.keys and (lacking or unknown)
        return self.keys[found] if at_key else self.values[found]


def _quoted(sentence: str) -> str | None:
    """Return the item of a list or the metric that an error message quotes, or None."""
    found = _ONE.search(sentence)
    return found and (found[1] or found[2])


def is_unknown(sentence: str) -> bool:
    """Return whether an error message is about an unknown name.

    >>> is_unknown("`lora.rnk` is not a hyperparameter of this run."), is_unknown("`seeds` must be a list.")
    (True, False)
    """
    return bool(_UNKNOWN.match(sentence))


def names_in(sentence: str) -> list[str]:
    """Return the names in backticks in the part of an error message that states the rule.

    >>> names_in("`search` tpe needs one of `seeds`, but it is `x`; did you mean `y`?")
    ['search', 'seeds']
    """
    return _NAME.findall(_HINT.split(sentence, maxsplit=1)[0])


def located(path: Path, sentence: str, name: str = "") -> str:
    """Return an error message about a YAML file, which begins with the place of the mistake.

    Args:
        path: The YAML file.
        sentence: The rule that the file violates, and the invalid value. The place is that of the most specific name
            that the sentence names in backticks, and of the first key if the file contains none of the names.
        name: The dotted name of the value or of the mapping that violates the rule, if it is known.
    """
    places = Places.of(path)
    return f"{shown_place(path, *places.place(_subject(places, sentence, name), sentence))}: {sentence}"


@contextmanager
def placed(path: Path, changed: Collection[str]) -> Iterator[None]:
    """Add the place in a YAML file to each error message that begins with the name of a value in the file.

    Args:
        path: The YAML file.
        changed: The dotted names of the values that the command line changes. Messages about them get no place.
    """
    try:
        yield
    except UserError as error:
        sentence = str(error)
        names = names_in(sentence)
        from_command_line = any(
            f"{name}.".startswith(f"{one}.") or f"{one}.".startswith(f"{name}.") for name in names for one in changed
        )
        if from_command_line or not names or not sentence.startswith(f"`{names[0]}`"):
            raise
        places = Places.of(path)
        if names[0] not in places.values and places.closest(names[0]) not in places.texts:  # a default value
            raise
        raise UserError(located(path, sentence)) from error.__cause__


def _subject(places: Places, sentence: str, name: str) -> str:
    named = names_in(sentence)
    inside: Iterable[str] = (f"{name}.{one}" for one in named if name)
    present = places.most_specific([*([name] if name else []), *named, *inside], sentence)
    return present or name or next(iter(named), "")
