"""Build the JSON schemas in schemas/, with which editors complete and check experiments and search spaces.

The schemas follow draft 7, which the YAML language server supports best. scripts/write_reference.py writes the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedsweep.common.config import Config
from fedsweep.federation.run_config import RunConfig
from fedsweep.pretraining.config import PretrainConfig
from fedsweep.results.arms import ABLATED, NAMED
from fedsweep.sweep.space.search_space import SearchSpace

FOLDER = Path(__file__).parents[1] / "schemas"
Schema = dict[str, Any]
SEVERAL = ("anyOf", "oneOf", "allOf")
NOT_VARIED = ("seed",)
"""Hyperparameters that a search space must not set; it lists the seeds in `seeds`."""
SWITCH = {"enum": ["on", "off"]}
"""The words with which `ablate` may switch a component on or off."""
JOINED = "^[^,]+(,[^,]+)+$"
"""The pattern of a key of `space` that joins several names."""


def documents() -> dict[str, str]:
    """Return the text of each schema by file name."""
    made = {
        "experiment.json": _of_class(RunConfig, "An experiment of fedsweep."),
        "search_space.json": _search_space(),
        "pretrain.json": _of_class(PretrainConfig, "A pre-training configuration of fedsweep."),
    }
    return {name: _text(schema) for name, schema in made.items()}


def _text(schema: Schema) -> str:
    """Return a schema as JSON text with one line for each entry, so that the files stay small and changes readable."""
    parts = []
    for key, value in schema.items():
        whole = json.dumps(value, ensure_ascii=False)
        if key in ("$defs", "properties"):
            entries = (f"  {json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in value.items())
            whole = "{\n" + ",\n".join(entries) + "\n }"
        parts.append(f" {json.dumps(key)}: {whole}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _of_class(root: type[Config], about: str) -> Schema:
    """Return the schema of a configuration class, in which nested configurations may be given by their names."""
    schema = root.model_json_schema()
    definitions = schema.get("$defs", {})
    for record in _classes(root):
        own = schema if record is root else definitions[record.__name__]
        for name, made in _made_defaults(record):
            own["properties"][name]["default"] = made
    schema = _adapted(schema, _names(schema))
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "description": about}


def _classes(record: type[BaseModel]) -> set[type[BaseModel]]:
    """Return a configuration class and all configuration classes nested in it."""
    found: set[type[BaseModel]] = {record}
    waiting: list[Any] = [field.annotation for field in record.model_fields.values()]
    while waiting:
        kind = waiting.pop()
        waiting += getattr(kind, "__args__", ())
        if isinstance(kind, type) and issubclass(kind, Config) and kind not in found:
            found.add(kind)
            waiting += [field.annotation for field in kind.model_fields.values()]
    return found


def _made_defaults(record: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """Yield the fields whose default is made by a function, which pydantic leaves out, with the default."""
    for name, field in record.model_fields.items():
        if field.default_factory is not None and not field.default_factory_takes_validated_data:
            made = field.get_default(call_default_factory=True)
            yield name, made.model_dump(mode="json") if isinstance(made, Config) else made


def _names(schema: Schema) -> dict[str, str]:
    """Return the value of `name` of each class in `$defs` that has this field, by reference."""
    found = {}
    for title, definition in schema.get("$defs", {}).items():
        if (name := definition.get("properties", {}).get("name", {}).get("const")) is not None:
            found[f"#/$defs/{title}"] = name
    return found


def _adapted(node: Any, names: dict[str, str], named: bool = False) -> Any:
    """Return a schema of pydantic in draft 7, without titles, in which a configuration may be given by its name.

    Args:
        node: The schema, or a part of it.
        names: The value of `name` of each class that has this field, by reference.
        named: Whether the keys of `node` are names of values and not keywords.
    """
    if isinstance(node, list):  # the branches of a union, whose references `_by_name` needs
        return [one if [*one] == ["$ref"] else _adapted(one, names) for one in node]
    if not isinstance(node, dict):
        return node
    if named:
        return {key: _adapted(one, names) for key, one in node.items()}
    union = "discriminator" in node
    kept: Schema = {}
    for key, value in node.items():
        if key == "description":
            kept[key] = " ".join(value.split())
        elif key in ("default", "const", "enum", "required"):
            kept[key] = value
        elif key == "prefixItems":
            kept["items"] = _adapted(value, names)
        elif key not in ("title", "discriminator"):
            kept["anyOf" if union and key == "oneOf" else key] = _adapted(value, names, key in ("properties", "$defs"))
    return _by_name(kept, names, union)


def _by_name(node: Schema, names: dict[str, str], union: bool) -> Schema:
    """Return a schema that also accepts the name of a configuration in place of its mapping."""
    reference = node.pop("$ref", None)
    branches = node.get("anyOf", [{"$ref": reference}] if reference else [])
    refs = [one["$ref"] for one in branches if one.get("$ref") in names]
    if union:
        whole = [{"allOf": [one, {"required": ["name"]}]} if "$ref" in one else one for one in branches]
        return {**node, "anyOf": [{"enum": [names[one] for one in refs]}, *whole]}
    if refs and not any("enum" in one for one in branches):
        return {**node, "anyOf": [{"enum": [names[one] for one in refs]}, *branches]}
    if reference is None:
        return node
    # Draft 7 ignores keywords next to `$ref`.
    return {**node, "allOf": [{"$ref": reference}]} if node else {"$ref": reference}


def _search_space() -> Schema:
    """Return the schema of a search space, which knows the dotted names of all hyperparameters."""
    schema, run = (_of_class(root, "A search space of fedsweep.") for root in (SearchSpace, RunConfig))
    definitions, of_run = schema["$defs"], run["$defs"]
    if both := {*definitions} & {*of_run}:
        raise ValueError(f"two classes have the name {both}")
    values = {name: _merged(found) for name, found in _flat(run, of_run).items() if name not in NOT_VARIED}
    refs = {name: {"$ref": f"#/$defs/{name}"} for name in values}
    axes = {name: _axis(about, refs[name]) for name, about in values.items()}
    arm = {NAMED: {"type": "string"}, ABLATED: {"type": "array", "items": {"enum": [*values]}}}
    definitions |= {
        **of_run,
        **values,
        "changes": _mapping(refs, "hyperparameters by dotted name"),
        "components": _mapping({name: {"anyOf": [one, SWITCH]} for name, one in refs.items()}, "components by name"),
        "arm": _mapping({**refs, **arm}, "values of an arm by dotted name"),
        "when": _mapping({name: _one_or_several(one) for name, one in refs.items()}, "conditions by dotted name"),
        "axes": {**_mapping(axes, "axes by dotted name"), "patternProperties": {JOINED: {"$ref": "#/$defs/Axis"}}},
    }
    properties = schema["properties"]
    for owner, entry, kind in (
        (properties, "fixed", "changes"),
        (properties, "ablate", "components"),
        (properties, "space", "axes"),
        (properties, "baseline", "arm"),
        (definitions["TuneEach"]["properties"], "space", "axes"),
        (definitions["Axis"]["properties"], "when", "when"),
        (definitions["DeclaredComparison"]["properties"], "arm", "arm"),
        (definitions["DeclaredComparison"]["properties"], "against", "arm"),
        (definitions["ReferenceArm"]["properties"], "arm", "arm"),
    ):
        _refer(owner[entry], kind)
    _refer(properties["named"], None, {"$ref": "#/$defs/changes"})
    for search in ("TPESearch", "RandomSearch"):
        definitions[search]["properties"]["first"]["items"] = {"$ref": "#/$defs/arm"}
    return schema


def _refer(entry: Schema, kind: str | None, item: Schema | None = None) -> None:
    """Let a property whose value is a mapping with any names refer to the definition `kind`.

    If `kind` is None, the names remain free, and `item` is the schema of the values.
    """
    whole = next((one for one in entry.get("anyOf", ()) if one.get("type") == "object"), entry)
    if kind is None:
        whole["additionalProperties"] = item
        return
    least = {"minProperties": whole["minProperties"]} if "minProperties" in whole else {}
    about = {key: whole[key] for key in ("description", "default") if key in whole}
    whole.clear()
    whole |= {**about, "allOf": [{"$ref": f"#/$defs/{kind}"}], **least}


def _flat(record: Schema, definitions: Schema, prefix: str = "") -> dict[str, list[Schema]]:
    """Return the schemas of all hyperparameters by dotted name. Several classes may declare the same name."""
    found: dict[str, list[Schema]] = {}
    for name, schema in record.get("properties", {}).items():
        about = next((one.get("description") for one in _definitions(schema, definitions)), None)
        found.setdefault(f"{prefix}{name}", []).append({**({"description": about} if about else {}), **schema})
        for nested in _definitions(schema, definitions):
            for inner, several in _flat(nested, definitions, f"{prefix}{name}.").items():
                found.setdefault(inner, []).extend(several)
    return found


def _definitions(schema: Schema, definitions: Schema) -> Iterator[Schema]:
    if reference := schema.get("$ref"):
        yield definitions[reference.removeprefix("#/$defs/")]
    for key in SEVERAL:
        for one in schema.get(key, ()):
            yield from _definitions(one, definitions)


def _merged(found: list[Schema]) -> Schema:
    """Return one schema for a hyperparameter that several classes declare, without its default."""
    abouts = dict.fromkeys(one["description"] for one in found if "description" in one)
    bare = [{key: one for key, one in schema.items() if key not in ("description", "default")} for schema in found]
    distinct = list({json.dumps(one, sort_keys=True): one for one in bare}.values())
    constants = [one["const"] for one in distinct if "const" in one]
    about: Schema = {"description": "; or ".join(abouts)} if len(abouts) <= 3 and abouts else {}
    if len(constants) == len(distinct):
        return {**about, "enum": constants}
    return {**about, **distinct[0]} if len(distinct) == 1 else {**about, "anyOf": distinct}


def _axis(about: Schema, value: Schema) -> Schema:
    """Return the schema of an axis whose listed values are values of one hyperparameter."""
    listed = {"items": value}
    described = {"description": about["description"]} if "description" in about else {}
    return {**described, "allOf": [{"$ref": "#/$defs/Axis"}, {"properties": {"grid": listed, "choice": listed}}]}


def _one_or_several(value: Schema) -> Schema:
    return {"anyOf": [value, {"type": "array", "items": value}]}


def _mapping(properties: Schema, about: str) -> Schema:
    return {"type": "object", "description": about, "properties": properties, "additionalProperties": False}
