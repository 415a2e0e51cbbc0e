"""The page report.html, which contains the whole table, loads nothing and escapes all user input."""

import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from fedsweep.report import write_report
from fedsweep.report.arm_statistics import summarise
from fedsweep.report.formats import page
from fedsweep.report.formats.page import question
from fedsweep.report.table import AblationTable
from tests.report.conftest import Trials, make_manifest
from tests.report.helpers import tabulate

VOID = {"meta", "link", "br", "img", "input", "hr"}
LOADS = {"src", "srcset", "href", "data", "poster", "action", "formaction", "background", "manifest"}


class Page(HTMLParser):
    """A parser that collects elements and texts, and fails if a closing tag does not match the open element."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.open = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and not {"style", "script"} & {*self.open}:
            self.texts.append((self.open[-1], data.strip()))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def words(self, *tags):
        return [text for tag, text in self.texts if tag in tags]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the report and the table of a sweep with four arms, of which one was pruned and one failed."""
    manifest, trials, folder = make_manifest(), Trials(), tmp_path_factory.mktemp("sweep")
    trials.arms({4: [0.5, 0.53, 0.51], 8: [0.6, 0.63, 0.62]})
    trials.add(2, 0, [0.2, 0.3], "pruned")
    trials.add(16, 0, [0.2], "failed")
    (folder / "search_space.yaml").write_text("# Is <rank> 4\n# enough?\n#\n#   fedsweep tune x\n\nexperiment: x\n")
    report = write_report(manifest, trials.records, folder / "report")
    return report, AblationTable(manifest, report.arms)


def test_the_page_contains_the_whole_table_and_all_figures(made):
    report, table = made
    text = (report.folder / "report.html").read_text()
    found = Page(text)
    cells = Counter(found.words("td", "th"))
    for row in table.cells():
        for cell in row.values():
            assert cells[cell] or cell == "-", cell
    assert {*table.cells()[0]} <= {*found.words("th")}
    assert {*table.findings()} <= {*found.words("li")}
    assert {*table.caption()} <= {*found.words("p")}
    assert found.words("h1")[0] == "ablations/lora_rank"
    assert "Is <rank> 4 enough?" in found.words("p")
    assert report.figures[0].name == "forest"
    assert found.words("h3")[1:] == [figure.title for figure in report.figures]
    assert len(found.all("svg")) == len(found.all("figure")) == len(report.figures) == 4
    assert [text.strip() for text in found.words("figcaption")] == [figure.reading for figure in report.figures]


def test_arms_without_a_finished_trial_have_a_table_of_their_own(made):
    report, _ = made
    text = (report.folder / "report.html").read_text()
    first, second = (text.index(f'aria-label="Arms with{ending} finished trial"') for ending in (" a", "out a"))
    rows = [match.start() for match in re.finditer(r'<th scope="row" class="word">(4|8)</th>', text)][:2]
    lost = [match.start() for match in re.finditer(r'<th scope="row" class="word">(2|16)</th>', text)][:2]
    assert first < rows[0] < rows[1] < second < lost[0] < lost[1]
    assert text.count('<tr class="baseline">') == 1
    by_domain = text[text.index('<h2 id="by-domain"') : text.index('<h2 id="figures"')]
    assert re.findall(r'<th scope="row" class="word">(\d+)</th>', by_domain) == ["4", "8"]


def test_every_trial_is_listed(made):
    report, _ = made
    text = (report.folder / "report.html").read_text()
    listed = text[text.index("<details>", text.index('id="trials"')) :]
    rows = re.findall(r"<tr>\n<th scope=\"row\".*?</tr>", listed, re.DOTALL)
    cells = [re.findall(r">([^<\n]+)</t[hd]>", row)[:5] for row in rows]
    assert len(cells) == 8
    assert ["rank 2", "0", "pruned", "1", "30.00"] in cells
    assert ["rank 8", "1", "finished", "4", "63.00"] in cells


def test_nothing_is_loaded_and_ids_are_unique(made):
    report, _ = made
    text = (report.folder / "report.html").read_text()
    found = Page(text)
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) > 50
    assert len(ids) == len({*ids})
    targets = [value for _, attributes in found.elements for name, value in attributes.items() if name in LOADS]
    targets += [attributes["aria-labelledby"] for _, attributes in found.elements if "aria-labelledby" in attributes]
    targets += re.findall(r"url\(([^)]*)\)", text)
    assert len(targets) > 10
    outside = {target for target in targets if not target.startswith("data:image/png;base64,")}
    assert {target.lstrip("#") for target in outside} <= {*ids}
    assert "://" not in text
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in found.elements}
    (policy,) = (one["content"] for one in found.all("meta") if one.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")


def test_user_input_is_never_interpreted_as_markup(manifest, trials, tmp_path):
    evil = "<script>alert('1')</script>\" onload=\"x"
    trials.add({"arm": evil}, 0, [0.2, 0.6])
    trials.add({"arm": "{{ 7 * 7 }}"}, 0, [0.2, 0.5])
    sweep = manifest(
        varied=("arm",), baseline={"arm": evil}, name=f"x/{evil}", experiment=evil, domains=("photo", "sketch"),
        overrides={"a": evil}, digests={evil: evil}, seeds=(0,),
    )  # fmt: skip
    table = tabulate(sweep, trials)
    figures = write_report(sweep, trials.records, tmp_path).figures
    text = page.html(table, figures, trials.records, f"Why {evil}?")
    found = Page(text)
    assert len(found.all("script")) == 1
    assert not [one for _, one in found.elements if "onload" in one]
    assert "49" not in found.words("td", "th")
    assert sum(evil in words for _, words in found.texts) >= 8
    assert any(evil in words for words in found.words("text"))


def test_the_script_is_the_one_that_the_policy_allows(made):
    import base64
    import hashlib

    text = (made[0].folder / "report.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text.replace("&#39;", "'").replace("&#43;", "+")


def test_many_findings_are_folded(manifest, trials):
    trials.arms({rank: [0.5 + rank / 100, 0.5 + rank / 99] for rank in range(1, 15)})
    table = tabulate(manifest, trials)
    text = page.html(table, (), trials.records)
    assert len(table.findings()) == 13
    assert f"<summary>{13 - page.SENTENCES} more findings</summary>" in text
    assert all(sentence in Page(text).words("li") for sentence in table.findings())


def test_the_page_states_that_no_trial_finished(manifest, trials):
    trials.add(8, 0, [0.2], None)
    table = AblationTable(manifest(baseline=None), summarise(manifest(baseline=None), trials.records))
    found = Page(page.html(table, (), trials.records))
    assert "No arm has a finished trial." in found.words("p")
    assert "By domain" not in found.words("h2")


def test_a_single_arm_has_no_comparison(manifest, trials):
    trials.arms({8: [0.6, 0.61, 0.62]})
    table = tabulate(manifest, trials)
    found = Page(page.html(table, (), trials.records))
    assert "There is only one arm, so nothing can be compared." in found.words("p")


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("# One line.\nexperiment: x\n", "One line."),
        ("# yaml-language-server: $schema=x.json\n# One line.\nexperiment: x\n", "One line."),
        ("\n# Two\n# lines.\n#\n# More.\n", "Two lines."),
        ("experiment: x\n# late\n", None),
        ("#\n", None),
    ],
)
def test_the_question_is_the_first_paragraph_of_comments(tmp_path, text, asked):
    path = tmp_path / "search_space.yaml"
    assert question(path) is None
    path.write_text(text)
    assert question(path) == asked
