"""Records in the results folder: sweep manifests, trial plans, outcomes, attempts and provenance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, get_args

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.randomness import StreamName
from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import Arm, Reference, arm_label
from fedsweep.results.declared_comparisons import Declared
from fedsweep.results.history import VALIDATION, RoundRecord, uses_test_images
from fedsweep.results.pareto import Against, Mode
from fedsweep.results.seeds import UntilDecided
from fedsweep.results.tuned_arms import Stage, stage_of

RIGHT = "right.json"  # the file of a trial with the test images that it predicts correctly
TAKEN_FROM = "taken_from"  # tag of a reused trial: the earlier sweep that ran it
PLUGINS = "plugins"  # tag of a run, and key of a digest: the outside packages whose classes it uses
SYNTHETIC = "synthetic"  # tag of a run: the source of the synthetic images that it trains on
IN_DOMAIN_TEST = "in_domain_test"  # key of a plan's `images`: the test images that accuracy/mean counts
STAND_INS = {
    "surrogate": "surrogates, drawn from the statistics of images held out for the server, not made by a generator"
}
"""Descriptions of stand-ins, images that replace the output of a generator, by source."""
OutcomeName = Literal["finished", "pruned", "diverged", "failed"]


class StoredRecord(Config):
    """The base class of the records that fedsweep writes to the results folder as JSON files."""

    what_a_name_is: ClassVar[str] = "an entry that this version of fedsweep knows"
    written_by_hand: ClassVar[bool] = False


class Change(StoredRecord):
    """A change that a person made to a sweep after it had started."""

    kind: Literal["extended", "dropped", "stopped"]
    time: str = Field(description="time of the change in UTC, as in ISO 8601")
    ended: int = Field(description="number of trials that had ended before the change")
    seeds: tuple[int, ...] = Field((), description="seeds that were added")
    arm: Arm | None = Field(None, description="the arm that was dropped")

    @property
    def sentence(self) -> str:
        """The change as a sentence, such as `The arm lora.rank=4 was dropped on 2026-11-28 at 05:10 UTC ...`."""
        day, _, clock = self.time.partition("T")
        trials = f"{self.ended} trial{'s' * (self.ended != 1)} had ended"
        when = f"on {day} at {clock[:5]} UTC, when {trials}"
        if self.kind == "extended":
            plural, seeds = "s" * (len(self.seeds) > 1), ", ".join(map(str, self.seeds))
            return f"The sweep was extended by the seed{plural} {seeds} {when}."
        if self.kind == "dropped":
            return f"The arm {arm_label(self.arm or {})} was dropped {when}."
        return f"The sweep was stopped {when}."


class SweepManifest(StoredRecord):
    """The description of a sweep, written when the sweep starts."""

    id: str = Field(description="unique id, which is also the name of the folder")
    name: str = Field(description="the search space, e.g. ablations/lora_rank")
    experiment: str = Field(description="the experiment that the search space varies")
    created: str = Field(description="start time in UTC, as in ISO 8601")
    metric: str = Field(description="the objective, e.g. accuracy/mean")
    mode: Mode
    against: Against | None = Field(None, description="the second objective, if there are two")
    rounds: int = Field(description="rounds of a complete trial")
    varied: tuple[str, ...] = Field(description="dotted names of the settings that differ between arms")
    baseline: Arm | None = Field(None, description="the arm to which the others are compared")
    comparisons: Declared = Field((), description="comparisons that were declared besides those with the baseline")
    reference: Reference | None = Field(None, description="a paper's values for some arms")
    seeds: tuple[int, ...] = Field(description="seeds of every arm or, with `until_decided`, the largest set of seeds")
    seed_streams: tuple[StreamName, ...] | None = Field(
        None, description="random streams that the seed determines; null if it determines all"
    )
    until_decided: UntilDecided | None = Field(
        None, description="rule by which arms got further seeds; null if every arm has the same seeds"
    )
    trials: int | None = Field(
        None, description="final number of trials; null for population-based training and with `until_decided`"
    )
    scheduler: str
    search: str
    processor: str = Field("", description="processor and number of threads; the last digits of results depend on both")
    device: Literal["cpu", "cuda"] | None = Field(None, description="device of all trials; null in older manifests")
    fresh: bool = Field(False, description="whether no trial is reused from an earlier sweep")
    domains: tuple[str, ...]
    titles: dict[str, str] = Field(
        default_factory=dict, description="labels and units of the metrics that plug-ins report, by metric"
    )
    columns: tuple[str, ...] = Field((), description="columns of the table besides the objective; empty for defaults")
    logarithmic: tuple[str, ...] = Field((), description="dotted names of settings that are drawn on a log scale")
    overrides: dict[str, Json] = Field(default_factory=dict, description="the user's changes to the experiment")
    options: dict[str, Json] = Field(default_factory=dict, description="the user's changes to the search space")
    changes: tuple[Change, ...] = Field(
        (), description="changes that a person made after the sweep had started, oldest first"
    )
    machine: str | None = Field(
        None, description="name of the machine that runs all trials; null on a cluster and in sweeps of older versions"
    )
    digests: dict[str, str] = Field(description="digests of the definition, code and data; package versions")
    version: str | None = Field(None, description="version of fedsweep; null in sweeps of older versions")
    commit: str | None = Field(
        None, description="Git commit of fedsweep's checkout, with a `+` for uncommitted changes; null if there is none"
    )

    @property
    def label(self) -> str:
        """The sweep as outputs name it and commands accept it, `SPACE@ID`."""
        return f"{self.name}@{self.id}"

    @property
    def chooses(self) -> bool:
        """True if trials were sampled, pruned or tuned, so that metrics decided what ran and which trials finished."""
        tuning = self.stage is not None and self.stage.name == "tuning"
        return self.search != "grid" or self.scheduler != "none" or tuning

    @property
    def stage(self) -> Stage | None:
        """The part of the sweep in an ablation whose arms are tuned one by one; None for other sweeps."""
        return stage_of(self.options)

    @property
    def chosen_by(self) -> str | None:
        """The objective and the images on which it is measured, or None if trials were not sampled, pruned or tuned."""
        return ", ".join(map(_with_images, self.objectives)) if self.chooses else None

    @property
    def objectives(self) -> tuple[str, ...]:
        """The metric of the objective, and that of the second objective if there is one."""
        return (self.metric,) if self.against is None else (self.metric, self.against.metric)

    @property
    def choice_by_test_images(self) -> str | None:
        """A sentence that warns that trials are chosen by the test images, or None if they are not."""
        second = self.against.metric if self.against else None
        return choice_by_test_images(self.metric, self.search, self.scheduler, second)

    @property
    def seeds_or_arms_changed(self) -> bool:
        """True if a person added seeds or dropped an arm after the sweep had started."""
        return any(one.kind != "stopped" for one in self.changes)


class Start(StoredRecord):
    """The starting point of a trial: the key of another trial, and the round after which this trial continues it."""

    key: str = Field(description="key of the other trial, whose state and history are copied")
    round: int = Field(ge=0, description="round of the other trial after which this trial continues")


class TrialPlan(StoredRecord):
    """The plan of a trial. A trial is one federated run of a sweep."""

    key: str = Field(description="digest of the resolved configuration, code and data")
    number: int = Field(ge=0, description="position in the plan, from 0")
    arm: Arm = Field(description="the varied hyperparameters, by dotted name")
    seed: int
    config: dict[str, Json] = Field(description="resolved configuration of the run, nested as in an experiment file")
    digests: dict[str, str] = Field(default_factory=dict, description="digests of the run's data and weights")
    marks: dict[str, str] = Field(default_factory=dict, description="provenance of the results, as tags keyed by name")
    derived: dict[str, float] = Field(
        default_factory=dict, description="values that the run computes from several settings, e.g. LoRA's scaling"
    )
    images: dict[str, int] = Field(
        default_factory=dict,
        description="numbers of `train`, `validation` and `test` images of the data set, and of the test images "
        "outside the held-out domains (`in_domain_test`); empty if not recorded",
    )
    chance: float | None = Field(
        None, description="largest accuracy of a constant prediction, averaged over domains; null if not recorded"
    )
    start: Start | None = Field(None, description="the trial and round that this trial continues; null for none")

    @property
    def label(self) -> str:
        """The arm as readable text, e.g. `lora.rank=4`."""
        return arm_label(self.arm)


DROPPED = "its arm was dropped"
"""The reason of a trial that no longer belongs to its sweep. It stands only in MLflow."""
NOT_NEEDED = "its comparison was decided without this seed"
"""The reason of a trial whose seed does not count, in a sweep that gives arms further seeds until they are decided."""


class Outcome(StoredRecord):
    """The outcome of a trial that has ended."""

    outcome: OutcomeName
    round: int = Field(description="the last round of the trial")
    reason: str | None = Field(None, description="why the trial was stopped, as readable text")
    error: str | None = Field(None, description="traceback of the failure or of the error that reported divergence")

    @property
    def counts(self) -> bool:
        """False if tables and decisions leave out the trial, because its seed was not needed or its arm was dropped."""
        return self.reason not in (NOT_NEEDED, DROPPED)


class Attempt(StoredRecord):
    """One attempt to run a trial. Its measurements are None while it runs, and remain None if its worker is lost."""

    gpus: float = Field(ge=0, description="number of GPUs of the attempt, which can be a fraction")
    round: int | None = Field(None, description="the last round that the attempt reported")
    peak: int | None = Field(None, description="peak memory of the attempt on the GPU, in bytes")
    beside: int = Field(0, description="bytes of other processes on the GPU; 0 if other trials shared the GPU")
    total: int | None = Field(None, description="memory of the GPU in bytes")
    seconds: float | None = Field(None, description="duration of the attempt's last round in seconds")
    out_of_memory: bool = Field(False, description="whether the attempt ended because it ran out of GPU memory")


class Attempts(StoredRecord):
    """All attempts to run a trial, oldest first. They are stored in the file `gpus.json`."""

    attempts: tuple[Attempt, ...] = ()

    def marks(self) -> dict[str, str]:
        """Return MLflow tags that summarise the attempts.

        The tag `gpus` is the last attempt's share of a GPU. The tag `out_of_memory` is the number of attempts that ran
        out of GPU memory. This tag is omitted if the number is 0.
        """
        if not self.attempts:
            return {}
        ran_out = sum(one.out_of_memory for one in self.attempts)
        return {"gpus": f"{self.attempts[-1].gpus:g}", **({"out_of_memory": str(ran_out)} if ran_out else {})}


@dataclass(frozen=True)
class TrialRecord:
    """A trial as recorded on disk.

    `outcome` is None until the trial has ended. It is also None if the recorded rounds of the trial are missing.
    """

    plan: TrialPlan
    outcome: Outcome | None
    history: Sequence[RoundRecord]
    artifacts: Mapping[str, Path] = field(default_factory=dict)
    """Files to show to users, by name."""
    attempts: Sequence[Attempt] = ()
    """Attempts to run the trial on a GPU; empty for trials on the CPU."""
    missing: bool = False
    """True if the trial has ended, but its recorded rounds are not on disk. `outcome` is then None."""
    right: Path | None = None
    """The file with the correctly predicted test images; None if it does not exist. It is not sent to MLflow."""

    @property
    def last_round(self) -> int:
        """The last recorded round, or -1 if no round is recorded."""
        return self.history[-1].round if self.history else -1


def _with_images(metric: str) -> str:
    images = "test" if uses_test_images(metric) else "validation" if metric.startswith(VALIDATION) else ""
    return f"{metric}{f' ({images} images)' * bool(images)}"


def choice_by_test_images(metric: str, search: str, scheduler: str, second: str | None = None) -> str | None:
    """Return a sentence that warns that trials are chosen by the test images, or None if they are not.

    `second` is the metric of the second objective, if there is one.

    >>> choice_by_test_images("accuracy/mean", "tpe", "none")
    'The search tpe chooses between trials by accuracy/mean on the test images, so its best values are optimistic.'
    """
    who = [f"search {search}"] * (search != "grid") + [f"scheduler {scheduler}"] * (scheduler != "none")
    tested = [one for one in (metric, second) if one is not None and uses_test_images(one)]
    if not who or not tested:
        return None
    verb, whose = ("choose", "their") if len(who) > 1 else ("chooses", "its")
    by = f"by {' and '.join(tested)} on the test images"
    return f"The {' and the '.join(who)} {verb} between trials {by}, so {whose} best values are optimistic."


def count_outcomes(trials: Iterable[TrialRecord]) -> dict[OutcomeName, int]:
    """Return the number of ended trials with each outcome, without trials whose seed does not count."""
    ended = [trial.outcome.outcome for trial in trials if trial.outcome and trial.outcome.counts]
    return {name: ended.count(name) for name in get_args(OutcomeName)}


def stand_in(tags: Mapping[str, str]) -> str | None:
    """Return a description of the stand-ins that a run was trained on, or None if the run used no stand-ins.

    Stand-ins are images that are used in place of images from a generator. `tags` are the run's provenance tags.

    >>> stand_in({"synthetic": "folder"}), stand_in({})
    (None, None)
    """
    return STAND_INS.get(tags.get(SYNTHETIC, ""))


def warning(made: str, where: str = "") -> str:
    """Return the warning that runs were trained on stand-ins (see `stand_in`).

    Args:
        made: The description of the stand-ins.
        where: The arms that were trained on the stand-ins, as text; empty for a single run.

    >>> warning("surrogates", "all arms")
    'Synthetic images: surrogates (all arms).'
    """
    return f"Synthetic images: {made}{f' ({where})' if where else ''}."
