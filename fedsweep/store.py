"""The durable truth of a sweep: plain files, those of a trial each written atomically. MLflow is a view of this.

<root>/sweeps/<search space>/<sweep id>/
    sweep.json                      SweepManifest
    experiment.yaml search_space.yaml
    rungs.jsonl study.journal       the scheduler's and the search's memory, where they have one
    trials/<key>/trial.json         what is to be run
    trials/<key>/checkpoint.safetensors   state and history after the last whole round
    trials/<key>/tsne.csv tsne.png  features after the last round, where the experiment asks for them
    trials/<key>/outcome.json       how it ended; absent while it has not
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from fedsweep.arms import Arm, Reference, arm_label
from fedsweep.checkpoint import load_history, write_atomically
from fedsweep.config import Config
from fedsweep.embedding.points import FILES
from fedsweep.errors import UserError, near
from fedsweep.history import RoundRecord
from fedsweep.plain import Json

OutcomeName = Literal["finished", "pruned", "failed"]


class SweepManifest(Config):
    """What a sweep is, fixed when it starts."""

    id: str = Field(description="unique; the folder's name")
    name: str = Field(description="the search space, e.g. ablations/lora_rank")
    experiment: str = Field(description="the experiment it varies")
    created: str = Field(description="UTC, ISO 8601")
    metric: str = Field(description="the objective, e.g. accuracy/mean")
    mode: Literal["max", "min"]
    rounds: int = Field(description="rounds of a whole trial")
    varied: tuple[str, ...] = Field(description="dotted names that differ between arms")
    baseline: Arm | None = Field(None, description="the arm that others are compared to")
    reference: Reference | None = Field(None, description="a paper's values of some arms")
    seeds: tuple[int, ...]
    scheduler: str
    search: str
    domains: tuple[str, ...]
    overrides: dict[str, Json] = Field(default_factory=dict, description="the user's changes to the experiment")
    options: dict[str, Json] = Field(default_factory=dict, description="the user's changes to the search space")
    digests: dict[str, str] = Field(description="of the definition, the engine's code, the data, and the packages")


class TrialPlan(Config):
    """One federated run of a sweep."""

    key: str = Field(description="digest of resolved configuration, code and data")
    number: int = Field(ge=0, description="place in the plan")
    arm: Arm = Field(description="the varied hyperparameters, by dotted name")
    seed: int
    config: dict[str, Json] = Field(description="the whole resolved run, nested as in an experiment file")
    digests: dict[str, str] = Field(default_factory=dict, description="of the data and weights that it names")
    marks: dict[str, str] = Field(default_factory=dict, description="what a reader of its numbers must know, by name")

    @property
    def label(self) -> str:
        """The arm for people, e.g. `lora.rank=4`."""
        return arm_label(self.arm)


class Outcome(Config):
    """How a trial ended."""

    outcome: OutcomeName
    round: int = Field(description="the last round that it reported")
    error: str | None = Field(None, description="traceback of a failure")


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


class TrialStore:
    """The folder of one trial."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "checkpoint.safetensors"

    def plan(self, plan: TrialPlan) -> None:
        """Write what is to be run, before anything of it is."""
        write_atomically(self.folder / "trial.json", plan.model_dump_json(indent=2).encode())

    def history(self) -> Sequence[RoundRecord]:
        """All rounds recorded so far."""
        return load_history(self.checkpoint) if self.checkpoint.exists() else []

    def outcome(self) -> Outcome | None:
        """How the trial ended, or None."""
        path = self.folder / "outcome.json"
        return Outcome.of(json.loads(path.read_text()), str(path)) if path.exists() else None

    def end(self, outcome: Outcome) -> None:
        """Mark the trial as ended."""
        write_atomically(self.folder / "outcome.json", outcome.model_dump_json(indent=2).encode())

    def reopen(self) -> None:
        """Take back how the trial ended, so that it goes on from its checkpoint."""
        (self.folder / "outcome.json").unlink(missing_ok=True)

    def read(self) -> TrialRecord:
        """Everything about the trial."""
        path = self.folder / "trial.json"
        plan = TrialPlan.of(json.loads(path.read_text()), str(path))
        artifacts = {name: self.folder / name for name in FILES if (self.folder / name).exists()}
        return TrialRecord(plan, self.outcome(), self.history(), artifacts)


class SweepStore:
    """The folder of one sweep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self, manifest: SweepManifest, files: Mapping[str, str]) -> None:
        """Make the folder with the manifest and copies of the YAMLs."""
        for name, text in files.items():
            write_atomically(self.folder / name, text.encode())
        write_atomically(self.folder / "sweep.json", manifest.model_dump_json(indent=2).encode())

    def manifest(self) -> SweepManifest:
        """What the sweep is."""
        path = self.folder / "sweep.json"
        return SweepManifest.of(json.loads(path.read_text()), str(path))

    def trial(self, key: str) -> TrialStore:
        """One trial's folder."""
        return TrialStore(self.folder / "trials" / key)

    def trials(self) -> list[TrialRecord]:
        """All trials, in the order of the plan."""
        folders = [path.parent for path in (self.folder / "trials").glob("*/trial.json")]
        return sorted((TrialStore(folder).read() for folder in folders), key=lambda trial: trial.plan.number)


class Store:
    """The root folder that runs leave things in, `mlruns/` by default."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def sweep(self, name: str, sweep_id: str) -> SweepStore:
        """The folder of a sweep, whether it exists or not."""
        return SweepStore(self.root / "sweeps" / name / sweep_id)

    def sweeps(self, name: str | None = None) -> list[SweepStore]:
        """Existing sweeps (of one search space), oldest first."""
        found = [SweepStore(path.parent) for path in (self.root / "sweeps").glob("**/sweep.json")]
        named = [sweep for sweep in found if name is None or sweep.manifest().name == name]
        return sorted(named, key=lambda sweep: sweep.manifest().created)

    def find(self, name: str, sweep_id: str | None = None) -> SweepStore:
        """The newest sweep of a search space, or the one with the given id.

        Raises:
            UserError: there is none.
        """
        existing = self.sweeps()
        mine = [sweep for sweep in existing if sweep.manifest().name == name]
        if sweep_id is not None:
            mine = [sweep for sweep in mine if sweep.folder.name == sweep_id]
            if not mine:
                ids = [sweep.folder.name for sweep in self.sweeps(name)]
                raise UserError(f"there is no sweep `{sweep_id}` of {name} in {self.root}{near(sweep_id, ids) or '.'}")
        if not mine:
            names = sorted({sweep.manifest().name for sweep in existing})
            raise UserError(f"there is no sweep of {name} in {self.root}{near(name, names) or '.'}")
        return mine[-1]
