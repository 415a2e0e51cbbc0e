"""The linked sweeps of an ablation whose arms are tuned one by one, and the choice of the values of each arm.

Such an ablation runs three sweeps: `NAME/tuning` tries the same samples for every arm, `NAME` runs the arms without
tuning, and `NAME/tuned` runs each arm with its chosen values. This module does not import torch.

The untuned values of an arm are the values of the tuned hyperparameters that it has without tuning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedsweep.common.config import Config, flat
from fedsweep.common.paths import available
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.results.arms import Arm, equality, identity
from fedsweep.results.history import last
from fedsweep.results.pareto import Mode

if TYPE_CHECKING:
    from fedsweep.results.records import TrialRecord

STAGE = "tune_each.stage"
"""The entry of a sweep's options that contains its stage. `fedsweep tune` sets it; users cannot."""
StageName = Literal["tuning", "common", "tuned"]


class TunedArm(Config):
    """The values that were chosen for an arm."""

    arm: Arm
    sample: int | None = Field(None, ge=0, description="number of the chosen sample; null if no sample finished")
    values: dict[str, Json] = Field(default_factory=dict, description="the chosen values by dotted name")
    score: float | None = Field(None, description="value of the objective by which the sample was chosen")
    tried: int | None = Field(None, ge=0, description="number of samples that the arm tried; null if not recorded")


class Stage(Config):
    """The part of a sweep in an ablation whose arms are tuned one by one."""

    name: StageName
    names: tuple[str, ...] = Field(description="dotted names of the tuned hyperparameters")
    drawn: tuple[dict[str, Json], ...] = Field(
        description="the drawn samples, from sample 1 on; sample 0 has the untuned values of the arm"
    )
    sweep: str | None = Field(None, description="id of the sweep that tuned the arms; null in that sweep itself")
    chosen: tuple[TunedArm, ...] = Field((), description="the chosen values of each arm, in the sweep `tuned`")

    @property
    def samples(self) -> int:
        """The largest number of samples of an arm, including its untuned values."""
        return len(self.drawn) + 1

    def choice(self, arm: Mapping[str, Json]) -> TunedArm | None:
        """Return the choice for an arm, or None if no values are chosen for it in this sweep."""
        key = equality(arm)
        return next((one for one in self.chosen if equality(one.arm) == key), None)

    def changes(self, arm: Mapping[str, Json]) -> dict[str, Json]:
        """Return the chosen values of an arm by dotted name; empty if the arm has its untuned values."""
        return dict(found.values) if (found := self.choice(arm)) is not None else {}

    def used(self, arm: Mapping[str, Json], config: Mapping[str, Json]) -> dict[str, Json]:
        """Return the value of each tuned hyperparameter in a run with the configuration `config`."""
        run = {**flat(config), **self.changes(arm)}
        return {name: run[name] for name in self.names if name in run}

    def named(self, arm: Arm, config: Mapping[str, Json]) -> Arm:
        """Return an arm with the values that were tuned for it, or the arm itself if this sweep has no tuned arms."""
        return {**arm, **self.used(arm, config)} if self.name == "tuned" else arm

    def untuned(self, arm: Arm) -> Arm:
        """Return an arm of the tuning sweep without the values of its sample."""
        return {name: value for name, value in arm.items() if name not in self.names}

    def numbers(self, samples: Sequence[Arm]) -> list[int]:
        """Return the number of the sample of each arm in `samples`. Sample 0 has the untuned values.

        The untuned values can equal a drawn sample, which is not tried twice. They are then the first of `samples`.

        Args:
            samples: The arms of the tuning sweep that belong to one arm of the ablation, in the order of the plan.
        """
        drawn = {equality(one): number for number, one in enumerate(self.drawn, 1)}
        values = [equality({name: arm[name] for name in self.names if name in arm}) for arm in samples]
        found = [drawn.get(one, 0) for one in values]
        return found if 0 in found else [0, *found[1:]]

    def with_samples(self, arm: Arm, untuned: Mapping[str, Json]) -> Iterator[Arm]:
        """Yield the arms of the tuning sweep for one arm: the untuned values first, then the drawn samples.

        If a drawn sample equals the untuned values, it is not tried twice.

        Args:
            arm: The arm.
            untuned: All values of the arm's run without tuning, by dotted name.
        """
        first = {name: untuned[name] for name in self.names if name in untuned}
        yield {**arm, **first}
        yield from ({**arm, **one} for one in self.drawn if equality(one) != equality(first))


def ablation_of(name: str) -> str:
    """Return the search space whose arms a linked sweep with this name tunes or compares.

    If no search space with `tune_each` has a linked sweep of this name, the result is the name itself.
    """
    known = available("search_spaces")
    base, _, stage = name.rpartition("/")
    if name in known or stage not in ("tuning", "tuned") or base not in known:
        return name
    return base if read_yaml(known[base]).get("tune_each") else name


def stage_of(options: Mapping[str, Json]) -> Stage | None:
    """Return the stage in the options of a sweep, or None if the arms of the sweep are not tuned one by one."""
    found = options.get(STAGE)
    return Stage.of(found, "the stage of the sweep") if isinstance(found, dict) else None


def sweep_name(space: str, stage: Stage | None) -> str:
    """Return the name of a sweep of the search space `space`.

    >>> sweep_name("ablations/lora_rank", Stage(name="tuned", names=("optimizer.lr",), drawn=()))
    'ablations/lora_rank/tuned'
    """
    return space if stage is None or stage.name == "common" else f"{space}/{stage.name}"


def space_name(sweep: str, stage: Stage | None) -> str:
    """Return the name of the search space of a sweep with the name `sweep`, the inverse of `sweep_name`.

    `sweep` may also be the name of a search space, which is returned unchanged, even if it ends like that of a sweep.
    """
    if stage is None or stage.name == "common" or sweep in available("search_spaces"):
        return sweep
    return sweep.removesuffix(f"/{stage.name}")


def sample_values(
    stage: Stage, metric: str, trials: Sequence[TrialRecord]
) -> dict[str, tuple[Arm, dict[int, tuple[Arm, float | None]]]]:
    """Return the results of a tuning sweep by arm.

    Args:
        stage: The stage of the tuning sweep.
        metric: The objective of the tuning sweep.
        trials: The trials of the tuning sweep.

    Returns:
        For each arm, in the order of the plan and keyed by the identity of the arm, the arm and a dict from the number
        of the sample to the values of the sample and the mean of the final objective over its seeds. The mean is None
        if a trial has not finished with a finite value.
    """
    by_arm: dict[str, dict[str, list[TrialRecord]]] = {}
    for trial in sorted(trials, key=lambda one: one.plan.number):
        samples_of_arm = by_arm.setdefault(identity(stage.untuned(trial.plan.arm)), {})
        samples_of_arm.setdefault(identity(trial.plan.arm), []).append(trial)
    found: dict[str, tuple[Arm, dict[int, tuple[Arm, float | None]]]] = {}
    for key, tried in by_arm.items():
        arms = [several[0].plan.arm for several in tried.values()]
        samples: dict[int, tuple[Arm, float | None]] = {}
        for number, arm, several in zip(stage.numbers(arms), arms, tried.values(), strict=True):
            values = {name: one for name, one in arm.items() if name in stage.names}
            ends = [end for trial in several if (end := _final(trial, metric)) is not None]
            samples[number] = values, math.fsum(ends) / len(ends) if len(ends) == len(several) else None
        found[key] = stage.untuned(arms[0]), samples
    return found


def _final(trial: TrialRecord, metric: str) -> float | None:
    """Return the last value of a metric of a finished trial, or None if it has not finished with a finite value."""
    if trial.outcome is None or trial.outcome.outcome != "finished":
        return None
    value = last(trial.history, metric)
    return value if value is not None and math.isfinite(value) else None


def choose(stage: Stage, metric: str, mode: Mode, trials: Sequence[TrialRecord]) -> tuple[TunedArm, ...]:
    """Choose the values of each arm by the final objective of its samples.

    The choice depends only on the recorded metrics. If samples are equally good, the earlier sample is chosen. Trials
    that failed or diverged are never chosen. If no sample of an arm has finished, the arm keeps its untuned values.

    Args:
        stage: The stage of the tuning sweep.
        metric: The objective of the tuning sweep.
        mode: Whether larger (`max`) or smaller (`min`) values are better.
        trials: The trials of the tuning sweep.
    """
    sign, chosen = (1 if mode == "max" else -1), []
    for arm, samples in sample_values(stage, metric, trials).values():
        best = TunedArm(arm=arm, tried=len(samples))
        for number in sorted(samples):
            values, value = samples[number]
            if value is not None and (best.score is None or sign * value > sign * best.score):
                best = TunedArm(arm=arm, sample=number, values=values, score=value, tried=len(samples))
        chosen.append(best)
    return tuple(chosen)
