"""Print random docstrings and sentences of the documentation, so that a reader can judge them without the code.

uv run python scripts/sample_prose.py 60 7                      # 60 docstrings and 60 sentences, drawn with seed 7
uv run python scripts/sample_prose.py 60 7 fedsweep/report docs/guides   # only from these places

Mark each entry A (clear on first reading), B (needs a second reading) or C (unclear even with its signature). At least
85 % of the marks should be A, and none should be C.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEFAULT = ["fedsweep", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs"]
BREAK = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\[*\"])")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(path: Path) -> Iterator[str]:
    """Yield each docstring of a Python file, preceded by the signature that it documents."""
    tree = ast.parse(path.read_text())
    yield from _documented(tree, path.relative_to(ROOT).as_posix(), "")


def _documented(node: ast.AST, where: str, outer: str) -> Iterator[str]:
    name = outer
    if isinstance(node, Documented):
        name = f"{outer}.{getattr(node, 'name', '')}".strip(".")
        if text := ast.get_docstring(node):
            yield f"{where}  {name}\n{_signature(node)}\n{textwrap.indent(text, '    ')}"
    for child in ast.iter_child_nodes(node):
        yield from _documented(child, where, name)


def _signature(node: Documented) -> str:
    """Return the header of a class or a function with its decorators, or the word `module`."""
    match node:
        case ast.Module():
            return "module"
        case ast.ClassDef():
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            lines = [f"class {node.name}({bases}):" if bases else f"class {node.name}:"]
        case _:
            returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            lines = [f"def {node.name}({ast.unparse(node.args)}){returned}:"]
    return "\n".join([f"@{ast.unparse(one)}" for one in node.decorator_list] + lines)


def sentences(path: Path) -> Iterator[str]:
    """Yield each sentence of a Markdown page's paragraphs and lists, preceded by its heading.

    Code blocks, tables, comments and pictures are left out.
    """
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\|.*$|!\[.*?\]\(.*?\)", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(#+ .*|\s*([-*]|\d+\.) )", r"\n\1\n", text, flags=re.MULTILINE)
    heading = ""
    for paragraph in re.split(r"\n\s*\n", text):
        words = re.sub(r"^\s*([-*]|\d+\.)\s", "", " ".join(paragraph.split()))
        if words.startswith("#"):
            heading = words.lstrip("# ")
            continue
        for sentence in BREAK.split(words):
            if len(sentence.split()) > 3:
                yield f"{path.relative_to(ROOT).as_posix()}  {heading}\n    {sentence}"


def files(places: Iterable[str], suffix: str) -> list[Path]:
    """Return the sorted paths of all files with a suffix in `places`, which are files and folders of the repository."""
    found: set[Path] = set()
    for place in places:
        path = ROOT / place
        found |= set(path.rglob(f"*{suffix}")) if path.is_dir() else {path} if path.suffix == suffix else set()
    return sorted(found)


def main() -> None:
    """Print the docstrings and sentences that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("n", type=int, help="number of docstrings and number of sentences to print; 0 prints all")
    parser.add_argument("seed", type=int)
    parser.add_argument("places", nargs="*", default=DEFAULT, help="files and folders of the repository")
    given = parser.parse_args()
    for kind, suffix, read in (("docstring", ".py", docstrings), ("sentence", ".md", sentences)):
        found = [entry for path in files(given.places, suffix) for entry in read(path)]
        drawn = random.Random(given.seed).sample(found, min(given.n, len(found))) if given.n else found  # noqa: S311 - not for secrets
        for number, entry in enumerate(drawn, 1):
            print(f"--- {kind} {number} of {len(found)}: {entry}\n")


if __name__ == "__main__":
    main()
