"""The live table of running trials, with a progress bar over all rounds."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import get_args

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from fedsweep.common.progress import LeftColumn, TimeLeft
from fedsweep.results import OutcomeName, TrialRecord
from fedsweep.results.arms import shown_value

ROWS = 24
"""The largest number of trials in the table."""
FIXED, FEWEST = 4, 3
"""The lines below and above the trials, and the number of trials that the lowest terminal shows."""
WIDE = 100
"""The width of a terminal from which on the progress bar has room for the numbers of trials by outcome."""
STOPPING = "Stopping ... all recorded rounds are kept. Another Ctrl-C stops without waiting for trials."


class LiveTable:
    """The live table of a sweep.

    If the output is not a terminal, the table is replaced by one line for each trial that ends.
    """

    def __init__(
        self, console: Console, metric: str, rounds: int, total: int, done: Sequence[TrialRecord], parallel: int = 1
    ) -> None:
        """Create the table of a sweep.

        Args:
            console: The console for progress messages.
            metric: The metric in the table.
            rounds: The number of rounds of each trial.
            total: The number of trials.
            done: The trials that have ended before.
            parallel: The largest number of trials that run at the same time.
        """
        self.console, self.metric, self.rounds = console, metric, rounds
        self.trials = {trial.plan.key: trial for trial in done}
        self._ended = Counter(trial.outcome.outcome for trial in done if trial.outcome)
        self._played = sum(map(self._progress_of, done))
        self.total, self.begun = total, time.monotonic()
        played = (BarColumn(), MofNCompleteColumn(), TextColumn("rounds"), TimeElapsedColumn())
        self.parallel, self.time, self.stopping = parallel, TimeLeft(), False
        self.notes: Callable[[], Sequence[str]] = list
        """A function that returns lines to show below the table, such as the comparisons that are open."""
        self.progress = Progress(
            TextColumn("{task.description}"), *played, LeftColumn(lambda _: self.left()), console=console
        )
        self.task = self.progress.add_task(self._counted(), total=total * rounds, completed=self._played)
        live = Live(console=console, refresh_per_second=4, get_renderable=self.render, transient=True)
        self.live: contextlib.AbstractContextManager[object] = live if console.is_terminal else contextlib.nullcontext()

    def update(self, trial: TrialRecord) -> None:
        """Show a trial that is new, has a new round or has ended."""
        before = self.trials.get(trial.plan.key)
        self.trials[trial.plan.key] = trial
        known = trial if before is None else before  # rounds that were recorded before do not count
        for record in trial.history:
            if record.round > max(known.last_round, 0):  # round 0 only evaluates
                self.time.add(record.seconds)
        self._count(before, trial)
        news = trial.outcome is not None and (before is None or before.outcome is None)
        if news and not self.console.is_terminal:
            self.console.print(self._line(trial))
        # A population gains trials. A trial that continues another one does not repeat the rounds of that trial.
        self.total = max(self.total, len(self.trials))
        whole = self.total * self.rounds
        self.progress.update(self.task, total=whole, completed=self._played, description=self._counted())

    def forget(self, key: str) -> None:
        """Leave out a trial that no longer belongs to the sweep."""
        self._count(self.trials.pop(key), None)

    def _count(self, before: TrialRecord | None, after: TrialRecord | None) -> None:
        """Update the counts for a trial that has changed, instead of counting all trials of a large sweep again."""
        for trial, sign in ((before, -1), (after, 1)):
            if trial is not None:
                self._played += sign * self._progress_of(trial)
                if trial.outcome is not None:
                    self._ended[trial.outcome.outcome] += sign

    def _progress_of(self, trial: TrialRecord) -> int:
        """Return the number of rounds with which a trial counts in the progress bar: all rounds if it has ended."""
        return self.rounds if trial.outcome else max(trial.last_round, 0)

    def left(self) -> float | None:
        """Return the estimated number of seconds until all trials have ended, or None if it is not known yet."""
        return time_left(self.time, self.trials.values(), self.rounds, self.total, self.parallel)

    def stop(self) -> None:
        """Show that the sweep is stopping, and what is kept."""
        if not self.stopping:
            self.stopping = True
            self.console.print(STOPPING, soft_wrap=True, style="yellow")

    def render(self) -> Group:
        """Return the table of the running and recently ended trials, with the progress bar below it.

        If the terminal is too low for all of them, trials are left out, so that the progress bar stays visible.
        """
        running = [trial for trial in self.trials.values() if trial.outcome is None]
        ended = [trial for trial in self.trials.values() if trial.outcome]
        counts = [Text(f"Ended: {self._outcomes()}.")] if self._narrow and self._outcomes() else []
        below = [*map(Text, self.notes()), *counts]
        lines = sum(1 + len(text) // self.console.width for text in below)
        room = max(self.console.height - lines - FIXED, FEWEST)
        table = self._table(running, ended, rows := min(ROWS, room))
        while rows > FEWEST and (high := len(self.console.render_lines(table)) - 1) > room:  # long names are wrapped
            rows = max(FEWEST, min(rows - 1, rows * room // high))
            table = self._table(running, ended, rows)
        left = len(running) - rows
        more = [Text(f"{left} more {'trial is' if left == 1 else 'trials are'} running.")] if left > 0 else []
        return Group(table, *more, *below, Padding(self.progress, (0, len("^C"), 0, 0)))  # a terminal echoes Ctrl-C

    def _table(self, running: Sequence[TrialRecord], ended: Sequence[TrialRecord], rows: int) -> Table:
        """Return a table of at most `rows` trials: the running ones, preceded by those that ended last."""
        numbers = (Column(heading, justify="right") for heading in ("seed", "round", self.metric))
        table = Table("trial", *numbers, "status", box=None, pad_edge=False, header_style="bold")
        recent = ended[len(ended) - min(max(rows - len(running), 0), len(ended)) :]
        for trial in [*recent, *running[:rows]]:
            table.add_row(*self._cells(trial), style="dim" if trial.outcome else "")
        return table

    def _cells(self, trial: TrialRecord) -> tuple[str, str, str, str, str]:
        measured = [one.metrics[self.metric] for one in trial.history if self.metric in one.metrics]
        value = measured[-1] if measured else None
        state = trial.outcome.outcome if trial.outcome else "running" if trial.history else "starting"
        shown, rounds = shown_value(self.metric, value), f"{max(trial.last_round, 0)}/{self.rounds}"
        return trial.plan.label, str(trial.plan.seed), rounds, shown, state

    def _line(self, trial: TrialRecord) -> str:
        label, seed, rounds, value, state = self._cells(trial)
        shown = f"{label} · seed {seed}: {state} at round {rounds}{f', {self.metric} {value}' if value else ''}"
        ended = self._ended.total()
        reason = f"; {trial.outcome.reason}" if trial.outcome and trial.outcome.reason else ""
        return f"{ended} of {self.total} trials ended after {time.monotonic() - self.begun:.0f} s: {shown}{reason}"

    @property
    def _narrow(self) -> bool:
        """True if the numbers of trials by outcome do not fit next to the progress bar, so that it would be cut off."""
        return self.console.width < WIDE

    def _outcomes(self) -> str:
        return ", ".join(f"{count} {name}" for name in get_args(OutcomeName) if (count := self._ended[name]))

    def _counted(self) -> str:
        parts = "" if self._narrow else self._outcomes()
        return f"{self._ended.total()} of {self.total} trials" + (f" ({parts})" if parts else "")


def time_left(time: TimeLeft, trials: Collection[TrialRecord], rounds: int, total: int, parallel: int) -> float | None:
    """Return the estimated number of seconds until all trials have ended, or None if it is not known yet.

    Args:
        time: The durations of rounds that have ended.
        trials: The trials that have started.
        rounds: The number of rounds of each trial.
        total: The number of trials.
        parallel: The largest number of trials that run at the same time.
    """
    begun = [rounds - max(one.last_round, 0) for one in trials if one.outcome is None]
    each = [*begun, *([rounds] * max(total - len(trials), 0))]
    return time.left(sum(each), max(min(parallel, len(each)), 1), max(each, default=0))


@contextlib.contextmanager
def delivering(console: Console) -> Iterator[Callable[[int], None]]:
    """Show a status line while the last rounds are sent to MLflow.

    The yielded function updates this line. Its argument is the number of MLflow runs that are left to send.
    """
    with console.status("") as status:
        yield lambda left: status.update(
            f"Sending the last rounds to MLflow: {left} run{'s' * (left != 1)} left (press Ctrl-C to send them later)"
        )
