"""Records in the results folder: sweep manifests, trial plans, outcomes, attempts and provenance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import Arm, Reference, arm_label
from fedsweep.results.history import RoundRecord
from fedsweep.results.pareto import Against, Mode

TAKEN_FROM = "taken_from"  # tag: the earlier sweep that ran a trial of this one
SYNTHETIC = "synthetic"  # tag: the source of the synthetic images that a run trains on
STAND_INS = {
    "surrogate": "surrogates, drawn from the statistics of images held out for the server and made by no generator"
}
"""Descriptions of images that replace a generator's, by source."""
OutcomeName = Literal["finished", "pruned", "diverged", "failed"]


class SweepManifest(Config):
    """Description of a sweep, fixed when it starts."""

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
    columns: tuple[str, ...] = Field((), description="what the table shows beside the objective; empty for the usual")
    logarithmic: tuple[str, ...] = Field((), description="dotted names that a search draws over a logarithm")
    overrides: dict[str, Json] = Field(default_factory=dict, description="the user's changes to the experiment")
    options: dict[str, Json] = Field(default_factory=dict, description="the user's changes to the search space")
    digests: dict[str, str] = Field(description="of the definition, the engine's code, the data, and the packages")


class Start(Config):
    """The starting point of a trial that continues another one."""

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
        """The arm as text for people, e.g. `lora.rank=4`."""
        return arm_label(self.arm)


class Outcome(Config):
    """The outcome of a trial that has ended."""

    outcome: OutcomeName
    round: int = Field(description="the last round that it reported")
    reason: str | None = Field(None, description="why it was stopped, as a sentence")
    error: str | None = Field(None, description="traceback of a failure, or of what told that the run diverged")


class Attempt(Config):
    """One attempt of a worker to run a trial. Fields are None while the attempt runs, and if it was interrupted."""

    gpus: float = Field(ge=0, description="of a GPU, what it was given")
    round: int | None = Field(None, description="the last round that it reported")
    peak: int | None = Field(None, description="bytes, the most that it held of the GPU")
    beside: int = Field(0, description="bytes taken on a GPU that it had alone by other than its tensors")
    total: int | None = Field(None, description="bytes of the GPU")
    seconds: float | None = Field(None, description="of its last round")
    out_of_memory: bool = Field(False, description="whether it ended because the memory did not suffice")


class Attempts(Config):
    """All attempts to run a trial, in order of time (`gpus.json`)."""

    attempts: tuple[Attempt, ...] = ()

    def marks(self) -> dict[str, str]:
        """Return the tags for MLflow: the last fraction of a GPU, and how often the GPU ran out of memory."""
        if not self.attempts:
            return {}
        ran_out = sum(one.out_of_memory for one in self.attempts)
        return {"gpus": f"{self.attempts[-1].gpus:g}", **({"out_of_memory": str(ran_out)} if ran_out else {})}


@dataclass(frozen=True)
class TrialRecord:
    """A trial as recorded on disk; `outcome` is None until it has ended."""

    plan: TrialPlan
    outcome: Outcome | None
    history: Sequence[RoundRecord]
    artifacts: Mapping[str, Path] = field(default_factory=dict)
    """Files for people to look at, by name."""
    attempts: Sequence[Attempt] = ()
    """Attempts on a GPU; none on a CPU."""

    @property
    def last_round(self) -> int:
        """The last recorded round, or -1 before the evaluation of the untuned model."""
        return self.history[-1].round if self.history else -1


def count_outcomes(trials: Iterable[TrialRecord]) -> dict[OutcomeName, int]:
    """Return the number of ended trials by outcome."""
    ended = [trial.outcome.outcome for trial in trials if trial.outcome]
    return {name: ended.count(name) for name in get_args(OutcomeName)}


def stand_in(tags: Mapping[str, str]) -> str | None:
    """Return the description of the stand-ins for generated images in a run with these tags, or None if it has none.

    >>> stand_in({"synthetic": "folder"}), stand_in({})
    (None, None)
    """
    return STAND_INS.get(tags.get(SYNTHETIC, ""))


def warning(made: str, where: str = "") -> str:
    """Return the warning about stand-ins for generated images.

    >>> warning("surrogates", "all arms")
    'Synthetic images: surrogates (all arms).'
    """
    return f"Synthetic images: {made}{f' ({where})' if where else ''}."
