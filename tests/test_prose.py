"""The rules of style that a test can check: how docstrings open, and how long Markdown lines are."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = sorted(path for room in ("fedsweep", "scripts", "benchmarks", "tests") for path in (ROOT / room).rglob("*.py"))
MARKDOWN = sorted(
    [*ROOT.glob("*.md"), *(path for room in (".github", "docs", "benchmarks") for path in (ROOT / room).rglob("*.md"))]
)
# Words that open a clause in place of a noun or a verb.
CLAUSES = {"what", "whether", "of", "those", "that", "as", "by", "with", "from", "where", "which", "how", "who", "when"}
# Words that are not verbs; a function's docstring opens with an imperative verb.
OPENINGS = (
    "a an the this these it its there each every all one two both any some no not nothing only in on at to for into "
    "over under after before if while so and or but like same is are has"
)
NO_VERB = frozenset(OPENINGS.split())
NOUNS = {"property", "cached_property", "computed_field"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def documented(path: Path) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield every node with a docstring, the location of the node, and the docstring.

    The docstring of an attribute is the string after the assignment.
    """
    where = path.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            yield node, f"{where}:{getattr(node, 'lineno', 1)}", text
        if isinstance(node, ast.Module | ast.ClassDef):
            yield from ((one, f"{where}:{one.lineno}", text) for one, text in attributes(node))


def attributes(outer: ast.Module | ast.ClassDef) -> Iterator[tuple[ast.stmt, str]]:
    """Yield every assignment in a module or class that has a docstring, and the docstring."""
    for node, after in pairwise(outer.body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
            text = getattr(after.value, "value", None)
            if isinstance(text, str):
                yield node, text


def is_noun(node: ast.AST) -> bool:
    """Return whether a docstring need not open with a verb, as in classes, modules, properties and tests."""
    if not isinstance(node, Function) or node.name.startswith("test_"):
        return True
    names = {part for one in node.decorator_list for part in re.findall(r"\w+", ast.unparse(one))}
    return bool(names & NOUNS)


def faults(node: ast.AST, text: str) -> Iterator[str]:
    """Yield a description of each rule that a docstring breaks."""
    first = re.split(r"[^\w`']", text, maxsplit=1)[0].lower()
    if first in CLAUSES:
        yield f"opens with `{first}`"
    if not is_noun(node) and first in NO_VERB:
        yield f"a function's docstring opens with a verb, not with `{first}`"


def long_lines(text: str) -> Iterator[int]:
    """Yield the numbers of all lines over 120 characters outside code, tables and unbreakable links."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        words = line.split()
        if len(line) > 120 and not in_code and not line.lstrip().startswith("|") and max(map(len, words)) < 100:
            yield number


def test_docstrings_open_with_a_verb_or_a_noun():
    seen, found = 0, []
    for path in PYTHON:
        for node, where, text in documented(path):
            seen += 1
            found += [f"{where}: {fault}: {text.splitlines()[0]}" for fault in faults(node, text)]
    assert seen > 2000
    assert not found, "\n".join([f"{len(found)} docstrings", *found])


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('def f():\n    "What stays."', 1),
        ('class C:\n    "Whether it is there."', 1),
        ('def f():\n    "The mean of the clients."', 1),
        ('def f():\n    "Return the mean of the clients."', 0),
        ('@property\ndef f():\n    "The mean of the clients."', 0),
        ('@functools.cached_property\ndef f():\n    "Of each the mean."', 1),
    ],
)
def test_the_allowed_openings_depend_on_the_documented_object(source, count):
    node = ast.parse(source).body[0]
    assert len([*faults(node, ast.get_docstring(node))]) == count


def test_docstrings_of_attributes_are_found():
    (outer,) = ast.parse('class C:\n    a: int = 0\n    "Whether it is there."\n    b = 1').body
    assert [[*faults(node, text)] for node, text in attributes(outer)] == [["opens with `whether`"]]


def test_markdown_lines_are_at_most_120_characters():
    assert len(MARKDOWN) > 20
    found = {
        path.relative_to(ROOT).as_posix(): lines for path in MARKDOWN if (lines := [*long_lines(path.read_text())])
    }
    assert not found


def test_a_long_line_is_found_outside_code_and_tables():
    prose = "word " * 30
    assert [*long_lines(f"{prose}\n```\n{prose}\n```\n| {prose}|\n{prose}")] == [1, 6]
