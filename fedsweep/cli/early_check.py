"""A check of names, types and ranges that imports neither torch nor timm, so that a mistake is reported at once.

The file `configurations.json` contains a JSON schema of every configuration that the command line reads. The script
`scripts/write_reference.py` writes the file. This module builds classes from the schemas. The classes have the fields
of the configurations, but not the rules that involve a model. Those rules are checked later.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, TypeAdapter, create_model

from fedsweep.common import plugins
from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.common.rules import domains_fit, known_domains_fit, one_scale, sets_ranks, sizes_given
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.results.history import LAST_ROUNDS, LAST_ROUNDS_LOSS, SIMULATED, TEST_LOSS, TESTED, validation_names

if TYPE_CHECKING:
    from fedsweep.federation.run_config import RunConfig
    from fedsweep.results.arms import Arm
    from fedsweep.sweep.plan.resolved_space import ResolvedSpace
    from fedsweep.sweep.plan.space_checks import Findings
    from fedsweep.sweep.space.requested_space import RequestedSpace

PACKAGE = Path(__file__).parents[1]
SCHEMAS = Path(__file__).with_name("configurations.json")
DECLARING = ("data", "federation", "methods", "models", "pretraining", "training")
"""The packages that declare fields of the configurations."""
PLAIN = {"integer": int, "number": float, "string": str, "boolean": bool, "null": None, "object": dict[str, Any]}
RULES = {
    "exclusiveMinimum": "gt",
    "minimum": "ge",
    "exclusiveMaximum": "lt",
    "maximum": "le",
    "multipleOf": "multiple_of",
    "minItems": "min_length",
    "maxItems": "max_length",
    "minLength": "min_length",
    "maxLength": "max_length",
    "pattern": "pattern",
}
"""Map the keywords of JSON schemas to pydantic's arguments."""
OF_SEVERAL_FIELDS: dict[str, Callable[[Any], Iterator[str]]] = {
    "DigitsData": known_domains_fit,
    "FederationConfig": sizes_given,
    "LoraConfig": one_scale,
    "PreparedData": domains_fit,
}
"""The rules of classes that involve several fields but no model."""


def check(
    root: str, content: Mapping[str, Json], where: str, changes: Mapping[str, Json], file: Path | None = None
) -> None:
    """Raise UserError if a name is unknown, or if a value has a wrong type or is out of range.

    Nothing is raised if fields were declared or changed after `configurations.json` was written.

    Args:
        root: The configuration's class, `RunConfig` or `PretrainConfig`.
        content: The values in a YAML file.
        where: The beginning of error messages.
        changes: Changes to `content`, keyed by dotted name.
        file: The YAML file with the values `content`, if any. Error messages about them begin with the place in it.
    """
    with _unless_outdated():
        _outline(root, ruled=True).of(content, where, file=file).override(changes, where)


def check_space(request: RequestedSpace) -> None:
    """Raise UserError with all mistakes in a search space that can be found without torch."""
    from fedsweep.sweep.plan.resolved_space import ResolvedSpace
    from fedsweep.sweep.plan.space_checks import find_mistakes, valid_changes
    from fedsweep.sweep.space.mistakes import Mistake

    file, where = request.files["experiment.yaml"], f"experiment {request.space.experiment}"
    content = read_yaml(file)
    with _unless_outdated():
        ruled, outline = (
            cast("RunConfig", _outline("RunConfig", rules).of(content, where, file=file)) for rules in (True, False)
        )
        base, rejected = valid_changes(outline, request.space.fixed)
        rejected = rejected or valid_changes(ruled, request.space.fixed)[1]
        resolved = ResolvedSpace(request, base)
        found = find_mistakes(resolved, rejected, one_by_one=True)
        if mistakes := [*found.mistakes, *map(Mistake, _wrong_metrics(resolved, found))]:
            raise request.origin.error(mistakes)
    if request.mistakes:
        raise request.origin.error(request.mistakes)


def all_arms(request: RequestedSpace) -> list[Arm]:
    """Return the arms of a grid, including those that `exclude` leaves out.

    Torch is imported only if fields were declared or changed after `configurations.json` was written, or if plug-ins
    are installed.

    Raises:
        UserError: The search space or its experiment has a mistake.
    """
    from fedsweep.sweep.plan.resolved_space import ResolvedSpace
    from fedsweep.sweep.plan.space_checks import valid_changes

    with _unless_outdated():
        file, where = request.files["experiment.yaml"], f"experiment {request.space.experiment}"
        outline = cast("RunConfig", _outline("RunConfig", ruled=False).of(read_yaml(file), where, file=file))
        return ResolvedSpace(request, valid_changes(outline, request.space.fixed)[0]).all_arms
    from fedsweep.sweep.plan.plan import Plan

    return Plan.of(request).all_arms


def _wrong_metrics(resolved: ResolvedSpace, found: Findings) -> list[str]:
    """Return error messages about metrics and columns; an empty list if not all metrics are known without torch."""
    from fedsweep.sweep.plan.metric_checks import wrong_metrics

    configs = [config for _, config in found.configs] or [resolved.base]
    if resolved.request.counted or any(metrics(config) is None for config in configs):
        return []
    return list(wrong_metrics(resolved, found, lambda config: metrics(config) or ()))


def metrics(config: RunConfig) -> list[str] | None:
    """Return the names of the metrics that a run reports, or None if they are not known without torch."""
    stored, data, asked = _stored(), config.data, config.evaluation.metrics
    own_models = config.partition.test_share or config.partition.tuning_share
    if asked or own_models or config.method.name in stored["methods_with_own_metrics"]:
        return None
    trained = [f"accuracy/domain/{name}" for name in data.domains if name not in data.held_out_domains]
    untrained = [f"accuracy/out_of_domain/{name}" for name in data.held_out_domains]
    held_out = ["accuracy/out_of_domain_mean", *untrained] if untrained else []
    averaged = config.evaluation.last_rounds is not None
    means = ("accuracy/mean", "accuracy/worst_domain", "accuracy/domain_spread", *[LAST_ROUNDS] * averaged)
    losses = (TEST_LOSS, *[LAST_ROUNDS_LOSS] * averaged)
    validated = validation_names((*means, *trained, *losses)) if data.validation_fraction else ()
    absent = () if sets_ranks(config.federation) else stored["metrics_of_ranks"]
    simulated = [] if config.devices == "none" else [SIMULATED]
    always = ["loss/train", *(name for name in stored["metrics"] if name not in absent), *simulated]
    return [*means, *trained, *held_out, *losses, TESTED, *validated, *always]


@contextmanager
def _unless_outdated() -> Iterator[None]:
    """Ignore UserError if fields were declared or changed after `configurations.json` was written.

    Also ignore it if plug-ins are installed, because the file does not contain their names and hyperparameters.
    """
    try:
        yield
    except UserError:
        if _stored()["declarations"] == declarations() and not plugins.installed():
            raise


def declarations() -> str:
    """Return a digest of all annotated fields of classes, and of all unions of types, in the packages `DECLARING`."""
    digest = hashlib.sha256()
    for folder in DECLARING:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines()
            for one in _declared(ast.parse(text)):
                digest.update("\n".join(lines[one.lineno - 1 : one.end_lineno]).encode())
    return digest.hexdigest()


def _declared(module: ast.Module) -> Iterator[ast.stmt]:
    for statement in module.body:
        if isinstance(statement, ast.ClassDef):
            yield from (one for one in statement.body if isinstance(one, ast.AnnAssign))
        elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp | ast.Subscript):
            yield statement


@cache
def _stored() -> dict[str, Any]:
    return dict(json.loads(SCHEMAS.read_text(encoding="utf-8")))


@cache
def _outline(root: str, ruled: bool) -> type[Config]:
    """Return a class with the fields of the configuration `root`.

    Args:
        root: The name of the configuration's class.
        ruled: Whether the class also has the rules in `OF_SEVERAL_FIELDS`.
    """
    stored = _stored()[root]
    classes: dict[str, type[Config]] = {}
    base = type(root, (Config,), {"what_a_name_is": stored["what_a_name_is"], "__module__": __name__})
    rules = OF_SEVERAL_FIELDS if ruled else {}
    bases = {
        name: type(name, (Config,), {"_violations": lambda self, rule=rule: rule(self), "__module__": __name__})
        for name, rule in rules.items()
    }
    return _class(root, stored["schema"], stored["schema"].get("$defs", {}), classes, {root: base, **bases})


def _class(
    name: str,
    schema: dict[str, Any],
    schemas: dict[str, Any],
    classes: dict[str, type[Config]],
    bases: Mapping[str, type[Config]],
) -> type[Config]:
    """Return a class with the properties of a schema, and add the classes of its properties to `classes`.

    Args:
        name: The name of the new class.
        schema: The schema of the class.
        schemas: The schemas of all nested configurations, keyed by class name.
        classes: The classes of nested configurations that exist already.
        bases: The base classes, keyed by the name of the new class; `Config` for other classes.
    """

    def kind(schema: dict[str, Any]) -> Any:
        bounds = {ours: schema[theirs] for theirs, ours in RULES.items() if theirs in schema}
        return Annotated[bare(schema), Field(**bounds)] if bounds else bare(schema)

    def bare(schema: dict[str, Any]) -> Any:
        if reference := schema.get("$ref"):
            nested = reference.rsplit("/", 1)[-1]
            if nested not in classes:
                classes[nested] = _class(nested, schemas[nested], schemas, classes, bases)
            return classes[nested]
        if "const" in schema or "enum" in schema:
            return Literal[tuple(schema.get("enum", [schema.get("const")]))]
        if several := schema.get("anyOf", schema.get("oneOf")):
            union = reduce(or_, map(kind, several))
            return Annotated[union, Field(discriminator="name")] if "discriminator" in schema else union
        if "prefixItems" in schema:
            return tuple.__class_getitem__(tuple(map(kind, schema["prefixItems"])))
        if schema.get("type") == "array":
            return tuple.__class_getitem__((kind(schema["items"]), ...))
        return PLAIN.get(schema.get("type", ""), Any)

    def default(schema: dict[str, Any], annotation: Any) -> Any:
        if "default" not in schema:
            return Field()
        value = schema["default"]
        if isinstance(value, dict | list):
            value = TypeAdapter(annotation).validate_json(json.dumps(value))
        return Field(default_factory=lambda: value) if schema.get("made") else Field(value)

    kinds = {field: kind(one) for field, one in schema.get("properties", {}).items()}
    fields: dict[str, Any] = {
        field: (annotation, default(schema["properties"][field], annotation)) for field, annotation in kinds.items()
    }
    return create_model(name, __base__=bases.get(name, Config), **fields)
