"""What a store's files say: what a sweep is, what a trial is to run, what it recorded and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from fedsweep.arms import Arm, Reference, arm_label
from fedsweep.config import Config
from fedsweep.front import Against, Mode
from fedsweep.history import RoundRecord
from fedsweep.plain import Json

OutcomeName = Literal["finished", "pruned", "diverged", "failed"]


class SweepManifest(Config):
    """What a sweep is, fixed when it starts."""

    id: str = Field(description="unique; the folder's name")
    name: str = Field(description="the search space, e.g. ablations/lora_rank")
    experiment: str = Field(description="the experiment it varies")
    created: str = Field(description="UTC, ISO 8601")
    metric: str = Field(description="the objective, e.g. accuracy/mean")
    mode: Mode
    against: Against | None = Field(None, description="the second objective, if there are two")
    rounds: int = Field(description="rounds of a whole trial")
    varied: tuple[str, ...] = Field(description="dotted names that differ between arms")
    baseline: Arm | None = Field(None, description="the arm that others are compared to")
    reference: Reference | None = Field(None, description="a paper's values of some arms")
    seeds: tuple[int, ...]
    trials: int | None = Field(None, description="how many there are in the end; null of a population")
    scheduler: str
    search: str
    processor: str = Field("", description="what decides the last digits of a trial: device and threads")
    fresh: bool = Field(False, description="whether no trial is taken from another sweep")
    domains: tuple[str, ...]
    overrides: dict[str, Json] = Field(default_factory=dict, description="the user's changes to the experiment")
    options: dict[str, Json] = Field(default_factory=dict, description="the user's changes to the search space")
    digests: dict[str, str] = Field(description="of the definition, the engine's code, the data, and the packages")


class Start(Config):
    """Where a trial begins that goes on from another one."""

    key: str = Field(description="the trial whose state and history it has")
    round: int = Field(ge=0, description="after this round")


class TrialPlan(Config):
    """One federated run of a sweep."""

    key: str = Field(description="digest of resolved configuration, code and data")
    number: int = Field(ge=0, description="place in the plan")
    arm: Arm = Field(description="the varied hyperparameters, by dotted name")
    seed: int
    config: dict[str, Json] = Field(description="the whole resolved run, nested as in an experiment file")
    digests: dict[str, str] = Field(default_factory=dict, description="of the data and weights that it names")
    marks: dict[str, str] = Field(default_factory=dict, description="what a reader of its numbers must know, by name")
    start: Start | None = Field(None, description="the trial that it goes on from; null for the untuned model")

    @property
    def label(self) -> str:
        """The arm for people, e.g. `lora.rank=4`."""
        return arm_label(self.arm)


class Outcome(Config):
    """How a trial ended."""

    outcome: OutcomeName
    round: int = Field(description="the last round that it reported")
    reason: str | None = Field(None, description="why it was stopped, as a sentence")
    error: str | None = Field(None, description="traceback of a failure, or of what told that the run diverged")


@dataclass(frozen=True)
class TrialRecord:
    """A trial as it stands on disk; `outcome` is None while it has not ended."""

    plan: TrialPlan
    outcome: Outcome | None
    history: Sequence[RoundRecord]
    artifacts: Mapping[str, Path] = field(default_factory=dict)
    """Files by name that the trial left for people to look at."""

    @property
    def last_round(self) -> int:
        """The last round recorded, -1 before the untuned model was evaluated."""
        return self.history[-1].round if self.history else -1


def count_outcomes(trials: Iterable[TrialRecord]) -> dict[OutcomeName, int]:
    """Ended trials by outcome."""
    ended = [trial.outcome.outcome for trial in trials if trial.outcome]
    return {name: ended.count(name) for name in get_args(OutcomeName)}
