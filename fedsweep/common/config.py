"""Configuration: frozen pydantic records with dotted names. No torch.

Every hyperparameter has one dotted name (`lora.rank`) from the YAML file to the tensor and to MLflow.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any, ClassVar, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from fedsweep.common.errors import UserError, near
from fedsweep.common.yaml_values import Json


class Config(BaseModel):
    """Base of all configuration: frozen, strict about types, and closed to unknown names."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    what_a_name_is: ClassVar[str] = "a hyperparameter of this run"
    """What the sentence about an unknown name says that it is not."""

    @classmethod
    def of(cls, data: Mapping[str, Json], where: str) -> Self:
        """Validate plain data. `where` names its source in the sentence of a refusal.

        A bare string stands for an object's `name`: ``{"method": "all_small"}``.

        Raises:
            UserError: the first thing wrong, with its dotted name, the rule and the value.
        """
        data = _spelt_out(cls, data)
        try:
            # As JSON, so that a YAML list may fill a tuple while strictness still refuses "8" for 8 and true for 1.
            return cls.model_validate_json(json.dumps(data))
        except ValidationError as error:
            raise UserError(_sentence(error, data, cls, where)) from None
        except (TypeError, ValueError) as error:
            raise UserError(f"{where} holds a value that no hyperparameter can take: {error}.") from None

    def override(self, changes: Mapping[str, Json], where: str) -> Self:
        """A copy with dotted names changed, checked as a whole again.

        Whole objects are replaced before their fields, so that ``{"method": "all_small"}`` exchanges the method and
        ``{"method": "depthfl", "method.heads": [4]}`` changes the other one.

        Raises:
            UserError: a name is unknown or a value impossible.
        """
        data: dict[str, Any] = self.model_dump(mode="json")
        for name in sorted(changes, key=lambda dotted: dotted.count(".")):
            *parents, leaf = name.split(".")
            node = data
            for parent in parents:
                below = node.get(parent)
                if not isinstance(below, dict):
                    if any(known == name or known.startswith(f"{name}.") for known in flat(self)):
                        type(self).of(data, where)  # a change has replaced the parent, and is to blame
                    raise UserError(_unknown(name, _fields(type(self), data), type(self), where))
                node = below
            node[leaf] = deepcopy(changes[name])  # a deeper change must not reach into the caller's value
            data = _spelt_out(type(self), data)
        return type(self).of(data, where)

    def tentative(self, changes: Mapping[str, Json]) -> dict[str, Json]:
        """Values by dotted name with dotted names changed, before it is known whether they fit together.

        Defaults of objects that a change chooses are among them. A change that has no place is left out.
        """
        data: dict[str, Any] = self.model_dump(mode="json")
        for name in sorted(changes, key=lambda dotted: dotted.count(".")):
            *parents, leaf = name.split(".")
            node: Any = data
            for parent in parents:
                node = node.get(parent) if isinstance(node, dict) else None
            if isinstance(node, dict):
                node[leaf] = deepcopy(changes[name])
                data = _spelt_out(type(self), data)
        return flat(_with_defaults(type(self), data))


def flat(config: "Config | Mapping[str, Json]") -> dict[str, Json]:
    """All resolved values, defaults included, by dotted name. Lists stay lists."""

    def walk(prefix: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Json]]:
        for key, value in node.items():
            if isinstance(value, dict) and value:
                yield from walk(f"{prefix}{key}.", value)
            else:
                yield f"{prefix}{key}", value

    return dict(walk("", config.model_dump(mode="json") if isinstance(config, Config) else config))


def _spelt_out(record: type[Config], data: Any) -> Any:
    """The data with an object for each bare string that stands for one's `name`, and for one left to its default."""
    if not isinstance(data, dict):
        return data
    spelt = dict(data)
    for field, (default, records) in _objects(record).items():
        if field not in data and default is not None:
            spelt[field] = default.model_dump(mode="json")
        elif isinstance(data.get(field), str) and any("name" in one.model_fields for one in records):
            spelt[field] = {"name": data[field]}
        if field in spelt and (chosen := _chosen(records, spelt[field])):
            spelt[field] = _spelt_out(chosen, spelt[field])
    return spelt


def _with_defaults(record: type[Config], data: Any) -> Any:
    """Data that is spelt out, with the defaults of the fields that it leaves out."""
    if not isinstance(data, dict):
        return data
    whole = {**_defaults(record), **data}
    for field, (_, records) in _objects(record).items():
        if chosen := _chosen(records, whole.get(field)):
            whole[field] = _with_defaults(chosen, whole[field])
    return whole


@cache
def _objects(record: type[Config]) -> dict[str, tuple["Config | None", list[type["Config"]]]]:
    """The fields of a record that hold records: their default, and the kinds that they may hold."""
    found = {field: (info.default, _records(info)) for field, info in record.model_fields.items()}
    return {
        field: (default if isinstance(default, Config) else None, records)
        for field, (default, records) in found.items()
        if records
    }


@cache
def _defaults(record: type[Config]) -> dict[str, Json]:
    """The defaults of a record's other fields, as plain values."""
    given = {
        field: info.default
        for field, info in record.model_fields.items()
        if not (info.is_required() or info.default_factory or isinstance(info.default, Config))
    }
    return dict(json.loads(json.dumps(given)))


def _unknown(name: str, known: Iterable[str], root: type[Config], where: str) -> str:
    return f"{where}: `{name}` is not {root.what_a_name_is}{near(name, known) or '.'}"


def _sentence(error: ValidationError, data: Mapping[str, Json], root: type[Config], where: str) -> str:
    """The first of pydantic's findings as one sentence; a misspelt name goes before the missing one that it causes."""
    found = error.errors(include_url=False)
    unknown = [one for one in found if one["type"] == "extra_forbidden"]
    first = unknown[0] if unknown and found[0]["type"] == "missing" else found[0]
    name = _dotted(first["loc"], data)
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(name, _names_beside(error, data, root), root, where)
    if kind == "missing":
        return f"{where}: `{name}` is missing."
    if kind == "value_error":
        rule = str(context["error"])
        home = name if isinstance(value, dict) else name.rpartition(".")[0]
        if home and home != "backbone":  # a kind of backbone names its fields by where it usually stands
            rule = rule.replace("`backbone.", f"`{home}.")
        return f"{where}: {rule}" if rule.endswith("?") else f"{where}: {rule}."
    if kind == "union_tag_invalid":
        expected = [tag.strip("' ") for tag in str(context["expected_tags"]).split(",")]
        tag = str(context["tag"])
        rule = f"must be one of {', '.join(expected)}, but it is `{tag}`"
        return f"{where}: `{name}.name` {rule}{near(tag, expected) or '.'}"
    if kind == "union_tag_not_found":
        return f"{where}: `{name}` must have a `name`."
    here = [one for one in found if _dotted(one["loc"], data) == name]  # several for a union
    infinite = [one["msg"] for one in here if one["type"] == "finite_number" and isinstance(value, float)]
    rules = infinite[:1] or [one["msg"] for one in here]
    rule = ", or ".join(rules).replace("or Input should be ", "or ")
    rule = (
        rule.replace("String should match pattern", "must match")
        .replace("Input should be", "must be")
        .replace("Tuple should have", "must have")
    )
    rule = rule.replace("Dictionary should have", "must have")
    shown = json.dumps(value) if isinstance(value, str | int | float | bool | list | type(None)) else str(value)
    return f"{where}: `{name}` {rule[0].lower()}{rule[1:]}, but it is {shown}."


def _dotted(location: tuple[int | str, ...], data: Any) -> str:
    """Pydantic's location without the union tags it inserts (`method.fedra.mu` is `method.mu`)."""
    parts: list[str] = []
    node = data
    for part in location:
        if not isinstance(node, dict | list):
            break
        if isinstance(node, dict) and part not in node and node.get("name") == part:
            continue
        if isinstance(node, list) and isinstance(part, str):  # the kind of list, where something else is allowed too
            continue
        parts.append(str(part))
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part] if part < len(node) else None
    return ".".join(parts)


def _names_beside(error: ValidationError, data: Mapping[str, Json], root: type[Config]) -> list[str]:
    """Names worth suggesting: all that the record has, and those in the data that pydantic did not refuse."""
    refused = {_dotted(one["loc"], data) for one in error.errors(include_url=False) if one["type"] == "extra_forbidden"}

    def walk(prefix: str, node: Mapping[str, Any]) -> Iterator[str]:
        for key, value in node.items():
            if f"{prefix}{key}" in refused:
                continue
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from walk(f"{prefix}{key}.", value)

    return list(dict.fromkeys([*_fields(root, data), *walk("", data)]))


def _fields(record: type[Config], data: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of a record's fields; where there is a choice of records, of the one that the data names."""
    given = data if isinstance(data, dict) else {}
    for field, info in record.model_fields.items():
        yield f"{prefix}{field}"
        below, records = given.get(field), _records(info)
        if get_origin(info.annotation) is dict:
            for key, value in below.items() if isinstance(below, dict) else ():
                for kind in records:
                    yield from _fields(kind, value, f"{prefix}{field}.{key}.")
        elif chosen := _chosen(records, below):
            yield from _fields(chosen, below, f"{prefix}{field}.")


def _records(info: FieldInfo) -> list[type[Config]]:
    """The records that a field may hold."""
    kinds = (info.annotation, *get_args(info.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)]


def _chosen(records: list[type[Config]], data: Any) -> type[Config] | None:
    """The only one, or that which the data names."""
    if len(records) == 1:
        return records[0]
    name = data.get("name") if isinstance(data, dict) else None
    return next((one for one in records if "name" in one.model_fields and _name_of(one) == name), None)


@cache
def _name_of(record: type[Config]) -> Json:
    name: Json = record.model_fields["name"].default
    return name
