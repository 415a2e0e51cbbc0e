"""Build the documentation site from mkdocs.yml and docs/ into a folder, by default site/.

Zensical builds the HTML pages in strict mode. Pages may link to files outside docs/, such as scripts and measurements:
these files are copied into the site's folder `files/`, which the site's search leaves out. Next to each HTML page, the
site contains its Markdown text, and `llms.txt` lists these texts for coding agents.

uv run python scripts/build_site.py            # build into site/
uv run python scripts/build_site.py FOLDER     # build into FOLDER
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TRIAL = "What a trial showed"
"""The section of the page for coding agents that `llms.txt` leaves out."""
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
"""The head of a page that the site's search leaves out."""
LINK = re.compile(r"(?<=\]\()([^)#\s]+)")


def navigation() -> list[tuple[str, list[str]]]:
    """Return the sections of the site, in order, as pairs of a title and the paths of the pages below docs/."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return [(title, list(_paths(below))) for entry in settings["nav"] for title, below in entry.items()]


def _paths(entry: Any) -> Iterator[str]:
    for one in entry.values() if isinstance(entry, dict) else entry:
        yield from [one] if isinstance(one, str) else _paths(one)


def stage(folder: Path) -> None:
    """Copy mkdocs.yml, docs/ and all files outside docs/ that pages link to into `folder`, and adapt the links."""
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(DOCS, folder / "docs")
    waiting = sorted(DOCS.rglob("*.md"))
    for page in waiting:  # grows while it is read
        copy = folder / "docs" / _place(page)
        copy.parent.mkdir(parents=True, exist_ok=True)

        def move(link: re.Match[str], page: Path = page) -> str:
            target = (page.parent / link[1]).resolve()
            if "://" in link[1] or not target.is_file():
                return link[1]
            if not target.is_relative_to(DOCS) and target not in waiting:
                waiting.append(target)
            return os.path.relpath(_place(target), _place(page).parent)

        if page.suffix == ".md":
            hidden = "" if page.is_relative_to(DOCS) else UNSEARCHED
            copy.write_text(hidden + LINK.sub(move, page.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copyfile(page, copy)


def _place(path: Path) -> Path:
    """Return the path of a file of the repository in the site, relative to the root of the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    return Path("files") / f"{path.relative_to(ROOT)}{'' if path.suffix in ('.md', '.png') else '.txt'}"


def llms(docs: Path) -> str:
    """Return the text of llms.txt: the page for coding agents, and a link to each page with its first sentence."""
    agents = (docs / "agents.md").read_text(encoding="utf-8").partition(f"\n## {TRIAL}")[0]
    lines = ["# fedsweep", agents.partition("\n")[2]]
    for title, paths in navigation():
        lines += [f"## {title}", ""]
        for path in paths:
            page = (docs / path).read_text(encoding="utf-8")
            lines.append(f"- [{page.partition(chr(10))[0].removeprefix('# ')}]({path}): {_first_sentence(page)}")
        lines.append("")
    return "\n".join(lines)


def _first_sentence(page: str) -> str:
    """Return the first sentence of a page's prose, without links. Tables, code and comments are no prose."""
    prose = next(one for one in page.split("\n\n")[1:] if re.match(r"\w|\[|`[^`]", one))
    text = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", " ".join(prose.split()))
    sentence = re.match(r".+?(?:[.?](?=\s|$)|:(?=$))", text)
    return (sentence[0] if sentence else text).removesuffix(":")


def build(site: Path) -> None:
    """Build the site into the folder `site`, which is replaced."""
    with tempfile.TemporaryDirectory() as staged:
        folder = Path(staged)
        stage(folder)
        zensical = Path(sys.executable).with_name("zensical")
        subprocess.run([zensical, "build", "--strict"], cwd=folder, check=True, env=os.environ | {"NO_COLOR": "1"})
        for page in (folder / "docs").rglob("*.md"):
            text = page.read_text(encoding="utf-8").removeprefix(UNSEARCHED)
            (folder / "site" / page.relative_to(folder / "docs")).write_text(text, encoding="utf-8")
        (folder / "site" / "llms.txt").write_text(llms(folder / "docs"), encoding="utf-8")
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(folder / "site", site)


def main(words: Sequence[str] | None = None) -> None:
    """Build the site into the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    about = "new folder, or an older site to replace; site/ in the repository by default"
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site", help=about)
    site = parser.parse_args(words).folder
    if site.exists() and not (site / "llms.txt").is_file():
        parser.error(f"{site} exists and is not a site that this script has built")
    build(site)


if __name__ == "__main__":
    main()
