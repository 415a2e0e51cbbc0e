"""The page report.html in a real browser, where it sends no requests and a click sorts the table."""

import re
import shutil
import subprocess

import pytest

from fedsweep.report import write_report

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]

FRAME = """<!doctype html><body><iframe src="report/report.html"></iframe><pre id="seen"></pre><script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const inner = frame.contentDocument, lines = [];
  const table = inner.querySelector("table[data-sortable]");
  const shown = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent.trim()).join(" ");
  const click = (name) => {
    [...table.tHead.rows[0].cells].find((cell) => cell.textContent === name).querySelector("button").click();
    lines.push(name + ": " + shown());
  };
  lines.push("first: " + shown());
  ["lora.rank", "lora.rank", "mean", "difference", "difference"].forEach(click);
  lines.push("sorted: " + [...table.tHead.rows[0].cells].filter((cell) => cell.ariaSort).length);
  lines.push("requests: " + frame.contentWindow.performance.getEntriesByType("resource").length);
  lines.push("wide: " + (inner.documentElement.scrollWidth > frame.clientWidth));
  const boxes = [...inner.querySelectorAll(".scroll, .card")].filter((box) => box.clientWidth);
  const cues = boxes.map((box) => !box.previousElementSibling.hidden);
  const hidden = boxes.map((box) => box.scrollWidth > box.clientWidth + 1);
  lines.push("hidden columns: " + hidden.filter(Boolean).length + ", with a cue: " + (String(cues) === String(hidden)));
  const shownCues = [...inner.querySelectorAll(".cue")].filter((cue) => cue.clientHeight);
  const overlaps = shownCues.some((cue) =>
    cue.getBoundingClientRect().bottom > cue.nextElementSibling.getBoundingClientRect().top);
  const height = (cue) => cue.clientHeight / parseFloat(frame.contentWindow.getComputedStyle(cue).lineHeight);
  lines.push("cues overlap: " + overlaps + ", lines: " + Math.max(...shownCues.map(height)).toFixed(1));
  lines.push([...new Set(shownCues.map((cue) => cue.textContent))].join(" | "));
  lines.push("drawn: " + [...inner.querySelectorAll("figure svg")].filter((one) => one.getBBox().width > 100).length);
  document.getElementById("seen").textContent = lines.join("\\n");
};
</script></body>"""
"""A page that shows the report in a frame as wide as a phone and clicks on the headings of its columns."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_sorts_and_requests_nothing(manifest, trials, tmp_path, scheme):
    trials.arms({2: [0.9, 0.93], 4: [0.5, 0.53], 8: [0.6, 0.64], 16: [0.7, 0.71]})
    trials.add(1, 0, [0.2, 0.3], "pruned")
    write_report(manifest(seeds=(0, 1)), trials.records, tmp_path / "report")
    outer = tmp_path / "outer.html"
    outer.write_text(FRAME.replace("<iframe", '<iframe style="width:390px;height:800px"'))
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", "--enable-logging=stderr",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}",
        "--allow-file-access-from-files", "--virtual-time-budget=5000",
        f"--blink-settings=preferredColorScheme={1 if scheme == 'light' else 0}",
    ]  # fmt: skip
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", outer.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    (seen,) = re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert seen.splitlines() == [
        "first: 2 4 8 16",
        "lora.rank: 2 4 8 16",
        "lora.rank: 16 8 4 2",
        "mean: 4 8 16 2",
        "difference: 4 16 2 8",
        "difference: 2 16 4 8",
        "sorted: 1",
        "requests: 0",
        "wide: false",
        "hidden columns: 8, with a cue: true",
        "cues overlap: false, lines: 1.0",
        "Scroll sideways to see more columns → | Scroll sideways to see the rest of this figure →",
        "drawn: 4",
    ]
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
