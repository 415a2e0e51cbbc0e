"""The mistakes in a search space, and the error message about them, which names their places in the YAML file.

The sentence about a mistake names hyperparameters, such as `lora.rank`. This module finds the entry of the search space
that sets the hyperparameter, such as `space.lora.rank.grid.2`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from fedsweep.common.errors import UserError, with_all_mistakes
from fedsweep.common.paths import shown_place
from fedsweep.common.places import Places, is_unknown, names_in
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.results.arms import ABLATED, NAMED, Arm, identity
from fedsweep.sweep.space.axes import KINDS, below, names_of


@dataclass(frozen=True)
class Mistake:
    """A mistake in a search space, in one of its arms or on the command line."""

    sentence: str
    """The error message without its beginning, which says where the mistake is."""
    name: str = ""
    """The dotted name of the entry of the search space that has the mistake, if it is known."""
    arm: Arm = field(default_factory=dict)
    """The invalid arm, or only the entries that cause the mistake, if the mistake belongs to an arm."""
    about: str = ""
    """The arms that have the mistake, e.g. `arm lora.rank=4`, for the beginning of the message."""
    rule: str = ""
    """The sentence whose names decide the place, if it is not `sentence`."""
    on_command_line: bool = False
    """True if the sentence is about the command line and needs no beginning."""

    def of_arm(self, arm: Arm, about: str) -> Self:
        """Return a copy for a mistake of the arm `arm`, which the message describes as `about`."""
        return replace(self, arm=arm, about=about)


class WrongSpaceError(UserError):
    """The error raised for a search space with mistakes."""

    def __init__(self, message: str, mistakes: Sequence[Mistake]) -> None:
        super().__init__(message)
        self.mistakes = tuple(mistakes)


@dataclass(frozen=True)
class Origin:
    """The YAML file of a search space, and the names of the values that the user changes on the command line."""

    where: str
    """The beginning of error messages that have no place in the file, e.g. `search space ablations/lora_rank`."""
    path: Path
    changed: frozenset[str] = frozenset()
    """The dotted names of the entries of the search space that the command line changes."""

    @classmethod
    def of(cls, where: str, path: Path, overrides: Collection[str], options: Collection[str]) -> Self:
        """Return the origin of a search space with the user's changes.

        Args:
            where: The beginning of error messages that have no place in the file.
            path: The YAML file.
            overrides: The dotted names of the hyperparameters that the user changes.
            options: The dotted names of the settings of the search space that the user changes.
        """
        return cls(where, path, frozenset({*options, *overrides, *(f"fixed.{name}" for name in overrides)}))

    def error(self, mistakes: Sequence[Mistake]) -> WrongSpaceError:
        """Return the error about the mistakes, whose message begins with their places in the file."""
        places, content = Places.of(self.path), read_yaml(self.path)
        messages = [self._message(one, places, content) for one in mistakes]
        return WrongSpaceError(with_all_mistakes(self.where, messages), mistakes)

    def _message(self, mistake: Mistake, places: Places, content: Mapping[str, Json]) -> str:
        if mistake.on_command_line:
            return mistake.sentence
        found = self._subject(mistake, places, content)
        if found is None:
            return f"{self.where}{f', {mistake.about}' if mistake.about else ''}: {mistake.sentence}"
        place = shown_place(self.path, *places.place(found, mistake.rule or mistake.sentence))
        return f"{place}: {f'{mistake.about}: ' if mistake.about else ''}{mistake.sentence}"

    def _subject(self, mistake: Mistake, places: Places, content: Mapping[str, Json]) -> str | None:
        """Return the dotted name of the part of the file that a mistake is about, or an empty string for all of it.

        The result is None if the mistake is about values that the file does not contain: values from the command line,
        or values that depend on the command line.
        """
        sentence = mistake.rule or mistake.sentence
        names = [*([mistake.name] if mistake.name else []), *names_in(sentence)]
        if any(below(name, self.changed) for name in names):
            return None
        setters = {name: entry for entry, name in _entries(content) if not below(entry, self.changed)}
        if mistake.name.startswith("fixed.") and "." in (own := places.closest(mistake.name)):
            inner = (f"fixed.{name}" for name in names)
            return next((one for one in inner if one in places.values and below(one, [own])), own)
        of_arm = _values_of_arm(mistake.arm, content)
        entries = [entry for name in names for entry in _set_by(name, {**setters, **of_arm}, places)]
        if is_unknown(sentence):  # then the name of the axis may be wrong, unless the name is inside of a value
            entries = [one for one in entries if one in places.keys]
            entries += [entry for name in names for entry in _set_by(name, setters, places)]
        inside = [f"{mistake.name}.{name}" for name in names if mistake.name]
        if (present := places.most_specific([*names, *inside, *entries], sentence)) is not None:
            return present
        if caused := [(setters | of_arm)[name] for name in mistake.arm if name in setters | of_arm]:
            return caused[0]
        if closest := next(filter(None, map(places.closest, names)), ""):
            return closest
        return None if self.changed else ""


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each entry that sets a hyperparameter, and the hyperparameter's dotted name.

    Of several entries that set the same hyperparameter, the most important one is last.
    """
    tuned = _mapping(content.get("tune_each")).get("space")
    for group, changes in (
        ("fixed", content.get("fixed")),
        ("tune_each.space", tuned),
        ("ablate", content.get("ablate")),
    ):
        yield from ((f"{group}.{name}", name) for name in _mapping(changes))
    for arm, changes in _mapping(content.get("named")).items():
        yield from ((f"named.{arm}.{name}", name) for name in _mapping(changes))
    for key in _mapping(content.get("space")):
        yield from ((f"space.{key}", name) for name in names_of(str(key)))


def _values_of_arm(arm: Arm, content: Mapping[str, Any]) -> dict[str, str]:
    """Return the dotted name of the entry that contains each value of an arm, keyed by the hyperparameter."""
    found: dict[str, str] = {}
    search = _mapping(content.get("search"))
    for number, point in enumerate(search["first"] if isinstance(search.get("first"), list) else ()):
        shared = {
            name for name, value in _mapping(point).items() if name in arm and identity(value) == identity(arm[name])
        }
        if shared == {*_mapping(point)}:
            found |= {name: f"search.first.{number}.{name}" for name in shared}
    for group, axes in (
        ("tune_each.space", _mapping(content.get("tune_each")).get("space")),
        ("space", content.get("space")),
    ):
        for key, axis in _mapping(axes).items():
            found |= _values_of_axis(f"{group}.{key}", names_of(str(key)), _mapping(axis), arm)
    if isinstance(own := arm.get(NAMED), str):
        found |= {name: f"named.{own}.{name}" for name in _mapping(_mapping(content.get("named")).get(own))}
    ablated = arm.get(ABLATED)
    return found | {str(name): f"ablate.{name}" for name in (ablated if isinstance(ablated, list) else ())}


def _values_of_axis(entry: str, names: Sequence[str], axis: Mapping[str, Any], arm: Arm) -> dict[str, str]:
    """Return the dotted names of the values of an axis that an arm has, keyed by the hyperparameter."""
    if not all(name in arm for name in names):
        return {}
    value = arm[names[0]] if len(names) == 1 else [arm[name] for name in names]
    for kind in KINDS:
        for number, one in enumerate(axis[kind] if isinstance(axis.get(kind), list) else ()):
            if identity(one) == identity(value):
                item = f"{entry}.{kind}.{number}"
                return {name: item if len(names) == 1 else f"{item}.{place}" for place, name in enumerate(names)}
    return {}


def _set_by(name: str, setters: Mapping[str, str], places: Places) -> list[str]:
    """Return the entries that set the hyperparameter `name`, or a hyperparameter that contains it or that it contains.

    A value of a mapping is returned by its own dotted name, if it is in the file.
    """
    if outer := max((one for one in setters if below(name, [one])), key=len, default=None):
        inner = f"{setters[outer]}{name.removeprefix(outer)}"
        return [inner if inner in places.values else setters[outer]]
    return [entry for one, entry in setters.items() if below(one, [name])][:1]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
