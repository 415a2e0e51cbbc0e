"""The page of the reference about the Python interface, from the signatures and docstrings of `fedsweep.api`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from fedsweep import api

SOURCE = api.__file__
PUBLIC = ("load_experiment", "run", "tune", "load_report", "RunResult")
"""The names on the page, in this order."""
SECTION = re.compile(r"^(Args|Returns|Raises):$")


def page() -> str:
    """Return the text of the page without its heading."""
    with open(SOURCE, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    found = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    lines = ["The module `fedsweep` has these functions. [This guide](../guides/python.md) shows examples."]
    for name in PUBLIC:
        lines += ["", f"## {name}", "", *_documented(found[name])]
    return "\n".join(lines) + "\n"


def _documented(one: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """Yield the lines about a function or a class: its signature or its fields, and its docstring as Markdown."""
    if isinstance(one, ast.FunctionDef):
        yield from ["```python", *_signature(one), "```", ""]
        yield from markdown(ast.get_docstring(one) or "")
        return
    yield from [*markdown(ast.get_docstring(one) or ""), "", "| name | type | content |", "| --- | --- | --- |"]
    for field, after in zip(one.body, [*one.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            said = after.value if isinstance(after, ast.Expr) else None
            about = str(said.value) if isinstance(said, ast.Constant) else ""
            yield f"| `{ast.unparse(field.target)}` | `{ast.unparse(field.annotation)}` | {' '.join(about.split())} |"
        elif isinstance(field, ast.FunctionDef) and not field.name.startswith("_"):
            kind = ast.unparse(field.returns) if field.returns else ""
            yield f"| `{field.name}` | `{kind}` | {' '.join((ast.get_docstring(field) or '').split())} |"


def _signature(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the lines of a signature, with one argument per line."""
    given = function.args
    defaults: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults)) + [*given.defaults]
    arguments = [*zip(given.args, defaults, strict=True)]
    if given.kwonlyargs:
        arguments += [(ast.arg("*"), None), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    yield f"{function.name}("
    for argument, default in arguments:
        yield f"    {ast.unparse(argument)}{'' if default is None else f' = {_value(default)}'},"
    yield f") -> {ast.unparse(function.returns) if function.returns else 'None'}"


def _value(default: ast.expr) -> str:
    """Return a default value as source code; a constant of the module is replaced by its value."""
    text = repr(getattr(api, default.id)) if isinstance(default, ast.Name) else ast.unparse(default)
    return text.replace("'", '"')


def markdown(docstring: str) -> list[str]:
    """Return the lines of a docstring in Google style as Markdown, in which arguments and errors are lists."""
    lines: list[str] = []
    section = ""
    for line in docstring.splitlines():
        if match := SECTION.match(line):
            section = match[1]
            lines += [f"**{'Arguments' if section == 'Args' else section}**", ""]
        elif section in ("Args", "Raises") and (item := re.match(r"    (\w+): (.*)", line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif section:
            text = line.strip()
            if text and lines[-1]:
                lines[-1] += f" {text}"
            else:
                lines.append(text)
        else:
            lines.append(line)
    return lines
