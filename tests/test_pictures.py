"""The pictures of the documentation, and the script that takes those of the terminal."""

import getpass
import platform
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.scripts import SCRIPTS, load_script

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = sorted((ROOT / "docs" / "images").glob("*.svg"))
ADDRESS = re.compile(r"https?://|url\((?!#)|@import|file:", re.IGNORECASE)
"""References to other files and servers."""
NAMESPACE = re.compile(r'\sxmlns(?::\w+)?="[^"]*"')


def words(picture: Path) -> str:
    """Return the text that a picture shows, with ordinary spaces, one piece of text per line."""
    texts = ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")  # noqa: S314
    return "\n".join("".join(text.itertext()) for text in texts).replace("\u00a0", " ")


def test_there_are_pictures_of_the_terminal():
    assert {picture.stem for picture in PICTURES} == {
        f"terminal_{name}" for name in ("completion", "doctor", "list", "live", "status")
    }


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_loads_nothing_and_is_small(picture: Path):
    assert "fedsweep" in words(picture)
    assert ADDRESS.search(NAMESPACE.sub("", picture.read_text())) is None
    assert picture.stat().st_size < 50_000


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_names_no_machine_user_or_local_path(picture: Path):
    text = words(picture)
    assert re.findall(r"/(?:tmp|home|root|Users|work)\b\S*", text) == []
    assert not {platform.node(), getpass.getuser()} & {*re.findall(r"[\w.-]+", text)}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_on_a_page(picture: Path):
    assert any(f"images/{picture.name})" in page.read_text() for page in PAGES)


def test_every_picture_on_a_page_has_a_description():
    found = [(page, *one) for page in PAGES for one in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text())]
    assert len(found) >= 18
    assert [f"{page.relative_to(ROOT)}: {link}" for page, text, link in found if len(text) < 10] == []


def test_a_terminal_shows_colours_and_keeps_spaces(tmp_path: Path):
    terminal = load_script("terminal")
    (tmp_path / ".bashrc").write_text(f"PS1='{terminal.PROMPT}'\n")
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    with terminal.Terminal(tmp_path, environment, rows=5) as shown:
        shown.run(r"printf '\033[1;31ma   b\033[0m \033[2mdim\033[0m\n%79sx\n' ''")
        text = shown.text()
        picture = tmp_path / "picture.svg"
        picture.write_text(shown.svg("one", "two words"))
    assert text.splitlines()[1:] == ["a   b dim", f"{'':79}x", "$"]
    assert ADDRESS.search(NAMESPACE.sub("", picture.read_text())) is None
    shown_words = words(picture).splitlines()
    assert {"two words", "a   b", "dim"} <= {*shown_words}
    assert f"{'':79}x" in shown_words
    assert "$" not in {line.strip() for line in shown_words}  # the last prompt
    styles = re.findall(r"\.one-r\d+ \{ fill: (#\w+)(;font-weight: bold)?", picture.read_text())
    assert len({colour for colour, _ in styles}) == 3
    assert any(bold for _, bold in styles)


@pytest.mark.slow
def test_the_script_takes_a_picture(tmp_path: Path):
    subprocess.run([sys.executable, SCRIPTS / "make_pictures.py", "list", "--into", tmp_path], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["terminal_list.svg"]
    text = words(tmp_path / "terminal_list.svg")
    assert "$ fedsweep list" in text
    assert "my_digits" in text
