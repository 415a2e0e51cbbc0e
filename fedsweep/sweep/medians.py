"""The median stopping rule of Golovin et al. (2017), whose decisions survive the process. No ray, no torch."""

import statistics
from collections import defaultdict
from pathlib import Path

from fedsweep.results.remote import NOTHING, Remote
from fedsweep.sweep.decisions import Decision, Decisions
from fedsweep.sweep.schedulers import MedianScheduler


class Medians:
    """A trial ends whose best value so far is below the median of the running means of others at the same round.

    Each stratum has medians of its own. Every round is logged: what is known of other trials must be the same after a
    resume.
    """

    def __init__(self, config: MedianScheduler, log: Path, remote: Remote = NOTHING) -> None:
        self.config = config
        self.values: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        self.decisions = Decisions(log, remote)
        for made in self.decisions.made.values():
            self.values[made.stratum][made.key][made.round] = made.value

    def decide(self, key: str, round: int, value: float, stratum: str = "") -> bool:
        """Whether the trial is stopped after this round. `value` is better when larger."""
        if round < 1:
            return False  # the untuned model
        if (made := self.decisions.made.get((key, round))) is not None:
            return made.stop
        known = self.values[stratum]
        known[key][round] = value
        others = [
            statistics.fmean(one for at, one in values.items() if at <= round)
            for other, values in known.items()
            if other != key and round in values
        ]
        enough = round >= self.config.grace_rounds and len(others) >= self.config.fewest
        stop = enough and max(known[key].values()) < statistics.median(others)
        self.decisions.add(Decision(key, round, value, stop, stratum))
        return stop
