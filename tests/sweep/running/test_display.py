"""The live table of a sweep: the time left on a simulated clock, and the lines that replace the table in a pipe."""

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from fedsweep.common.progress import TimeLeft
from fedsweep.results import Outcome, TrialPlan, TrialRecord
from fedsweep.results.arms import Arm
from fedsweep.results.history import RoundRecord
from fedsweep.sweep.running.display import LiveTable
from tests.common.test_progress import Clock

ROUNDS, TRIALS = 12, 4


def trial(number: int, seconds: Sequence[float], outcome: bool = False) -> TrialRecord:
    """Return a trial with one recorded round for each entry of `seconds`, starting with round 0."""
    plan = TrialPlan(key=f"key{number}", number=number, arm={"lora.rank": number}, seed=0, config={})
    history = [RoundRecord(round, {"accuracy/mean": 0.5}, taken) for round, taken in enumerate(seconds)]
    return TrialRecord(plan, Outcome(outcome="finished", round=ROUNDS) if outcome else None, history)


def table(clock: Clock, done: Sequence[TrialRecord] = (), text: io.StringIO | None = None) -> LiveTable:
    """Return the table of a sweep of four trials, of which two run at the same time."""
    made = LiveTable(Console(file=text or io.StringIO(), width=120), "accuracy/mean", ROUNDS, TRIALS, done, parallel=2)
    made.time = TimeLeft(clock)
    return made


@pytest.mark.parametrize(("running", "notes"), [(2, 0), (2, 3), (40, 0), (40, 3)])
def test_the_live_table_fits_into_80_columns_and_24_rows(running, notes):
    """The progress bar is the last line, and no line is wrapped or cut off."""
    clock, file = Clock(), io.StringIO()
    console = Console(file=file, width=80, height=24, force_terminal=True, color_system=None, legacy_windows=False)
    done = [trial(number, [1.0] * 13, outcome=True) for number in range(100)]
    shown = LiveTable(console, "accuracy/mean", ROUNDS, 1000, done, parallel=running)
    shown.time = TimeLeft(clock)
    shown.notes = lambda: ["lora.rank=4 against lora.rank=8: open after 4 seeds"] * notes
    for number in range(running):
        shown.update(trial(100 + number, []))
        shown.update(trial(100 + number, [0.1, 5.0]))
    clock.now += 1.0
    console.print(shown.render(), end="")
    lines = file.getvalue().rstrip("\n").split("\n")
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("100 of 1000 trials ")
    assert lines[-1].rstrip().endswith(" left")
    assert len(lines[-1].rstrip()) <= 78  # Ctrl-C, which a terminal shows as `^C`, starts no new line
    assert lines[-2].strip() == "Ended: 100 finished."
    assert sum("running" in line for line in lines) == min(running, 19 - notes) + (running == 40)
    assert (f"{40 - 19 + notes} more trials are running." in file.getvalue()) == (running == 40)


@pytest.mark.parametrize("running", [2, 30])
def test_the_live_table_fits_into_24_rows_if_names_are_wrapped(running):
    file = io.StringIO()
    console = Console(file=file, width=80, height=24, force_terminal=True, color_system=None, legacy_windows=False)
    shown = LiveTable(console, "accuracy/mean", ROUNDS, 100, [], parallel=running)
    for number in range(40):
        arm: Arm = {"method": "fedbrick", "method.over": "inclusivefl", "optimizer.lr": number / 100}
        plan = TrialPlan(key=f"key{number}", number=number, arm=arm, seed=0, config={})
        shown.update(TrialRecord(plan, Outcome(outcome="finished", round=ROUNDS) if number >= running else None, []))
    console.print(shown.render(), end="")
    lines = file.getvalue().rstrip("\n").split("\n")
    assert 18 <= len(lines) <= 23
    assert lines[-1].startswith(f"{40 - running} of 100 trials ")
    assert any(line.startswith("optimizer.lr=") for line in lines)
    assert (" more trials are running." in file.getvalue()) == (running == 30)


def test_accuracies_are_shown_in_percent():
    text = io.StringIO()
    table(Clock(), text=text).update(trial(0, [1.0] * 13, outcome=True))
    assert "finished at round 12/12, accuracy/mean 50.00%" in text.getvalue()


def test_recorded_rounds_and_the_start_of_ray_do_not_count_after_a_resume():
    clock = Clock()
    shown = table(clock, [trial(0, [0.001] * 13, outcome=True)])
    shown.update(trial(1, [0.001] * 6))  # recorded before the kill
    assert shown.left() is None
    clock.now += 35.0
    assert shown.left() is None
    shown.update(trial(1, [0.001] * 6 + [3.0]))
    assert shown.left() == pytest.approx((6 + 2 * ROUNDS) * 3.0 / 2)


def test_the_time_left_of_a_new_sweep_is_that_of_its_rounds():
    clock = Clock()
    shown = table(clock)
    for number in (0, 1):
        shown.update(trial(number, []))
    clock.now += 30.0
    for recorded in range(1, 4):  # round 0, the evaluation of the untuned model, is quick and does not count
        for number in (0, 1):
            shown.update(trial(number, [0.1, 5.0, 5.0][:recorded]))
    assert shown.left() == pytest.approx((2 * 10 + 2 * ROUNDS) * 5.0 / 2)
    clock.now += 2.0
    assert shown.left() == pytest.approx((2 * 10 + 2 * ROUNDS) * 5.0 / 2 - 2.0)


def test_the_last_trial_is_not_divided_by_the_number_of_parallel_trials():
    shown = table(Clock(), [trial(number, [1.0] * 13, outcome=True) for number in range(3)])
    shown.update(trial(3, [0.1]))
    shown.update(trial(3, [0.1, 4.0]))
    assert shown.left() == pytest.approx(11 * 4.0)


def test_a_pipe_gets_one_line_for_ctrl_c():
    text = io.StringIO()
    shown = table(Clock(), text=text)
    shown.stop()
    shown.stop()
    assert text.getvalue().splitlines() == [
        "Stopping ... all recorded rounds are kept. Another Ctrl-C stops without waiting for trials.",
    ]


def test_the_counts_after_every_change_are_those_of_all_trials():
    clock = Clock()
    shown = table(clock, [trial(0, [0.1] * 13, outcome=True)])
    changes = [
        trial(1, []),
        trial(1, [0.1, 1.0]),
        trial(2, [0.1] * 13, outcome=True),
        trial(2, [0.1] * 5),  # its arm was pruned because of a failure that is retried
        trial(1, [0.1] * 7, outcome=True),
        trial(2, [0.1] * 13, outcome=True),
    ]
    for change in changes:
        shown.update(change)
        anew = table(clock, list(shown.trials.values()))
        now, then = shown.progress.tasks[0], anew.progress.tasks[0]
        assert (now.description, now.completed, now.total) == (then.description, then.completed, then.total)
    assert now.description == "3 of 4 trials (3 finished)"
    assert now.completed == 3 * ROUNDS
