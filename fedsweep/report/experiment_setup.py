"""The facts at the head of a report: what was run, on which data, with which code, and for how long."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsweep.common.progress import duration
from fedsweep.report.arm_statistics import ArmStatistics
from fedsweep.report.text_tables import without_html
from fedsweep.results import SweepManifest, TrialPlan, TrialRecord
from fedsweep.results.arms import arm_label, shown_setting
from fedsweep.results.records import TAKEN_FROM
from fedsweep.results.tune_command import tune_command
from fedsweep.results.tuned_arms import STAGE

SHOWN = 4  # largest number of different values of a fact
DIGITS = 12  # digits shown of a commit
SHIPPED = ("digits_vit", "digits_clip")  # backbones whose weights are part of fedsweep


@dataclass(frozen=True)
class Fact:
    """A line at the head of a report."""

    name: str
    value: str
    typed: bool = False
    """True if the value is a command, which users copy."""

    def markdown(self) -> str:
        """Return the fact as an item of a Markdown list that contains no HTML elements."""
        value = " ".join(self.value.split("\n"))
        if not self.typed:
            return f"- {self.name}: {without_html(value)}"
        mark = "`" * (1 + max(map(len, re.findall("`+", value)), default=0))
        return f"- {self.name}: {mark}{value}{mark}"  # HTML is text in a code span


def setup(arms: Sequence[ArmStatistics]) -> list[Fact]:
    """Return the method, the backbone, the server's CLIP if it has one, the data set and the partition of a sweep.

    Facts that are not recorded, as in sweeps of older versions, are left out.
    """
    plans = [one.arm.trials[0].plan for one in arms]
    models = {"Method": _method, "Backbone": _backbone, "CLIP of the server": _server_clip}
    facts = {**models, "Data": _data, "Images": _images, "Partition": _partition}
    found = {name: _of_all(map(described, plans)) for name, described in facts.items()}
    return [Fact(name, value) for name, value in found.items() if value]


def provenance(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[Fact]:
    """Return the duration of a sweep, the code that ran it, and the command that starts it again.

    If no command makes the changes of the sweep, its changed settings are returned instead. Facts that are not recorded
    are left out.
    """
    facts = [Fact("Duration", _duration([trial for one in arms for trial in one.arm.trials]))]
    if manifest.version is not None:
        facts.append(Fact("Code", f"fedsweep {manifest.version}{_commit(manifest.commit)}"))
    if (command := tune_command(manifest)) is not None:
        return [*facts, Fact("Command", command, typed=True)]
    options = {name: value for name, value in manifest.options.items() if name != STAGE}
    return [*facts, Fact("Changed settings", arm_label({**manifest.overrides, **options}))]


def _of_all(values: Iterable[str | None]) -> str | None:
    """Return the value of all arms, or a list of the different values; None if no value is known."""
    found = list(dict.fromkeys(value for value in values if value is not None))
    if len(found) < 2:
        return found[0] if found else None
    more = [f"{len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return f"differs between arms: {'; '.join([*found[:SHOWN], *more])}"


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return a section of a configuration, or None if it is missing."""
    found = config.get(name)
    return found if isinstance(found, dict) and "name" in found else None


def _method(plan: TrialPlan) -> str | None:
    method = _section(plan.config, "method")
    return None if method is None else str(method["name"])


def _backbone(plan: TrialPlan) -> str | None:
    return _model(_section(plan.config, "backbone"))


def _server_clip(plan: TrialPlan) -> str | None:
    return _model(_section(_section(plan.config, "method") or {}, "clip"))


def _model(backbone: Mapping[str, Any] | None) -> str | None:
    """Return the name of a model and the source of its weights, or None without a model."""
    if backbone is None:
        return None
    match backbone:
        case {"model": str(model), "pretrained": "none"}:
            return f"{model}, untrained (random weights)"
        case {"model": str(model), "pretrained": "timm"}:
            return f"{model}, weights from timm"
        case {"model": str(model), "pretrained": str(path)}:
            return f"{model}, weights from {path}"
        case {"model": str(model)}:  # a CLIP checkpoint
            return f"{model}, weights from this checkpoint"
        case {"name": str(name), **fields} if name in SHIPPED:
            encoder = fields.get("encoder", "base")
            return f"{name}{f' (encoder {encoder})' * (encoder != 'base')}, weights from fedsweep"
        case _:
            return str(backbone["name"])


def _data(plan: TrialPlan) -> str | None:
    if (data := _section(plan.config, "data")) is None:
        return None
    domains, held_out = data.get("domains") or [], data.get("held_out_domains") or []
    source = f"{data['set']}, {data['size']} px" if "set" in data else str(data["name"])
    many = f", {len(domains)} domain{'s' * (len(domains) > 1)}" if domains else ""
    return f"{source}{many}{', held out: ' * bool(held_out)}{', '.join(held_out)}"


def _images(plan: TrialPlan) -> str | None:
    counts, kinds = plan.images, {"train": "training", "validation": "validation", "test": "test"}
    if not {"train", "test"} <= {*counts}:
        return None
    return ", ".join(f"{counts[name]:,} {kind}" for name, kind in kinds.items() if name in counts)


def _partition(plan: TrialPlan) -> str | None:
    """Return the partition with its options, except for those that are switched off."""
    partition = _section(plan.config, "partition")
    return None if partition is None else shown_setting({name: one for name, one in partition.items() if one})


def _commit(commit: str | None) -> str:
    if commit is None:
        return ""
    return f", commit {commit.rstrip('+')[:DIGITS]}{' with uncommitted changes' * commit.endswith('+')}"


def _duration(trials: Sequence[TrialRecord]) -> str:
    """Return the sum of the durations of all rounds, each counted once if a trial continues another trial."""
    starts = [trial.plan.start.round if trial.plan.start is not None else -1 for trial in trials]
    seconds = sum(
        record.seconds
        for trial, start in zip(trials, starts, strict=True)
        for record in trial.history
        if record.round > start
    )
    taken = sum(TAKEN_FROM in trial.plan.marks for trial in trials)
    reused = f", of which {taken} {'were' if taken > 1 else 'was'} reused from an earlier sweep" if taken else ""
    many = f"{len(trials)} trial{'s' * (len(trials) > 1)}"
    return f"{duration(seconds)}, summed over all rounds of {many}{reused}"
