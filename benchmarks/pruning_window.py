"""Simulate three rules of successive halving, and measure the cost of decisions that do not depend on the workers.

    uv run python benchmarks/pruning_window.py

The script writes `results/pruning_window.json` and `results/pruning_window.md`. It compares these rules:

- `asha_async` compares a trial with the trials that have reached the rung so far. Its decisions depend on the workers.
- `asha` compares trial n with all earlier trials that reach the rung, and lets it wait for them if needed.
- *window* compares trial n with trials 0 to n - `in_flight`, and starts it after these trials have ended. fedsweep does
  not contain this rule.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from pruning_problems import RESULTS, Array, Trial  # in the same folder
from pruning_workers import NO_LOG, Unlogged, work
from rich.progress import track

from fedsweep.sweep.pruning.trial_halving import Recorded, TrialVerdicts, halve_in_order
from fedsweep.sweep.pruning.trial_rules import Rungs
from fedsweep.sweep.space.settings import AsyncASHAScheduler, rungs

GRACE, ETA, ROUNDS = 3, 3, 27
SIZES, WORKERS = (24, 128), (4, 16, 64)


class Halving:
    """The base class of the simulated rules, which start the trials in the order of their numbers.

    If `in_flight` is given, trial n starts after trials 0 to n - `in_flight` have ended.
    """

    def __init__(self, curves: Array, in_flight: int | None = None) -> None:
        self.curves, self.in_flight, self.ended = curves, in_flight, set[int]()
        self.milestones = rungs(GRACE, ETA, ROUNDS)
        self._begun, self._first = 0, 0

    def begin(self) -> tuple[Trial, int] | None:
        """Return the next trial and its last round, or None if no trial may start now."""
        while self._first in self.ended:
            self._first += 1
        full = self.in_flight is not None and self._begun - self.in_flight >= self._first
        if full or self._begun == len(self.curves):
            return None
        self._begun += 1
        return (self._begun - 1, 0), ROUNDS


class Asynchronous(Halving):
    """The rule `asha_async`."""

    def __init__(self, curves: Array, in_flight: int | None = None) -> None:
        super().__init__(curves, in_flight)
        self.rule = Rungs(AsyncASHAScheduler(grace_rounds=GRACE, reduction_factor=ETA), ROUNDS, NO_LOG)
        self.rule.decisions = Unlogged(NO_LOG)

    def next(self, running: Mapping[Trial, int]) -> tuple[Trial, int] | None:
        """Return the next trial and its last round, or None if no trial may start now."""
        return self.begin()

    def goes_on(self, trial: Trial, round: int) -> bool:
        """Return whether the rule lets a trial continue after a round."""
        stops = round == ROUNDS or self.stops(trial[0], round, float(self.curves[*trial, round - 1]))
        if stops:
            self.ended.add(trial[0])
        return not stops

    def stops(self, number: int, round: int, value: float) -> bool:
        """Return whether the rule prunes a trial after a round."""
        return self.rule.decide(str(number), round, value)


class Window(Asynchronous):
    """The rule *window*: trial n is compared with those of trials 0 to n - `in_flight` that reached the rung."""

    def __init__(self, curves: Array, in_flight: int) -> None:
        super().__init__(curves, in_flight)
        self._values: dict[int, dict[int, float]] = defaultdict(dict)

    def stops(self, number: int, round: int, value: float) -> bool:
        """Return whether the rule prunes a trial after a round."""
        if round not in self.milestones:
            return False
        rung, last = self._values[round], number - (self.in_flight or 1)
        others = [one for other, one in rung.items() if other <= last]
        rung[number] = value
        return bool(others) and bool(value < np.quantile(others, 1 - 1 / ETA))


class InOrder(Halving):
    """The rule `asha`."""

    def __init__(self, curves: Array, in_flight: int | None = None) -> None:
        super().__init__(curves, in_flight)
        self._last: dict[int, int] = {}
        self._verdicts: TrialVerdicts | None = TrialVerdicts()

    def next(self, running: Mapping[Trial, int]) -> tuple[Trial, int] | None:
        """Return the first trial that may continue, or else a new trial, or None if no trial may run now."""
        for number, until in self.verdicts().promoted.items():
            if self._last[number] < until and (number, 0) not in running:
                return (number, 0), ROUNDS
        if (begun := self.begin()) is not None:
            self._last[begun[0][0]], self._verdicts = 0, None
        return begun

    def goes_on(self, trial: Trial, round: int) -> bool:
        """Record a round, and return whether the trial continues without waiting."""
        self._last[trial[0]] = round
        if round in (*self.milestones, ROUNDS):
            self._verdicts = None
        return trial[0] in self.verdicts().promoted

    def verdicts(self) -> TrialVerdicts:
        """Return the decisions that follow from the rounds so far."""
        if self._verdicts is None:
            values = {
                number: {one: float(self.curves[number, 0, one - 1]) for one in self.milestones if one <= last}
                for number, last in self._last.items()
            }
            trials = {number: Recorded(values[number], last) for number, last in self._last.items()}
            found = self._verdicts = halve_in_order(trials, self.milestones, ROUNDS, ETA)
            whole = {number for number, last in self._last.items() if last == ROUNDS}
            self.ended = {*found.pruned, *whole}
        return self._verdicts


def problem(rng: np.random.Generator, trials: int) -> tuple[Array, Array, dict[Trial, float]]:
    """Draw a problem: noisy curves of unequal speed, the true last values, and the seconds of a round of each trial.

    Returns:
        The curves (trials, 1, rounds), the true last values (trials,), and a dict from each trial to its seconds, whose
        mean is 1.
    """
    level, speed = 0.1 + 0.8 * rng.beta(2, 3, trials), rng.lognormal(np.log(4), 0.5, trials)
    true = level[:, None] * (1 - np.exp(-np.arange(1, ROUNDS + 1) / speed[:, None]))
    seconds = rng.lognormal(0, 0.5, trials)
    by_trial = {(number, 0): float(one) for number, one in enumerate(seconds / seconds.mean())}
    return (true + rng.normal(0, 0.02, true.shape))[:, None, :], true[:, -1], by_trial


def simulate(rule: Any, truth: Array, seconds: Mapping[Trial, float], workers: int) -> dict[str, float]:
    """Run a sweep on simulated workers, and return its cost and the regret of its best finished trial."""
    done = work(rule, (len(truth), 1), workers, seconds)
    rounds = done.rounds[:, 0]
    last = np.where(rounds == ROUNDS, rule.curves[:, 0, -1], -np.inf)
    busy = sum(float(rounds[number]) * seconds[number, 0] for number in range(len(truth)))
    return {
        "rounds": float(rounds.sum()) / rule.curves.size,
        "regret": float(100 * (truth.max() - truth[last.argmax()])),
        "idle": 1 - busy / done.time / workers,
        "time": done.time,
    }


def measure(size: int, workers: int, repetitions: int) -> list[dict[str, Any]]:
    """Return a row for each rule, with means over random problems that are the same for all rules."""
    once, twice = workers, 2 * workers
    rules: dict[tuple[str, str], Any] = {
        ("unlimited", "asha_async"): Asynchronous,
        ("unlimited", "asha"): InOrder,
        ("workers", "asha_async"): lambda curves: Asynchronous(curves, once),
        ("workers", "asha"): lambda curves: InOrder(curves, once),
        ("workers", "window"): lambda curves: Window(curves, once),
        ("2 x workers", "asha_async"): lambda curves: Asynchronous(curves, twice),
        ("2 x workers", "asha"): lambda curves: InOrder(curves, twice),
        ("2 x workers", "window"): lambda curves: Window(curves, twice),
    }
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for seed in range(repetitions):
        curves, truth, seconds = problem(np.random.default_rng(seed), size)
        for name, rule in rules.items():
            found[name].append(simulate(rule(curves), truth, seconds, workers))
    means = {name: {key: float(np.mean([one[key] for one in rows])) for key in rows[0]} for name, rows in found.items()}
    rows = []
    for (in_flight, rule), row in means.items():
        base = means[in_flight, "asha_async"]
        cost = {f"{key} relative": row[key] / base[key] - 1 for key in ("rounds", "time")}
        rows.append({"trials": size, "workers": workers, "in_flight": in_flight, "rule": rule, **row, **cost})
    return rows


PAGE = """# The cost of decisions that do not depend on the workers

`benchmarks/pruning_window.py` runs sweeps on simulated workers, and compares three rules of successive halving:

- `asha_async` compares a trial with the trials that have reached the rung (the round of the comparison) so far. Its
  decisions depend on the number and the speed of the workers.
- `asha` compares a trial with all trials that have a lower number and reach the rung. If the decision depends on trials
  that have not reached the rung yet, the trial waits, and its worker runs another trial. Its decisions are the same for
  any number of workers.
- *window* compares trial n with trials 0 to n - `in_flight`, and starts trial n after these trials have ended. Its
  decisions are also the same for any number of workers. fedsweep does not contain this rule.

Each row is a mean over {repetitions} random problems. A trial has at most {rounds} rounds, with rungs at rounds 3 and
9, and about a third of the trials passes a rung. The curves have random levels, speeds and noise. All rounds of a trial
take the same time, which differs between trials (log-normal, with a standard deviation of 0.5 of the logarithm).

- `in flight`: the limit `in_flight`. Trial n starts after trials 0 to n - `in_flight` have ended. Grids and random
  searches have no limit. TPE has the limit `search.in_flight`.
- `rounds`: the rounds that were run, as a share of all rounds.
- `regret`: the true value of the best trial minus that of the selected trial, in percentage points. The selected trial
  has the highest last value of all finished trials.
- `idle`: the share of the workers' time in which no trial runs.
- `time`: the duration of the sweep, in mean durations of a round.

The columns `rounds +` and `time +` compare a rule with `asha_async` at the same limit.

"""


def main() -> None:
    """Run the simulations, and write the page and the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=200, help="number of random problems for each row")
    repetitions = parser.parse_args().repetitions
    cases = [(size, workers) for size in SIZES for workers in WORKERS]
    rows = [row for size, workers in track(cases) for row in measure(size, workers, repetitions)]
    found = {"repetitions": repetitions, "grace_rounds": GRACE, "reduction_factor": ETA, "rounds": ROUNDS, "rows": rows}
    (RESULTS / "pruning_window.json").write_text(json.dumps(found, indent=2) + "\n")
    lines = [PAGE.format(repetitions=repetitions, rounds=ROUNDS)]
    for size in SIZES:
        lines.append(f"## {size} trials\n\n")
        lines.append("| workers | in flight | rule | rounds | rounds + | regret | idle | time | time + |\n")
        lines.append("| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n")
        for row in (one for one in rows if one["trials"] == size):
            cells = f"{row['workers']} | {row['in_flight']} | {row['rule']} | {row['rounds']:.1%}"
            cells += f" | {row['rounds relative']:+.1%} | {row['regret']:.2f} | {row['idle']:.0%}"
            lines.append(f"| {cells} | {row['time']:.1f} | {row['time relative']:+.1%} |\n")
        lines.append("\n" if size != SIZES[-1] else "")
    (RESULTS / "pruning_window.md").write_text("".join(lines))


if __name__ == "__main__":
    main()
