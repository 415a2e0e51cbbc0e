"""Seeds until decided, with real Ray and MLflow: any number of workers and any kill give the same table."""

import re
import time
from collections import Counter
from pathlib import Path

import pytest

from fedsweep.report.arm_statistics import summarise
from fedsweep.report.sequential_tests import CONCLUSIONS
from fedsweep.results import SweepStore
from tests.sweep.helpers import (
    GRID,
    SMALL,
    fedsweep,
    kill,
    newest,
    runs,
    start,
    table,
    write_space,
)

UNTIL = {"until": "decided", "at_least": 2, "at_most": 6, "smallest_effect": 4.0}
DECIDED = {
    **GRID,
    "fixed": {**SMALL, "federation.rounds": 2, "local.steps": 3},
    "space": {"optimizer.lr": {"grid": [0.001, 0.1, 0.11, 0.5]}},
    "seeds": UNTIL,
    "baseline": {"optimizer.lr": 0.1},
}
ROUNDS, ARMS = 2, 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the sweep with one trial at a time, and return its working directory."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_space(folder, "decided", DECIDED)
    done = fedsweep(folder, "tune", "decided", "--at-once", "1")
    assert len(re.findall(r"^Decided after \d seeds: lr", done.stderr, re.MULTILINE)) == ARMS - 1
    return folder


def counted(sweep: SweepStore) -> set[tuple[str, int]]:
    """Return the arm and seed of each finished trial."""
    return {
        (trial.plan.label, trial.plan.seed)
        for trial in sweep.trials()
        if trial.outcome is not None and trial.outcome.outcome == "finished"
    }


@pytest.mark.slow
def test_arms_get_seeds_until_their_comparison_is_decided(undisturbed):
    sweep = newest(undisturbed, "decided")
    assert sweep.manifest().until_decided is not None
    assert ARMS * UNTIL["at_least"] <= len(counted(sweep)) < ARMS * UNTIL["at_most"]
    text = (sweep.folder / "report" / "table.md").read_text()
    assert "| verdict |" in text
    assert "Holm" not in text
    (parent,), children, _ = runs(undisturbed, "decided")
    assert parent.data.tags["fedsweep.seeds"] == "until decided, 2 to 6"
    assert len(children) == len(sweep.trials())


@pytest.mark.slow
def test_two_workers_give_the_same_table(undisturbed, tmp_path):
    write_space(tmp_path, "decided", DECIDED)
    fedsweep(tmp_path, "tune", "decided")
    assert table(tmp_path, "decided") == table(undisturbed, "decided")
    assert counted(newest(undisturbed, "decided")) <= counted(newest(tmp_path, "decided"))


def kill_in_the_third_look(folder: Path, name: str) -> None:
    """Run a sweep, and kill it while trials of the fourth seed run: the first look takes place after two seeds."""
    process = start(folder, "tune", name)
    deadline = time.monotonic() + 280
    while not in_the_third_look(folder, name):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kill(process)
    assert in_the_third_look(folder, name)


def in_the_third_look(folder: Path, name: str) -> bool:
    """Return whether all trials of three seeds have ended, and one of the fourth seed has begun, but not all."""
    if not list((folder / "mlruns" / "sweeps" / name).glob("*/sweep.json")):
        return False
    trials = newest(folder, name).trials()
    ended = Counter(trial.plan.seed for trial in trials if trial.last_round == ROUNDS)
    begun = any(trial.plan.seed == 3 and trial.last_round > 0 for trial in trials)
    arms = len({trial.plan.label for trial in trials})
    return begun and all(ended[seed] == arms for seed in range(3)) and ended[3] < arms


@pytest.mark.slow
def test_a_kill_in_the_third_look_and_a_resume_give_the_same_table(undisturbed, tmp_path):
    """Until it is resumed, the report has the verdicts and intervals of the second look, which are valid then."""
    write_space(tmp_path, "decided", DECIDED)
    kill_in_the_third_look(tmp_path, "decided")
    killed, whole = newest(tmp_path, "decided"), newest(undisturbed, "decided")
    first_seeds = [trial for trial in whole.trials() if trial.plan.seed < 3]
    shown = [one.comparison for one in summarise(killed.manifest(), killed.trials())]
    assert shown == [one.comparison for one in summarise(whole.manifest(), first_seeds)]
    compared = [one for one in shown if one is not None]
    assert {one.sequential.seeds for one in compared} == {3}
    assert all(one.verdict == "open" and one.interval is not None for one in compared)
    fedsweep(tmp_path, "tune", "decided", "--resume")
    assert table(tmp_path, "decided") == table(undisturbed, "decided")
    more = fedsweep(tmp_path, "report", "decided")
    assert "decided yet" not in more.stdout


@pytest.mark.slow
def test_declared_comparisons_are_decided_alike_after_a_kill(tmp_path):
    """All pairs of three arms without a baseline: an arm runs as long as one of its comparisons is open."""
    own = {"space": {"optimizer.lr": {"grid": [0.001, 0.1, 0.11]}}, "baseline": None, "comparisons": "all"}
    folders = [tmp_path / "alone", tmp_path / "killed"]
    for folder in folders:
        write_space(folder, "pairs", {**DECIDED, **own})
    told = fedsweep(folders[0], "tune", "pairs", "--at-once", "1").stderr
    assert len(re.findall(r"^(?:Und|D)ecided after \d seeds: lr \S+ against ", told, re.MULTILINE)) == 3
    kill_in_the_third_look(folders[1], "pairs")
    fedsweep(folders[1], "tune", "pairs", "--resume")
    assert table(folders[0], "pairs") == table(folders[1], "pairs")
    alone, killed = (newest(folder, "pairs") for folder in folders)
    reports = [(one.folder / "report" / "declared.csv").read_text() for one in (alone, killed)]
    assert reports[0] == reports[1]
    assert {row.rpartition(",")[2] for row in reports[0].splitlines()[1:]} <= {*CONCLUSIONS} - {"open"}
    assert counted(alone) <= counted(killed)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"baseline": None},
            "needs a `baseline`, with which arms are compared, or `comparisons`, but there is neither",
        ),
        (
            {"scheduler": {"name": "arms"}},
            "{until: decided} needs `scheduler` none, because no trial is pruned",
        ),
        (
            {"space": {"optimizer.lr": {"grid": [0.1]}}},
            "needs an arm to compare with the baseline, but there is none",
        ),
        ({"seeds": {**UNTIL, "at_mst": 9}}, "`seeds.at_mst` is not an entry of a search space"),
        ({"seeds": {**UNTIL, "at_least": 9}}, "`seeds.at_least` must be at most `seeds.at_most` 6, but it is 9"),
    ],
)
def test_mistakes_end_before_anything_runs(tmp_path, changes, sentence):
    write_space(tmp_path, "decided", {**DECIDED, **changes})
    assert sentence in fedsweep(tmp_path, "tune", "decided", code=2, trains=False).stderr
    assert not (tmp_path / "mlruns").exists()


def test_the_command_line_asks_for_seeds_until_decided(tmp_path):
    write_space(tmp_path, "grid", {**GRID, "seeds": [0, 1]})
    shown = fedsweep(tmp_path, "tune", "grid", "--smallest-effect", "1.5", "--dry-run", trains=False).stdout
    assert "Seeds: until decided, 4 to 20" in shown
    assert "sd 1.5 points:" in shown
    write_space(tmp_path, "rule", {**GRID, "seeds": {"until": "decided", "at_most": 3}})
    shown = fedsweep(tmp_path, "tune", "rule", "--smallest-effect", "2", "--dry-run", trains=False).stdout
    assert "Seeds: until decided, 3 to 3" in shown
    shown = fedsweep(tmp_path, "tune", "rule", "--first-seed", "3", "--dry-run", trains=False).stdout
    assert "Seeds: until decided, 3 to 3 from seed 3" in shown
    refused = fedsweep(tmp_path, "tune", "grid", "--until-decided", "--seeds", "0,1", code=2, trains=False).stderr
    assert "`--until-decided` chooses the seeds itself and cannot be combined with `--seeds`" in refused
