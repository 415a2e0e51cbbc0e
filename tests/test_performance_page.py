"""The page docs/performance.md, whose tables and figure come from the files in benchmarks/results/."""

import json
import shutil
from pathlib import Path

import pytest

from tests.scripts import SCRIPTS, load_script


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield load_script("performance_page")


@pytest.fixture
def results(tmp_path, script) -> Path:
    """Copy the results that the page shows, so that a test may change them, and return their folder."""
    for name in script.TABLES:
        shutil.copy(script.RESULTS / f"{name}.json", tmp_path)
    return tmp_path


def test_the_page_has_a_table_of_every_result(script):
    assert script.BLOCK.findall(script.PAGE.read_text()) == list(script.TABLES)
    assert len(script.TABLES) == 6


def test_the_tables_and_the_picture_are_current(script):
    page = script.PAGE.read_text()
    assert script.written(page, script.RESULTS) == page, "run scripts/performance_page.py"
    assert script.drawn_from(script.PICTURE) == script.digest(script.shown(script.RESULTS))


def test_a_changed_number_changes_the_page_and_the_picture(script, results):
    file = results / "engine_cpu.json"
    content = json.loads(file.read_text())
    content["rounds"][0]["ms_overhead"] = 123.456
    file.write_text(json.dumps(content))
    assert "| 123.456 |" in script.written(script.PAGE.read_text(), results)
    assert script.digest(script.shown(results)) != script.drawn_from(script.PICTURE)


def test_the_picture_is_drawn(script, results):
    script.draw(results, results / "drawn.png")
    assert 15_000 < (results / "drawn.png").stat().st_size < 150_000
    assert script.drawn_from(results / "drawn.png") == script.digest(script.shown(results))
