"""The base class `Config` of all configurations.

Every value of a configuration has a dotted name, such as `lora.rank`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from fedsweep.common.errors import InvalidValuesError, UserError, near, with_all_mistakes
from fedsweep.common.places import located
from fedsweep.common.yaml_values import Json, control_characters

_WORDING = {
    "or Input should be ": "or ",
    "String should match pattern": "must match",
    "Input should be": "must be",
    "Tuple should have": "must have",
    "Dictionary should have": "must have",
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid array": "a list",
    "an object": "a mapping of names to values",
}
"""Phrases in pydantic's messages, and the phrases that replace them."""
_COUNT = re.compile(r" after validation, not \d+")
"""The end of pydantic's messages about the length of a list. It is left out, because the message shows the list."""


class Config(BaseModel):
    """The base class of all configurations.

    Configurations are immutable. Values are validated without type conversion, and unknown names are rejected.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    what_a_name_is: ClassVar[str] = "a hyperparameter of this run"
    """The end of the sentence "`NAME` is not ...", the error message about an unknown name."""
    written_by_hand: ClassVar[bool] = True
    """False for files that fedsweep writes. The error message about a damaged file names only the first mistake."""

    @classmethod
    def of(
        cls, data: Mapping[str, Json], where: str, violations: list[str] | None = None, file: Path | None = None
    ) -> Self:
        """Validate values from a YAML file or the command line, and return the configuration.

        A nested configuration can be given by its `name` alone: ``{"method": "all_small"}`` selects the method
        `all_small` with its default values.

        Args:
            data: Values by name, nested as in a YAML file.
            where: Origin of the values, such as a file. Error messages begin with it.
            violations: If given, the sentences about violated rules that involve several fields of this class are added
                to this list, and they raise no error.
            file: The YAML file with these values, if any. Error messages then begin with the place in the file.

        Raises:
            UserError: A name is unknown, or a value is missing or invalid. The message states the name and the rule.
                If pydantic found the mistakes, the error is an InvalidValuesError, which contains all of them.
        """
        data = _spelt_out(cls, data)
        try:
            # As JSON, so that a YAML list can fill a tuple, while strict types still reject "8" for 8 and true for 1.
            as_json = json.dumps(data)
            _check_printable(data, where, file)
            return cls.model_validate_json(as_json, context=None if violations is None else {cls: violations})
        except ValidationError as error:
            raise _invalid(_mistakes(error, data, cls), cls, where, file) from None
        except (TypeError, ValueError) as error:
            rule = f"contains a value that no hyperparameter can have: {error}."
            raise UserError(f"{where} {rule}" if file is None else located(file, f"the file {rule}")) from None

    def override(self, changes: Mapping[str, Json], where: str, violations: list[str] | None = None) -> Self:
        """Return a validated copy with some values changed.

        Outer names are changed before inner ones: ``{"method": "depthfl", "method.heads": [4]}`` selects DepthFL and
        then sets its heads.

        Args:
            changes: New values, keyed by dotted name.
            where: Origin of the changes, such as a file. Error messages begin with it.
            violations: As for `of`.

        Raises:
            UserError: A name is unknown, or a value is invalid.
        """
        data, homeless = self._changed(changes)
        known = [*flat(self)]
        unknown = {
            name: _unknown(name, _fields(type(self), met), type(self))
            for name, met in homeless.items()
            # If the name is known, another change has replaced the parent by an invalid value.
            if not any(one == name or one.startswith(f"{name}.") for one in known)
        }
        try:
            changed = type(self).of(data, where, violations)
        except InvalidValuesError as error:
            raise _invalid({**unknown, **error.mistakes}, type(self), where) from None
        if unknown:
            raise _invalid(unknown, type(self), where)
        return changed

    def tentative(self, changes: Mapping[str, Json]) -> dict[str, Json]:
        """Return all values, including default values, after `changes` are applied, keyed by dotted name.

        Nothing is validated, so the result may contain unknown names and invalid values. A change is ignored if its
        parent is not a mapping, e.g. `seed.first` if `seed` is a number.
        """
        return flat(_spelt_out(type(self), self._changed(changes)[0], defaults=True))

    @model_validator(mode="after")
    def _valid(self, info: ValidationInfo) -> Self:
        collected = (info.context or {}).get(type(self))
        for violation in self._violations():
            if collected is None:
                raise ValueError(violation)
            collected.append(violation)
        return self

    def _violations(self) -> Iterable[str]:
        """Yield an error message for each violated rule that involves several fields.

        Unless the messages are collected (see `of`), only the first message is shown, and the generator is not resumed
        after it. Later code in the generator may then assume that all earlier rules hold.
        """
        return ()

    def _changed(self, changes: Mapping[str, Json]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values with `changes` applied, and a dict of the changes that cannot be applied.

        A change cannot be applied if its parent is not a mapping, e.g. `seed.first` if `seed` is a number. The dict
        maps the dotted name of each such change to the whole configuration with all earlier changes applied.
        """
        data: dict[str, Any] = self.model_dump(mode="json")
        homeless = {}
        for name in sorted(changes, key=lambda dotted: dotted.count(".")):
            *parents, leaf = name.split(".")
            node: Any = data
            for parent in parents:
                node = node.get(parent) if isinstance(node, dict) else None
            if isinstance(node, dict):
                node[leaf] = deepcopy(changes[name])  # so that a change of a nested value does not modify the caller's
                data = _spelt_out(type(self), data)
            else:
                homeless[name] = data
        return data, homeless


def flat(config: "Config | Mapping[str, Json]", prefix: str = "") -> dict[str, Json]:
    """Return the values of a configuration or mapping, keyed by dotted name such as `lora.rank`.

    Lists are not flattened. `prefix` is added in front of every name.
    """
    found: dict[str, Json] = {}
    for key, value in (config.model_dump(mode="json") if isinstance(config, Config) else config).items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def _check_printable(data: Any, where: str, file: Path | None) -> None:
    """Raise UserError if a key or a string in `data` contains a control character."""
    for name, text, character in control_characters(data):
        rule = f"must not contain control characters, but it contains U+{ord(character):04X} in {json.dumps(text)}"
        raise UserError(_message(f"`{name}` {rule}.", name, where, file))


def _spelt_out(record: type[Config], data: Any, defaults: bool = False) -> Any:
    """Return `data` with every nested configuration written out as a dict.

    A nested configuration that is given by its name alone, such as "fedra", becomes a dict with this `name`. A missing
    nested configuration is replaced by its default. If `defaults` is true, every other missing value is also replaced
    by its default.
    """
    # Pydantic's "before" validators could do the same, but pydantic would not validate their results as JSON.
    if not isinstance(data, dict):
        return data
    spelt = {**_defaults(record), **data} if defaults else dict(data)
    for field, records in _objects(record).items():
        default = record.model_fields[field].default
        if field not in spelt and isinstance(default, Config):
            spelt[field] = default.model_dump(mode="json")
        elif isinstance(spelt.get(field), str) and any("name" in one.model_fields for one in records):
            spelt[field] = {"name": spelt[field]}
        if field in spelt and (chosen := _chosen(records, spelt[field])):
            spelt[field] = _spelt_out(chosen, spelt[field], defaults)
    return spelt


@cache
def _objects(record: type[Config]) -> dict[str, list[type[Config]]]:
    """Map each field of `record` that contains a nested configuration to the classes that the field allows."""
    return {field: records for field, info in record.model_fields.items() if (records := _records(info))}


@cache
def _defaults(record: type[Config]) -> dict[str, Json]:
    given = {
        field: info.default
        for field, info in record.model_fields.items()
        if not (info.is_required() or info.default_factory or isinstance(info.default, Config))
    }
    return dict(json.loads(json.dumps(given)))


def _unknown(name: str, known: Iterable[str], root: type[Config]) -> str:
    return f"`{name}` is not {root.what_a_name_is}{near(name, known) or '.'}"


def _message(sentence: str, name: str, where: str, file: Path | None) -> str:
    """Return an error message about the value `name`, which begins with the place in `file` or else with `where`."""
    return f"{where}: {sentence}" if file is None else located(file, sentence, name)


def _invalid(
    mistakes: Mapping[str, str], root: type[Config], where: str, file: Path | None = None
) -> InvalidValuesError:
    """Return the error about some mistakes. The message lists all of them if `root` is written by hand."""
    messages = [_message(sentence, name, where, file) for name, sentence in mistakes.items()]
    return InvalidValuesError(with_all_mistakes(where, messages if root.written_by_hand else messages[:1]), mistakes)


def _mistakes(error: ValidationError, data: Mapping[str, Json], root: type[Config]) -> dict[str, str]:
    """Return one sentence for each of pydantic's errors, keyed by the dotted name of the value, in pydantic's order.

    A missing name is left out if a similar name is unknown, because a misspelt name causes both errors.
    """
    by_name: dict[str, list[ErrorDetails]] = {}
    for one in error.errors(include_url=False):
        if one["type"] != "default_factory_not_called":
            by_name.setdefault(_dotted(one["loc"], data), []).append(one)
    unknown = [name for name, one in by_name.items() if one[0]["type"] == "extra_forbidden"]
    by_name = {
        name: one for name, one in by_name.items() if one[0]["type"] != "missing" or not _misspelt(name, unknown)
    }
    # A list whose only item is invalid is also reported as too short.
    by_name = {name: one for name, one in by_name.items() if not any(other.startswith(f"{name}.") for other in by_name)}
    return {name: _sentence(name, several, data, root) for name, several in by_name.items()}


def _misspelt(missing: str, unknown: Iterable[str]) -> bool:
    """Return whether one of the unknown names is similar to the missing name and belongs to the same configuration."""
    home, _, leaf = missing.rpartition(".")
    return bool(near(leaf, [one.rpartition(".")[2] for one in unknown if one.rpartition(".")[0] == home]))


def _sentence(name: str, found: list[ErrorDetails], data: Mapping[str, Json], root: type[Config]) -> str:
    """Return a one-sentence error message for pydantic's errors about the value `name`."""
    first = found[0]
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(name, _fields(root, data), root)
    if kind == "missing":
        return f"`{name}` is missing."
    if kind == "value_error":
        rule = str(context["error"])
        home = name if isinstance(value, dict) else name.rpartition(".")[0]
        # The rules of a backbone name its fields `backbone.X`, but the backbone may be nested elsewhere.
        if home and home != "backbone":
            rule = rule.replace("`backbone.", f"`{home}.")
        return rule if rule.endswith("?") else f"{rule}."
    if kind == "union_tag_invalid":
        expected = [tag.strip("' ") for tag in str(context["expected_tags"]).split(",")]
        tag = str(context["tag"])
        rule = f"must be one of {', '.join(expected)}, but it is `{tag}`"
        return f"`{name}.name` {rule}{near(tag, expected) or '.'}"
    if kind == "union_tag_not_found":
        return f"`{name}` must have a `name`."
    # A union reports one error for each of its types.
    infinite = [one["msg"] for one in found if one["type"] == "finite_number" and isinstance(value, float)]
    rule = ", or ".join(infinite[:1] or [one["msg"] for one in found])
    for theirs, ours in _WORDING.items():
        rule = rule.replace(theirs, ours)
    rule = _COUNT.sub("", rule)
    shown = json.dumps(value) if isinstance(value, str | int | float | bool | list | type(None)) else str(value)
    return f"`{name}` {rule[0].lower()}{rule[1:]}, but it is {shown}."


def _dotted(location: tuple[int | str, ...], data: Any) -> str:
    """Return the dotted name of the value to which the `location` of a pydantic error refers.

    Pydantic adds the names of union types to a location. These names are left out, e.g. `fedra` in `method.fedra.mu`.
    """
    parts: list[str] = []
    node = data
    for part in location:
        if not isinstance(node, dict | list):
            break
        # Pydantic's name of a type in a union, such as `tuple[int, ...]` or the name of a class.
        if isinstance(part, str) and ("[" in part or (part[:1].isupper() and part not in node)):
            continue
        entries = node if isinstance(node, dict) else dict(enumerate(node))
        # Pydantic adds the name of the list type if a union allows other types too.
        kind_of_list = isinstance(node, list) and isinstance(part, str)
        if not kind_of_list and (part in entries or entries.get("name") != part):
            parts.append(str(part))
            node = entries.get(part)
    return ".".join(parts)


def _fields(record: type[Config], data: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields of `record` and of its nested configurations.

    If a field allows several classes of nested configurations, the field's value in `data` selects the class.
    """
    given = data if isinstance(data, dict) else {}
    for field, info in record.model_fields.items():
        yield f"{prefix}{field}"
        below, records = given.get(field), _records(info)
        if get_origin(info.annotation) is dict:
            for key, value in below.items() if isinstance(below, dict) else ():
                yield f"{prefix}{field}.{key}"
                for kind in records:
                    yield from _fields(kind, value, f"{prefix}{field}.{key}.")
        elif chosen := _chosen(records, below):
            yield from _fields(chosen, below, f"{prefix}{field}.")


def _records(info: FieldInfo) -> list[type[Config]]:
    asked = (info.annotation, *get_args(info.annotation))
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in asked]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)]


def _chosen(records: list[type[Config]], data: Any) -> type[Config] | None:
    if len(records) == 1:
        return records[0]
    named = [one for one in records if "name" in one.model_fields]
    if isinstance(data, dict) and records and not named:
        return max(records, key=lambda one: len({*one.model_fields} & {*data}))
    name = data.get("name") if isinstance(data, dict) else None
    return next((one for one in named if one.model_fields["name"].default == name), None)
