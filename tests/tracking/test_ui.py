"""A sweep on MLflow's page in a real browser, with the saved view."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsweep.report import write_report
from fedsweep.results import Outcome, Store, TrialPlan, TrialRecord
from fedsweep.results.history import RoundRecord
from fedsweep.tracking import Recorder
from fedsweep.tracking.ui import page_links
from scripts.browser import CHROMIUM, UNFOLD, VISITED, Browser
from tests.sweep.helpers import command, environment
from tests.tracking.helpers import MANIFEST, PLAN

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]

SEEDS = (0, 1, 2)  # with four arms, more trials than the ten that MLflow's page shows by default
SWEEP = MANIFEST.model_copy(
    update={
        "varied": ("lora.rank", "optimizer.lr"), "seeds": SEEDS, "trials": 12, "domains": ("plain", "noisy"),
        "baseline": {"lora.rank": 8, "optimizer.lr": 0.1},
    }
)  # fmt: skip
ARMS = [{"lora.rank": rank, "optimizer.lr": lr} for rank in (4, 8) for lr in (0.1, 0.2)]
NAMES = [f"rank {arm['lora.rank']} · lr {arm['optimizer.lr']}" for arm in ARMS]
TRIALS = [f"{name} · seed {seed}" for name in NAMES for seed in SEEDS]
DRAWN = "document.querySelectorAll('.js-plotly-plot .scatterlayer .trace').length"
FROM_ZERO = "[...document.querySelectorAll('.js-plotly-plot')].map(one => one._fullLayout?.yaxis?.range[0])"
FROM_ZERO += ".filter(low => low <= 0).length"
"""JavaScript that counts the plots whose vertical axis begins at zero or below."""


def played(number: int, seed: int) -> TrialRecord:
    """Return a made-up trial of three rounds."""
    arm = ARMS[number]
    config = {**PLAN.config, "seed": seed, "lora": {"rank": arm["lora.rank"]}, "optimizer": {"lr": arm["optimizer.lr"]}}
    plan = TrialPlan(
        key=f"k{number}-{seed}",
        number=len(SEEDS) * number + seed,
        arm=arm,
        seed=seed,
        config=config,
        digests=PLAN.digests,
    )
    history = []
    for one in range(4):
        accuracy = 0.5 + 0.05 * one + 0.02 * number + 0.01 * seed
        metrics = {"accuracy/mean": accuracy, "accuracy/worst_domain": accuracy - 0.2, "loss/test": 2.0 - accuracy}
        domains = {"accuracy/domain/plain": accuracy + 0.2, "accuracy/domain/noisy": accuracy - 0.2}
        history.append(RoundRecord(one, {**metrics, **domains, "bytes/up": 1e6 * one * (number + 1)}, 0.5))
    return TrialRecord(plan, Outcome(outcome="finished", round=3), history)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Serve a sweep of four arms with three seeds and a report by `fedsweep ui`, and yield the printed addresses."""
    folder = tmp_path_factory.mktemp("ui")
    store = Store(folder / "mlruns")
    store.root.mkdir()
    sweep = store.sweep(SWEEP.name, SWEEP.id)
    asked = "# Does it matter?\nseed: 0\n"
    sweep.create(SWEEP, {"search_space.yaml": asked, "experiment.yaml": "seed: 0\n"})
    recorder = Recorder(store, SWEEP.name)
    recorder.open_sweep(SWEEP, sweep.folder)
    trials = [played(number, seed) for seed in SEEDS for number in range(4)]
    for trial in trials:
        recorder.sync(trial)
    report = write_report(SWEEP, trials, sweep.folder / "report")
    recorder.close_sweep("FINISHED", {"trials/finished": 12.0}, report.folder)
    assert recorder.unsynced == {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        command("ui", SWEEP.name, "--port", str(port)), cwd=folder, env=environment(), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url, timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, "the server ended before it answered"
                time.sleep(0.1)
        links = page_links(store, url)
        assert server.stdout is not None
        printed = [server.stdout.readline() for _ in range(len(links) + 1)]
        assert [line.split(": ", 1)[1].strip() for line in printed[1:]] == list(links.values())
        yield {"experiments": f"{url}/#/experiments?workflowType=machine_learning", **links}
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
        if server.stdout:
            server.stdout.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(1600, 1000, VISITED) as started:
        yield started


@pytest.fixture(autouse=True)
def _shot(browser: Browser, tmp_path: Path) -> Iterator[None]:
    """Take a screenshot of the page at the end of each test, for inspection."""
    yield
    browser.shot(tmp_path / "page.png")


def test_the_list_of_experiments_shows_the_question_of_each(served: dict[str, str], browser: Browser) -> None:
    browser.open(served["experiments"], "tiny", "Does it matter?")


def test_the_runs_table_shows_the_parent_with_its_data_sets_and_its_trials(
    served: dict[str, str], browser: Browser
) -> None:
    text = browser.open(served["sweeps and their trials"], "tiny s1", "13 matching runs")
    assert "rank 4" not in text
    assert "digits (0123456789ab) Eval" in text
    browser.until(UNFOLD)
    text = browser.wait(*TRIALS)
    assert "digits/feature_skew (" in text


def test_the_saved_view_draws_each_arm_over_its_seeds(served: dict[str, str], browser: Browser) -> None:
    text = browser.open(
        served["the sweep by arm"],
        *(f"Group: {name}" for name in NAMES),
        *(f"{name} ({metric})" for name in NAMES for metric in ("accuracy/mean", "loss/test")),
        "megabytes/sent vs. accuracy/mean",
        "accuracy/worst_domain vs. accuracy/mean",
        "sweep (6)",
        patience=120,
    )
    assert "12 matching runs" in text
    assert "tiny s1" not in text, "the parent must not be among the runs"
    assert "Group by: arm" in text
    assert "does not exist" not in text
    assert browser.run(DRAWN) >= 3 * len(ARMS), "three charts must have a curve or points for each arm"
    assert browser.run("document.querySelectorAll('.js-plotly-plot .barlayer .point').length") == 0
    assert browser.run(FROM_ZERO) == 0, "the plots must show the range of the values"


def test_the_saved_view_has_parallel_coordinates_of_several_hyperparameters(
    served: dict[str, str], browser: Browser
) -> None:
    browser.open(served["the sweep by arm"], "Group: rank 4 · lr 0.1")
    browser.until("document.querySelectorAll('[data-testid*=arallel], .parcoords').length > 0")
    browser.wait("optimizer.lr", "lora.rank")


def test_the_curves_show_all_trials_and_not_only_the_first_ten(served: dict[str, str], browser: Browser) -> None:
    assert len(TRIALS) > 10
    text = browser.open(served["curves"], f"{len(TRIALS)} matching runs", *TRIALS, patience=120)
    assert "tiny s1" not in text, "the parent must not be among the runs"
    assert "Group:" not in text
    browser.until(f"{DRAWN} >= 3 * {len(TRIALS)}")


def test_the_compare_view_has_parallel_coordinates_of_varied_hyperparameters(
    served: dict[str, str], browser: Browser
) -> None:
    text = browser.open(served["trials side by side"], "Comparing 12 Runs", "Parallel Coordinates Plot")
    text = browser.wait(*TRIALS)
    axes = "[...document.querySelectorAll('.js-plotly-plot text, .parcoords text')].map(one => one.textContent)"
    browser.until(
        f"{axes}.includes('lora.rank') && {axes}.includes('optimizer.lr') && {axes}.includes('accuracy/mean')"
    )
    assert "Model training" in text


def test_the_sweeps_own_page_has_the_table_the_findings_and_the_datasets(
    served: dict[str, str], browser: Browser
) -> None:
    text = browser.open(served["the sweep's results"], "Does it matter?", "Holm p", "fedsweep report tiny --sweep s1")
    assert "lora.rank=8, optimizer.lr=0.1" in text
    assert "digits (0123456789ab)" in text


def test_the_report_is_among_the_artifacts_and_its_figures_are_shown(served: dict[str, str], browser: Browser) -> None:
    page, _, query = served["the sweep's results"].partition("?")
    browser.open(f"{page}/artifacts/report/table.md?{query}", "By domain", "No test is possible")
    browser.open(f"{page}/artifacts/report/curves.png?{query}", "curves.png")
    browser.until("[...document.images].some(one => one.naturalWidth > 500)")
