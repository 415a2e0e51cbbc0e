"""The documentation site, whose pages, links and Markdown files must be complete."""

import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.scripts import load_script

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


class Page(HTMLParser):
    """The anchors of an HTML page, and the addresses to which the page links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links = {""}, set[str]()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        self.links |= {given[key] for key in ("href", "src") if given.get(key)}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site, in which Zensical must have found no dead link, and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    load_script("build_site").build(folder)
    return folder


def test_each_page_is_there_as_html_and_as_markdown(site):
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) >= 42
    for page in pages:
        assert site.joinpath(page).is_file(), page
        assert site.joinpath(page).with_suffix(".html").is_file(), page


def test_all_links_and_anchors_of_the_html_pages_exist(site):
    read = cache(Page)
    pages, count, dead = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"], 0, []
    assert len(pages) >= 50
    for path in pages:
        for link in read(path).links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data"):
                continue
            count += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = read(target).anchors if target.suffix == ".html" and target.is_file() else {"", parts.fragment}
            if not target.is_file() or not target.is_relative_to(site) or unquote(parts.fragment) not in anchors:
                dead.append(f"{path.relative_to(site)}: {link}")
    assert count >= 2000
    assert dead == []


def test_the_search_finds_the_pages_of_the_documentation_alone(site):
    found = {item["location"].partition("#")[0] for item in json.loads((site / "search.json").read_text())["items"]}
    assert len(found) >= 42
    assert "concepts/statistics.html" in found
    assert [page for page in found if page.startswith("files/")] == []
    assert (site / "files" / "benchmarks" / "results" / "sequential.md").read_text().startswith("# ")


def test_all_links_of_the_markdown_files_exist(site):
    texts = [*site.rglob("*.md"), site / "llms.txt"]
    links = [(path, link) for path in texts for link in re.findall(r"\]\(([^)#\s]+)", path.read_text())]
    assert len(links) >= 300
    local = [(path, link) for path, link in links if "://" not in link]
    assert [f"{path.relative_to(site)}: {link}" for path, link in local if not (path.parent / link).is_file()] == []


def test_the_site_loads_nothing_from_other_servers(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="?(https?://[^" >]+)', path.read_text())
        assert loaded == [], path
