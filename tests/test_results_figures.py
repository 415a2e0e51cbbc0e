"""The figures of docs/results.md, which are drawn from the tables of its appendices."""

import re
import shutil
from pathlib import Path

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
PAGES, IMAGES = ROOT / "docs" / "results", ROOT / "docs" / "images"


@pytest.fixture(scope="module")
def script():
    return load_script("results_figures")


@pytest.fixture
def pages(tmp_path) -> Path:
    """Copy the appendices of docs/results.md, so that a test may change them, and return their folder."""
    return shutil.copytree(PAGES, tmp_path / "pages")


def replace(page: Path, old: str, new: str) -> None:
    text = page.read_text()
    assert old in text
    page.write_text(text.replace(old, new))


def test_the_numbers_are_those_of_the_tables(script):
    methods, bricks = script.read_depth_methods(PAGES)
    assert [len(one) for one in methods.values()] == [4, 4, 4, 3]
    assert methods["PACS, Table 1"][0] == ("AllLarge", 2.65, -0.44, 5.74)
    assert bricks["digits"][2] == ("DepthFL", 2.58, 2.02, 3.15)
    ranks = script.read_depth_or_rank(PAGES)
    assert [len(each) for one in ranks.values() for each in one.values()] == [4, 4, 4, 4]
    assert ranks["Equal bytes"]["PACS"][3] == ("FLoRA", 3.07, 0.16, 5.99)
    assert ranks["Equal memory"]["digits"][0] == ("FedBRICK", -1.66, -3.26, -0.06)
    assert [len(one) for one in script.read_fedag(PAGES).values()] == [10, 10]
    sent, costs = script.read_fedms(PAGES)
    assert sent["FedMS"] == (5.6, 81.84)
    assert costs["reversed weights"][1] == ("FT", 78.6, 75.2, 82.0)
    shares = script.read_statistics(PAGES)
    assert shares["normal"]["bootstrap"] == {5: 95.0, 6: 95.3, 8: 94.7, 10: 95.5, 20: 95.1}
    assert list(shares["skewness 6, 3 points"]["false"].values()) == [9.0, 14.2, 12.4, 15.7, 17.7, 14.8]


def test_all_figures_are_drawn(script, tmp_path):
    for path in script.write(PAGES, tmp_path):
        assert 20_000 < path.stat().st_size < 150_000, path.name
    assert script.outdated(PAGES, tmp_path) == []


def test_panels_with_common_axes_show_all_intervals(script):
    """The panel whose values are farther from zero can be the left or the right one."""
    near, far = [script.Estimate("near", 1, 0, 2)], [script.Estimate("far", 5, -8, 9)]
    for groups in ((near, far), (far, near)):
        figure = script.side_by_side({str(place): {"one": one} for place, one in enumerate(groups)}, "FedRA", 3)
        low, high = figure.axes[0].get_xlim()
        assert figure.axes[1].get_xlim() == (low, high)
        assert low < -8 < 9 < high


def test_the_figures_in_the_documentation_are_current(script):
    assert script.outdated(PAGES, IMAGES) == [], "run scripts/results_figures.py"
    shown = re.findall(r"^!\[.{20,}\]\(images/(\w+)\.png\)$", (ROOT / "docs" / "results.md").read_text(), re.MULTILINE)
    assert shown == list(script.FIGURES)
    assert {path.stem for path in IMAGES.glob("results_*.png")} == set(shown)


def test_a_changed_number_makes_a_figure_outdated(script, pages):
    replace(pages / "fedms.md", "| fedms | 5.6 | 81.84 |", "| fedms | 5.6 | 81.85 |")
    assert script.outdated(pages, IMAGES) == ["results_fedms"]


@pytest.mark.parametrize(
    ("page", "old", "new", "complaint"),
    [
        ("fedra.md", "## Table 1 on digits\n", "## Table 1 on numerals\n", "0 tables .* below 'Table 1 on digits'"),
        ("fedag.md", "mean minus FedAG", "mean minus ours", "0 tables with the column 'mean minus FedAG'"),
        ("fedbrick.md", "accuracy, points", "accuracy", "0 rows named 'accuracy, points'"),
        ("platform.md", "| normal | 3 | 95.3 |", "| normal | 3 | ? |", "no number at the start of '?'"),
    ],
)
def test_a_missing_value_is_an_error(script, pages, page, old, new, complaint):
    replace(pages / page, old, new)
    with pytest.raises((LookupError, ValueError), match=complaint.replace("?", r"\?")):
        script.outdated(pages, IMAGES)
