"""The files of figures, each of which is a PNG and an SVG whose text is stored as text."""

import math
import warnings
from xml.etree import ElementTree

import pytest

from fedsweep.report.figures import write_figures
from tests.report.helpers import tabulate

TEXT = "{http://www.w3.org/2000/svg}text"
CASES = {}


def case(function):
    """Register a function that adds the trials of a sweep that is hard to draw and returns changes of its manifest."""
    CASES[function.__name__] = function
    return function


@case
def one_arm_one_seed(trials):
    trials.add(8, 0, [0.2, 0.6])
    return {"seeds": (0,)}, {"rank 8 (baseline)"}


@case
def many_arms_with_long_names(trials):
    for place in range(12):
        trials.add({"arm": f"{'long ' * 20}{place}"}, 0, [0.2, place / 40])
    return {"varied": ("arm",), "baseline": None}, {"long 11", "long 10"}


@case
def names_of_markup_and_of_glyphs_that_the_font_lacks(trials):
    trials.add({"arm": "<script>&\"'</script>"}, 0, [0.2, 0.6])
    trials.add({"arm": "$x_$ \\alpha _"}, 0, [0.2, 0.5])
    trials.add({"arm": "\u5b66\u7fd2"}, 0, [0.2, 0.4])
    return {"varied": ("arm",), "baseline": None}, {"<script>&\"'</script>", "$x_$ \\alpha _", "\u5b66\u7fd2"}


@case
def nothing_finished(trials):
    trials.add(8, 0, [0.2, 0.3], "pruned")
    trials.add(4, 0, [0.2], "failed")
    trials.add(2, 0, [], None)
    return {}, {"rank 8 (baseline)", "rank 4"}


@case
def a_loss_with_holes_and_a_diverged_arm(trials):
    trials.add(8, 0, [2.0, math.nan, 1.5], metric="loss/test")
    trials.add(4, 0, [2.0, 1e9], "diverged", metric="loss/test")
    trials.add(2, 0, [math.nan, math.inf], "failed", metric="loss/test")
    return {"metric": "loss/test", "mode": "min"}, {"rank 8 (baseline)", "rank 4"}


@pytest.mark.parametrize("name", CASES)
def test_every_figure_is_a_png_and_an_svg_with_arm_names_as_text(manifest, trials, tmp_path, name):
    changes, expected = CASES[name](trials)
    sweep = manifest(**changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", category=DeprecationWarning)  # old releases of Matplotlib cause some
        made = write_figures(tabulate(sweep, trials), trials.records, tmp_path)
    names = ["curves"] if name == "nothing_finished" else ["curves", "domains", "heatmap"]
    assert [one.name for one in made] == names
    for one in made:
        assert one.png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        root = ElementTree.fromstring(one.svg.read_bytes())  # noqa: S314
        words = " ".join("".join(text.itertext()) for text in root.iter(TEXT))
        named = {arm for arm in expected if arm in words}
        # Other figures leave out unfinished arms, and the figure by domain shows only the best arms.
        assert named == expected if one.name == "curves" else named
        assert all("sans-serif" in text.get("style", "") for text in root.iter(TEXT))
        assert root.findtext("{http://www.w3.org/2000/svg}title") == one.title
        assert one.reading.endswith(".")


def test_the_matplotlib_style_of_the_user_changes_nothing(manifest, trials, tmp_path):
    import matplotlib

    trials.arms({8: [0.6]})
    table, written = tabulate(manifest, trials), []
    for size in (10, 20):
        with matplotlib.rc_context({"font.size": size, "svg.fonttype": "path"}):
            written.append([one.svg.read_bytes() for one in write_figures(table, trials.records, tmp_path)])
            assert matplotlib.rcParams["font.size"] == size
    assert written[0] == written[1]
