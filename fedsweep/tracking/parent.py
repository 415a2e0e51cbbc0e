"""What the parent run of a sweep says: what is known when it starts, and what its trials say together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedsweep.results import SweepManifest, TrialRecord
from fedsweep.results.arms import arm_label
from fedsweep.results.provenance import TAKEN_FROM
from fedsweep.tracking.datasets import Images, images_of

MOST = 30
"""Dataset inputs of a parent; each trial has its own anyway."""
LONGEST = 500
"""Characters of a tag that lists what trials say."""


def tags(manifest: SweepManifest) -> dict[str, str]:
    """To search and compare sweeps by."""
    goals = [(manifest.metric, manifest.mode)]
    if manifest.against is not None:
        goals.append((manifest.against.metric, manifest.against.mode))
    return {
        "fedsweep.varied": ", ".join(manifest.varied),
        "fedsweep.federation.run_config": manifest.experiment,
        "fedsweep.objective": ", ".join(f"{metric} {mode}" for metric, mode in goals),
        "fedsweep.seeds": ", ".join(map(str, manifest.seeds)),
        "fedsweep.search": manifest.search,
        "fedsweep.scheduler": manifest.scheduler,
        **({"fedsweep.baseline": arm_label(manifest.baseline)} if manifest.baseline else {}),
    }


@dataclass
class Together:
    """What the trials seen so far say together."""

    images: dict[Images, None] = field(default_factory=dict)
    extent: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The least and the largest value of each metric of a round."""
    _marks: dict[str, set[str]] = field(default_factory=dict)

    def add(self, trial: TrialRecord) -> None:
        """See a trial, again or for the first time."""
        for name, mark in trial.plan.marks.items():
            if name != TAKEN_FROM:  # of single trials
                self._marks.setdefault(name, set()).add(mark)
        if len(self.images) < MOST:
            self.images |= dict.fromkeys(images_of(trial.plan))
        for record in trial.history:
            for name, value in (*record.metrics.items(), *record.system.items()):
                low, high = self.extent.get(name, (value, value))
                self.extent[name] = min(low, value), max(high, value)

    @property
    def tags(self) -> Mapping[str, str]:
        """All marks of the trials by name, such as what stood in for a generator of synthetic images."""
        return {f"fedsweep.{name}": ", ".join(sorted(values))[:LONGEST] for name, values in self._marks.items()}
