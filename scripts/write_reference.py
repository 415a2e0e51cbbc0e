"""Write the pages in docs/reference/ from the code: commands, hyperparameters, search spaces and so on.

Also write fedsweep/cli/configurations.json, which contains JSON schemas of the configurations, and the JSON schemas for
editors in schemas/.

uv run python scripts/write_reference.py           # write
uv run python scripts/write_reference.py --check   # exit with code 1 if a page is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

import file_reference
import json_schemas
import python_reference
from fedsweep.cli import app, early_check, json_output, json_results
from fedsweep.common import plugins
from fedsweep.common.config import Config
from fedsweep.federation.rounds import ROUND_METRICS
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import OwnMetrics
from fedsweep.pretraining.config import PretrainConfig
from fedsweep.results.history import ENERGY
from fedsweep.sweep.space.axes import Axis
from fedsweep.sweep.space.search_space import SearchSpace
from fedsweep.training.costs import COST_METRICS

NAMED = ("properties", "$defs")
"""The keywords of a JSON schema whose values are mappings from names to schemas."""
FOLDER = Path(__file__).parents[1] / "docs" / "reference"
GENERATED = "<!-- Written by scripts/write_reference.py; change the code, not this page. -->"
RULES = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "names and values"}
CHOICES = {"data": "kind of data", "synthetic": "source of synthetic images"}
"""Descriptions of the parts of a configuration whose names do not describe a choice."""


def pages() -> dict[str, str]:
    """Return a dict from the file name of every page to its text."""
    return {
        "cli.md": _wrapped(command_line()),
        "hyperparameters.md": _wrapped(hyperparameters()),
        "json.md": _wrapped(json_documents()),
        "python.md": _wrapped(f"# Python\n\n{GENERATED}\n\n{python_reference.page()}"),
        "search_spaces.md": _wrapped(files()),
    }


def schemas() -> str:
    """Return a JSON document with the schemas of `RunConfig` and `PretrainConfig`, without titles and descriptions.

    The document also lists the metrics that depend on no option, those among them that only runs with
    `federation.ranks` report, and the methods that report other metrics.
    """
    found: dict[str, Any] = {"declarations": early_check.declarations()}
    found["metrics"] = [*ROUND_METRICS, ENERGY, *COST_METRICS]
    found["metrics_of_ranks"] = [ENERGY]
    methods = (one for one in _nested(RunConfig) if issubclass(one, OwnMetrics))
    found["methods_with_own_metrics"] = sorted(str(one.model_fields["name"].default) for one in methods)
    for root in (RunConfig, PretrainConfig):
        schema = _bare(root.model_json_schema())
        for record in _nested(root):
            own = schema if record is root else schema["$defs"][record.__name__]
            for name, field in record.model_fields.items():
                if field.default_factory is not None:  # pydantic leaves these defaults out
                    made = field.get_default(call_default_factory=True, validated_data={})
                    value = made.model_dump(mode="json") if isinstance(made, Config) else made
                    own["properties"][name] |= {"default": value, "made": True}
        found[root.__name__] = {"what_a_name_is": root.what_a_name_is, "schema": schema}
    return json.dumps(found, indent=1) + "\n"


def _bare(schema: Any, named: bool = False) -> Any:
    """Return a JSON schema without titles and descriptions. The keys of `schema` are names if `named` is true."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: one for key, one in schema.items() if named or key not in ("title", "description")}
    return {key: one if key == "default" and not named else _bare(one, key in NAMED) for key, one in kept.items()}


def _nested(record: type[Config]) -> set[type[Config]]:
    """Return a configuration class and all classes nested in it."""
    inner = [one for field in record.model_fields.values() for one in _records(field)]
    return {record}.union(*map(_nested, inner))


def _wrapped(page: str) -> str:
    """Wrap paragraphs that are longer than 120 characters. Tables stay as they are; code blocks have shorter lines."""
    lines = (
        textwrap.fill(
            line, 118, subsequent_indent="  " * line.startswith("- "), break_long_words=False, break_on_hyphens=False
        )
        if len(line) > 120 and line[0] != "|"
        else line
        for line in page.splitlines()
    )
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """Return the page about the command line, which has a section for each command."""
    group = typer.main.get_command(app)
    lines = ["# Command line", "", GENERATED, "", f"{group.help}", ""]
    lines += [
        "If your input is invalid, fedsweep prints one sentence to stderr and exits with code 2. "
        "After Ctrl-C, the exit code is 130. [JSON output](json.md#errors-and-exit-codes) lists all exit codes.",
        "",
    ]
    for verb, command in _verbs(group):
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        options = [one for one in command.params if one.param_type_name == "option"]
        usage = " ".join(["fedsweep", verb, *map(_placeholder, arguments), *(["[OPTIONS]"] if options else [])])
        lines += [f"## {verb}", "", "```text", usage, "```", "", " ".join(command.help.split("\n\n")[0].split()), ""]
        lines += ["\n\n".join(command.help.split("\n\n")[1:]).strip(), ""]
        rows = [[f"`{_placeholder(one)}`", one.help, ""] for one in arguments]
        rows += [[f"`{', '.join(one.opts)}`", one.help, _default(one)] for one in options]
        if rows:
            lines += [*_table(["", "description", "default"], rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _verbs(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the definition of every command; the name of a subcommand has two words, e.g. `data show`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _placeholder(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _default(option: Any) -> str:
    words = [] if option.default in (None, False) else [f"`{option.default}`"]
    if option.envvar:
        words.append(f"or `${option.envvar}`")
    return " ".join(words)


def hyperparameters() -> str:
    """Return the page about the hyperparameters of runs, of search spaces and of pre-trainings."""
    lines = ["# Hyperparameters", "", GENERATED, ""]
    lines += [
        "Each hyperparameter has the same dotted name in experiments, in search spaces, on the command line and in "
        "MLflow."
    ]
    lines += ["`fedsweep show fedra_digits` prints all hyperparameters of an experiment with their values.", ""]
    rows = [row for name, field in RunConfig.model_fields.items() if not _records(field) for row in [_row(name, field)]]
    lines += ["## the run itself", "", *_fields_table(rows), ""]
    for part, field in RunConfig.model_fields.items():
        for record in _records(field):
            lines += [*_section(part, record), ""]
    lines += ["# Search spaces", "", "A YAML file in `search_spaces/` has these entries:", ""]
    rows = [_row(name, field) for name, field in SearchSpace.model_fields.items()]
    about = "Each entry of `space` is an axis. To define the values of an axis, set exactly one of the fields from "
    about += "`grid` to `loginteger`. The fields `step` and `when` are optional."
    lines += [*_fields_table(rows), "", "## axes", "", about, ""]
    lines += [*_fields_table([_row(name, field) for name, field in Axis.model_fields.items()]), ""]
    for part, field in SearchSpace.model_fields.items():
        for record in _records(field):
            if record is not Axis:
                form = f" with `{next(iter(record.model_fields))}`" if part == "seeds" else ""
                lines += [*_section(part, record, form), ""]
    lines += ["# Pre-trainings", "", "A YAML file in `experiments/pretrain/` has these entries:", ""]
    rows = [_row(name, field) for name, field in PretrainConfig.model_fields.items()]
    lines += [*_fields_table(rows), ""]
    for part, field in PretrainConfig.model_fields.items():
        if part not in RunConfig.model_fields or part == "optimizer":
            for record in _records(field):
                lines += [*_section(part, record), ""]
    return "\n".join(lines).rstrip() + "\n"


def json_documents() -> str:
    """Return the page about the JSON documents that commands print with `--format json`."""
    lines = ["# JSON output", "", GENERATED, ""]
    lines += [
        "With `--format json`, a command prints exactly one JSON document to stdout. Progress, warnings and everything "
        "else that is meant for people goes to stderr.",
        "",
        f"Each document is an object with the field `format`, whose value is {json_output.FORMAT}, the field `command` "
        "and the fields below. `format` changes if a field is removed or gets another meaning. New fields can be added "
        "at any time. Numbers that are not finite, such as the standard deviation of a single seed, are `null`.",
        "",
        "There is one exception: `fedsweep run` prints one line of JSON for each evaluated round, so a program can "
        "read the lines while the run goes on. Each line is an object with the field `round` and one field for each "
        "metric.",
        "",
        "Means, differences and intervals have the unit of the objective; accuracies are between 0 and 1. Times are in "
        "UTC, as in ISO 8601.",
        "",
        "## Errors and exit codes",
        "",
        *_table(["exit code", "meaning"], [list(one) for one in json_output.EXIT_CODES.items()]),
        "",
        "If a command ends with an error, the document has these fields instead:",
        "",
        *_table(["field", "content"], [[f"`{name}`", about] for name, about in json_output.ERROR.items()]),
        "",
        "A sweep of which trials have failed ends with the usual document and exit code 1. The document lists these "
        "trials, with their tracebacks, under `failures`.",
        "",
    ]
    for title, fields in [*json_output.FIELDS.items(), *json_output.NESTED.items()]:
        rows = [[f"`{name}`".replace(", ", "`, `"), about] for name, about in fields.items()]
        lines += [f"## {title}", "", *_table(["field", "content"], rows), ""]
    verdicts = [[f"`{name}`".replace(", ", "`, `"), about] for name, about in json_results.VERDICTS.items()]
    lines += ["## Verdicts", "", *_table(["verdict", "meaning"], verdicts), ""]
    return "\n".join(lines).rstrip() + "\n"


def files() -> str:
    """Return the page about the shipped search spaces, experiments and pre-trainings."""
    lines = ["# Search spaces and experiments", "", GENERATED]
    for one in file_reference.lines():
        lines += ["", *([one] if isinstance(one, str) else _table(one[0], one[1:]))]
    return "\n".join(lines) + "\n"


def _section(part: str, record: type[Config], form: str = "") -> list[str]:
    """Return the lines of a page's section on a configuration class: its heading, its description and its fields.

    `form` ends the heading, if an entry has several forms without names.
    """
    named = record.model_fields.get("name")
    heading = f"## {part}{form}" if named is None else f"## {part}: {named.default}"
    rows = list(_rows(part, record))
    about = " ".join((record.__doc__ or "").split())
    if named is not None:
        about += f" Set `{part}.name` to `{named.default}` to select this {CHOICES.get(part, part.replace('_', ' '))}."
    return [heading, "", about, *(["", *_fields_table(rows)] if rows else [])]


def _rows(part: str, record: type[Config], of: str = "") -> Iterator[list[str]]:
    """Yield a table row for each field of a configuration class, and for the fields of classes nested in it.

    Nested classes that have a section of their own are left out.
    """
    described = {one for field in RunConfig.model_fields.values() for one in _records(field)}
    for name, field in record.model_fields.items():
        if name != "name":
            *row, about = _row(f"{part}.{name}", field)
            yield [*row, f"{of}{about}"]
            for inner in _records(field) if get_origin(field.annotation) is not tuple else []:
                if inner not in described:
                    kind = inner.model_fields.get("name")
                    yield from _rows(f"{part}.{name}", inner, f"only for {kind.default}: " if kind else "")


def _records(field: FieldInfo) -> list[type[Config]]:
    """Return the configuration classes whose instances a field can contain."""
    asked = (field.annotation, *get_args(field.annotation))
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in asked]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)]


def _row(name: str, field: FieldInfo) -> list[str]:
    if field.is_required():
        default = "required"
    else:
        # A factory that depends on other values has no fixed default, and an empty container is not worth showing.
        own = not field.default_factory_takes_validated_data
        there = field.get_default(call_default_factory=True) if own else None
        given = getattr(there, "name", None) if isinstance(there, Config) else there
        made = field.default_factory is not None or isinstance(there, Config)
        default = "" if made and not isinstance(given, str) else f"`{json.dumps(given)}`"
    kind = _kind(field.annotation).removesuffix(" or `null`")
    null = ["or `null`"] if NoneType in get_args(field.annotation) else []
    filled = ["not empty" for rule in field.metadata if getattr(rule, "min_length", None)]
    patterns = [f"that matches `{rule.pattern}`" for rule in field.metadata if getattr(rule, "pattern", None)]
    value = ", ".join([" ".join([kind, *_rules(field.metadata), *patterns]), *filled, *null])
    return [f"`{name}`", value, default, field.description or "see below"]


def _kind(annotation: Any) -> str:
    """Return a type annotation in plain words, such as `whole number`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in PLAIN:
        return PLAIN[annotation]
    if annotation is NoneType:
        return "`null`"
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin is Annotated:
        return " ".join(
            [_kind(inner[0]), *(rule for one in inner[1:] for rule in _rules(getattr(one, "metadata", [])))]
        )
    if origin is tuple:
        kind = _kind(inner[0]).removesuffix(" or `null`")
        plural = re.sub(r"\bnumber\b", "numbers", kind, count=1)
        return f"list of {plural}" if inner[-1] is Ellipsis else f"list of {len(inner)} {plural}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, Config)):
        return PLAIN[dict]
    if set(PLAIN) - {dict} <= set(inner):  # config.Json
        return "any value"
    return " or ".join(dict.fromkeys(map(_kind, inner)))


def _rules(metadata: list[Any]) -> list[str]:
    """Return a list with one phrase for the bounds of a field, such as `≥ 0 and < 1`, or an empty list."""
    bounds = [(sign, getattr(rule, attribute, None)) for rule in metadata for attribute, sign in RULES.items()]
    rules = [f"{sign} {bound:g}" for sign, bound in bounds if bound is not None]
    return [" and ".join(rules)] if rules else []


def _fields_table(rows: list[list[str]]) -> list[str]:
    return _table(["name", "value", "default", "description"], rows)


def _table(headings: list[str], rows: list[list[str]]) -> list[str]:
    cells = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def main() -> None:
    """Write the pages or, with `--check`, compare the existing pages with the code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a page is out of date")
    check = parser.parse_args().check
    if others := ", ".join(plugins.versions()):
        raise SystemExit(f"uninstall these packages first, so that the reference does not contain them: {others}")
    files = {FOLDER / name: text for name, text in pages().items()} | {early_check.SCHEMAS: schemas()}
    files |= {json_schemas.FOLDER / name: text for name, text in json_schemas.documents().items()}
    stale = {path: text for path, text in files.items() if not _same(path, text)}
    names = ", ".join(path.name for path in stale)
    if check and stale:
        raise SystemExit(f"the reference is out of date: {names}; run scripts/write_reference.py")
    if not check:
        for path, text in stale.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print(f"written: {names}" if stale else "docs/reference, configurations.json and schemas are up to date")


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    main()
