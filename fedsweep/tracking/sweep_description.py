"""The description of a sweep's parent run in MLflow: tags, a note with the results, and the version of the code."""

from __future__ import annotations

import contextlib
import getpass
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.results import SweepManifest, TrialRecord
from fedsweep.results.arms import arm_label
from fedsweep.results.records import TAKEN_FROM
from fedsweep.results.tuned_arms import space_name
from fedsweep.tracking.trial_description import LONGEST_TAG, dataset_inputs

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

MOST = 30  # largest number of data sets listed at a parent run; each trial's run lists its own


def description_tags(manifest: SweepManifest) -> dict[str, str]:
    """Return the tags by which users can find and compare the parent runs of sweeps."""
    until = manifest.until_decided
    goals = [one for one in (manifest, manifest.against) if one]
    return {
        "fedsweep.varied": ", ".join(manifest.varied),
        "fedsweep.experiment": manifest.experiment,
        "fedsweep.objective": ", ".join(f"{one.metric} {one.mode}" for one in goals),
        "fedsweep.seeds": ", ".join(map(str, manifest.seeds)) if until is None else until.words,
        "fedsweep.search": manifest.search,
        "fedsweep.scheduler": manifest.scheduler,
        **({"fedsweep.seed_streams": ", ".join(manifest.seed_streams)} if manifest.seed_streams else {}),
        **_stage_tags(manifest),
        **({"fedsweep.chosen_by": manifest.chosen_by} if manifest.chosen_by else {}),
        **({"fedsweep.changes": " ".join(one.sentence for one in manifest.changes)} if manifest.changes else {}),
        **({"fedsweep.baseline": arm_label(manifest.baseline)} if manifest.baseline else {}),
    }


def _stage_tags(manifest: SweepManifest) -> dict[str, str]:
    """Return the tags that name the part of a sweep in an ablation whose arms are tuned one by one."""
    if (stage := manifest.stage) is None:
        return {}
    tags = {"fedsweep.stage": stage.name, "fedsweep.tuned": ", ".join(stage.names)}
    return tags | ({"fedsweep.tuning_sweep": stage.sweep} if stage.sweep is not None else {})


@dataclass
class TrialsSummary:
    """A summary of the trials of a sweep: their data sets, the range of each metric, and their provenance."""

    images: dict[tuple[str, str], DatasetInput] = field(default_factory=dict)
    """MLflow's data sets, keyed by name and digest."""
    extent: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The smallest and the largest value of each metric."""
    _marks: dict[str, set[str]] = field(default_factory=dict)

    def add(self, trial: TrialRecord) -> None:
        """Add a trial, or the new rounds of a trial that was added before."""
        for name, mark in trial.plan.marks.items():
            if name != TAKEN_FROM:  # differs for each trial
                self._marks.setdefault(name, set()).add(mark)
        if len(self.images) < MOST:
            for one in dataset_inputs(trial.plan):
                self.images.setdefault((one.dataset.name, one.dataset.digest), one)
        for record in trial.history:
            for name, value in (*record.metrics.items(), *record.system.items()):
                low, high = self.extent.get(name, (value, value))
                self.extent[name] = min(low, value), max(high, value)

    @property
    def tags(self) -> Mapping[str, str]:
        """Tags that state the provenance of all trials, such as the source of their synthetic images."""
        return {f"fedsweep.{name}": ", ".join(sorted(values))[:LONGEST_TAG] for name, values in self._marks.items()}


NOTE = "mlflow.note.content"  # MLflow's tag for the description of a run or an experiment, in Markdown
LONGEST_NOTE = 7800  # characters; MLflow's limit for a run's tag is 8,000
REST = "\n\n(The table is too long to be shown in full. The whole table is in the artifact `report/table.md`.)"


def sweep_note(manifest: SweepManifest, asked: str, report: Path | None = None) -> str:
    """Return the description of a sweep's parent run in Markdown.

    The description contains the research question `asked`, the results table from the folder `report`, and commands
    for the sweep. If there is no table, the description states the experiment, the number of seeds and the number of
    rounds instead of the table.
    """
    if report is not None and (table := report / "table.md").exists():
        body = table.read_text(encoding="utf-8").partition("\n")[2].strip()  # without its title, the run's name
    else:
        seeds = len(manifest.seeds) if manifest.until_decided is None else manifest.until_decided.words
        body = (
            f"There is no report yet. Experiment: `{manifest.experiment}`. Seeds: {seeds}. "
            f"Rounds per trial: {manifest.rounds}."
        )
    wanted = f"{manifest.name} --sweep {manifest.id}"
    space = space_name(manifest.name, manifest.stage)
    commands = [f"report {wanted}", f"tune {space} --resume --sweep {manifest.id}", f"ui {wanted}"]
    end = "\n".join(["```sh", *(f"fedsweep {one}" for one in commands), "```"])
    head = f"{asked}\n\n" if asked else ""
    return head + shortened(body, LONGEST_NOTE - len(head) - len(end) - 2) + "\n\n" + end


def shortened(text: str, longest: int) -> str:
    """Return a Markdown text, shortened to at most `longest` characters. A shortened text ends with a note."""
    if len(text) <= longest:
        return text
    kept = text[: longest - len(REST)]
    return kept[: kept.rfind("\n")].rstrip() + REST if "\n" in kept else kept + REST


PACKAGES = ("fedsweep", "torch", "timm", "peft", "ray", "optuna", "mlflow", "numpy", "scikit-learn", "pyarrow")


def environment() -> dict[str, str]:
    """Return the platform and the versions of Python and the main packages."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "platform": platform.platform(), **versions}


def git_commit() -> str | None:
    """Return the Git commit of the package's checkout, with a `+` if there are uncommitted changes.

    Return None if the package is not in a Git checkout.
    """
    source = Path(__file__)
    tracked = ["git", "ls-files", "--error-unmatch", source.name]
    described = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        for command in (tracked, described):
            done = subprocess.run(command, cwd=source.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


@cache  # called for every run, and starts two git processes
def origin() -> dict[str, str]:
    """Return the tags that all runs have: version, Git commit, user and command. Unknown values are left out."""
    # MLflow's page shows the whole source of a `JOB`, but of a `LOCAL` source only the part after the last slash.
    tags = {"fedsweep.version": metadata.version("fedsweep"), "mlflow.source.type": "JOB"}
    tags["mlflow.source.name"] = command_line(sys.argv)
    if commit := git_commit():
        tags["mlflow.source.git.commit"] = commit
    with contextlib.suppress(OSError, KeyError, ImportError):  # the user has no name, as in some containers
        tags["mlflow.user"] = getpass.getuser()
    return tags


def command_line(words: Sequence[str]) -> str:
    """Return the command that starts the program again, as it is typed, without passwords in addresses."""
    program = Path(words[0]).name
    named = "fedsweep" if program == "__main__.py" else program
    return shlex.join([named, *(re.sub("//.*@", "//***@", one) for one in words[1:])])[:LONGEST_TAG]
