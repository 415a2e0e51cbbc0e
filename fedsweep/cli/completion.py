"""The completion of names in bash, zsh and fish, which reads files and stored schemas and loads no heavy package."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from functools import wraps
from pathlib import Path
from typing import Any

from typer import Context

from fedsweep.common.paths import RESULTS, Kind, available, data_folder, results_folder, summary
from fedsweep.common.yaml_values import read_yaml

Candidates = list[tuple[str, str]]
"""Completed words, each with a description, which may be empty."""
INSTRUCTION = "_FEDSWEEP_COMPLETE"
"""The environment variable with which the script of a shell asks for completions."""
SEPARATORS = re.compile("[=:@]+")
"""The characters in names at which bash divides a word."""
SCHEMAS = Path(__file__).with_name("configurations.json")
MEANS = ("accuracy/mean", "accuracy/worst_domain", "accuracy/domain_spread", "loss/train", "loss/test")
AVERAGES = ("accuracy/last_rounds", "loss/last_rounds")


def in_whole_words(command: Callable[[], object]) -> object:
    """Run the command line, and answer bash in whole words, because bash divides words such as `method=fedra`.

    In the other cases, only run the command line.
    """
    if os.environ.get(INSTRUCTION) != "complete_bash" or "COMP_WORDS" not in os.environ:
        return command()
    words, place = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
    whole = joined(words[: place + 1])
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(whole), str(len(whole) - 1)
    last = words[place] if place < len(words) else ""
    before = whole[-1].removesuffix("" if SEPARATORS.fullmatch(last) else last)
    answer = io.StringIO()
    try:
        with redirect_stdout(answer):
            return command()
    finally:
        print(*(line.removeprefix(before) for line in answer.getvalue().splitlines()), sep="\n")


def joined(words: Iterable[str]) -> list[str]:
    """Join the parts of words that bash has divided.

    >>> joined(["fedsweep", "run", "fedra_digits", "method", "=", "fe"])
    ['fedsweep', 'run', 'fedra_digits', 'method=fe']
    """
    whole: list[str] = []
    after_separator = False
    for word in words:
        separator = SEPARATORS.fullmatch(word) is not None
        if whole and (separator or after_separator):
            whole[-1] += word
        else:
            whole.append(word)
        after_separator = separator
    return whole


def _quiet(complete: Callable[[Context, str], Candidates]) -> Callable[[Context, str], Candidates]:
    """Return a function that completes nothing if it fails, for example because a file cannot be read."""

    @wraps(complete)
    def answer(ctx: Context, incomplete: str) -> Candidates:
        with suppress(Exception):  # a traceback would cover the command that is being typed
            return complete(ctx, incomplete)
        return []

    return answer


def choices(*values: str) -> Callable[[Context, str], Candidates]:
    """Return a function that completes one of the given values."""

    def complete(ctx: Context, incomplete: str) -> Candidates:
        return [(value, "") for value in values]

    return complete


def files(*kinds: Kind) -> Callable[[Context, str], Candidates]:
    """Return a function that completes the names of YAML files of some kinds."""

    @_quiet
    def complete(ctx: Context, incomplete: str) -> Candidates:
        found = {name: path for kind in kinds for name, path in available(kind).items()}
        return [(name, summary(path)) for name, path in found.items() if name.startswith(incomplete)]

    return complete


def _sweeps(ctx: Context) -> list[tuple[str, str]]:
    """Return the search space and the id of each sweep in a local results folder, newest first."""
    store = str(ctx.params.get("store") or RESULTS)
    root = results_folder(store) / "sweeps"
    if "://" in store:
        return []
    found: list[tuple[str, str]] = []
    for folder, below, names in os.walk(root):
        if "sweep.json" in names:
            below.clear()
            path = Path(folder).relative_to(root)
            found.append((path.parent.as_posix(), path.name))
    return sorted(found, key=lambda one: one[1], reverse=True)


@_quiet
def sweeps(ctx: Context, incomplete: str) -> Candidates:
    """Complete a search space of which there is a sweep or, after `@`, the id of one of its sweeps."""
    found = _sweeps(ctx)
    if "@" in incomplete:
        return [(f"{space}@{sweep}", "") for space, sweep in found]
    counts = {space: sum(one == space for one, _ in found) for space, _ in found}
    return [(space, f"{count} sweep{'s' * (count > 1)}") for space, count in sorted(counts.items())]


@_quiet
def spaces_or_sweeps(ctx: Context, incomplete: str) -> Candidates:
    """Complete a search space or, if `--resume` precedes it, a sweep."""
    complete = sweeps if ctx.params.get("resume") else files("search_spaces")
    return complete(ctx, incomplete)


@_quiet
def sweep_ids(ctx: Context, incomplete: str) -> Candidates:
    """Complete the id of a sweep of the search space that precedes it."""
    named = _first_argument(ctx)
    return [(sweep, space) for space, sweep in _sweeps(ctx) if named in (None, space)]


@_quiet
def prepared_sets(ctx: Context, incomplete: str) -> Candidates:
    """Complete the name of a prepared data set."""
    names = {path.parent.name.rpartition("-")[0] for path in data_folder().glob("*/card.json")}
    return [(name, "") for name in sorted(names)]


@_quiet
def columns(ctx: Context, incomplete: str) -> Candidates:
    """Complete the last name of a list of columns."""
    from fedsweep.results.table_columns import COLUMNS

    before, comma, last = incomplete.rpartition(",")
    _, content = _content(ctx)
    given = content.get("data")  # or only its name
    domains = [f"accuracy/domain/{one}" for one in (given.get("domains") if isinstance(given, dict) else ()) or ()]
    names = [*COLUMNS, *MEANS, *AVERAGES, *domains, *stored_schemas()["metrics"]]
    return [(f"{before}{comma}{name}", "") for name in dict.fromkeys(names) if name.startswith(last)]


@_quiet
def overrides(ctx: Context, incomplete: str) -> Candidates:
    """Complete the dotted name of a hyperparameter or, after `=`, one of its values."""
    root, content = _content(ctx)
    current = _flat(content)
    name, equals, _ = incomplete.partition("=")
    if equals:
        return [(f"{name}={value}", "") for value in _values(root, name, current)]
    matching = [one for one in current if one.startswith(incomplete)]
    found = [(f"{one}=", "") for one in matching]
    if len(matching) == 1:  # a shell appends a space to a completion that is the only one
        found += [(f"{matching[0]}={value}", "") for value in _values(root, matching[0], current)]
    return found


def _first_argument(ctx: Context) -> str | None:
    """Return the search space, experiment or name that the command line contains, if any.

    While the value of an option is completed, the arguments are not parsed and are in `ctx.args`.
    """
    given = ctx.params.get("space") or ctx.params.get("experiment") or ctx.params.get("name")
    return given or next(iter(ctx.args), None)


def _content(ctx: Context) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the configuration class and the content of the YAML file that the command line names."""
    name, spaces = _first_argument(ctx), available("search_spaces")
    if ctx.info_name == "pretrain" and name:
        return "PretrainConfig", read_yaml(available("pretrain")[name])
    in_space = read_yaml(spaces[name])["experiment"] if name in spaces else name
    path = available("experiments").get(str(ctx.params.get("experiment") or in_space))
    return "RunConfig", read_yaml(path) if path else {}


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a YAML file by dotted name. A part with a `name`, such as `method`, has its name's value."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if not isinstance(value, dict):
            found[f"{prefix}{key}"] = value
            continue
        if "name" in value:
            found[f"{prefix}{key}"] = value["name"]
        inner = _flat({one: other for one, other in value.items() if one != "name"}, f"{prefix}{key}.")
        found |= inner
    return found


def _values(root: str, dotted: str, current: Mapping[str, Any]) -> list[str]:
    """Return the values that a hyperparameter can have if they are enumerated, or else its value in the YAML file."""
    stored = stored_schemas()[root]["schema"]
    schemas = [stored]
    for part in dotted.split("."):
        schemas = [
            found
            for schema in schemas
            for one in _alternatives(schema, stored["$defs"])
            if (found := one.get("properties", {}).get(part)) is not None
        ]
    known = [value for schema in schemas for value in _enumerated(schema, stored["$defs"])]
    value = current.get(dotted)
    if not known and isinstance(value, str | int | float):
        known = [value if isinstance(value, str) else json.dumps(value)]
    return list(dict.fromkeys(known))


def _enumerated(schema: Mapping[str, Any], nested: Mapping[str, Any]) -> Iterator[str]:
    """Yield the enumerated values of a schema. The values of a part with a `name` are the possible names."""
    for one in _alternatives(schema, nested):
        if one.get("type") == "boolean":
            yield from ("true", "false")
        if one.get("type") == "null":
            yield "null"
        named = one.get("properties", {}).get("name", one)
        values = named.get("enum", [named["const"]] if "const" in named else [])
        yield from (value if isinstance(value, str) else json.dumps(value) for value in values)


def _alternatives(schema: Mapping[str, Any], nested: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if reference := schema.get("$ref"):
        yield from _alternatives(nested[reference.rsplit("/", 1)[-1]], nested)
    elif several := schema.get("anyOf", schema.get("oneOf")):
        for one in several:
            yield from _alternatives(one, nested)
    else:
        yield schema


def stored_schemas() -> dict[str, Any]:
    """Return the schemas of the configurations, and the metrics that most runs report."""
    return dict(json.loads(SCHEMAS.read_text(encoding="utf-8")))
