"""Classes for the settings `objective`, `measure`, `scheduler` and `search` of a search space."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.errors import near
from fedsweep.common.process_usage import logical_gpus
from fedsweep.results.arms import Arm
from fedsweep.results.history import History, is_loss, last, over_the_run
from fedsweep.results.pareto import Against, Mode
from fedsweep.sweep.space.axes import Axis

MOVABLE = (
    *("optimizer.lr", "optimizer.momentum", "optimizer.weight_decay", "optimizer.clip_norm", "optimizer.eps"),
    *("base_optimizer.mu", "base_optimizer.alpha", "lora.dropout"),
    *("method.beta", "method.ramp", "method.gamma", "method.strength", "method.delta", "method.sal.threshold"),
    *("method.server_lr", "method.lambda_w", "method.lambda_theta", "method.lambda_d"),
    *("method.over.beta", "method.over.ramp"),
)
"""Hyperparameters that may change during a run, because a saved state has the same meaning under the new value.

The other hyperparameters affect shapes, data, clients or the meaning of tensors. For example, the same LoRA factors are
a different model under another `lora.scaling`. FedDyn stores gradients, which do not depend on alpha. InclusiveFL
stores steps, which do not depend on beta. The clients' optimizers are created anew in every round.
"""
PER = "hyperparameters, by dotted name; only trials with the same values of all of them are compared"
FIRST = "points to try first, each as `{name: value}`; hyperparameters that a point leaves out are sampled"


class Objective(Config):
    """The metric by which trials are compared and tuned, and an optional second metric."""

    metric: str | None = Field(
        None,
        description="metric after the last round, by which trials are compared; `null` means "
        "`validation/accuracy/mean` if trials are sampled or pruned, and `accuracy/mean` if not",
    )
    mode: Mode = Field(
        default_factory=lambda given: "min" if is_loss(given.get("metric") or "") else "max",
        description="`max` if larger values are better, `min` if smaller ones are; the default for losses is `min`",
    )
    against: Against | None = Field(
        None, description="second objective; trials are compared by both, and the scheduler must be `none`"
    )

    def _violations(self) -> Iterator[str]:
        if self.against is not None and self.against.metric == self.metric is not None:
            yield f"`objective.against.metric` must differ from `objective.metric`, but both are {self.metric}"
        if self.mode == "max" and is_loss(self.metric or ""):
            yield f"`objective.mode` must be min for `objective.metric` {self.metric}, a loss, but it is max"


@dataclass(frozen=True)
class Goal:
    """The objective of a search space, with the metric that `objective.metric` names or that null stands for."""

    metric: str
    mode: Mode
    against: Against | None

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The value `max` or `min` for each objective: whether larger or smaller values are better."""
        return (self.mode,) if self.against is None else (self.mode, self.against.mode)

    def values(self, history: History) -> tuple[float, ...] | None:
        """Return the value of each objective for a finished trial, or None if a value is missing or not finite."""
        found = [last(history, self.metric)]
        if self.against is not None:
            found.append(over_the_run(history, self.against.metric))
        values = tuple(value for value in found if value is not None and math.isfinite(value))
        return values if len(values) == len(found) else None


class Rounds(Config):
    """The setting `measure: rounds`, the default: all arms are trained, and the metrics of every round are recorded."""

    name: Literal["rounds"] = "rounds"


class Parameters(Config):
    """The setting `measure: parameters` of a search space: no arm is trained.

    fedsweep counts the parameters of each arm and the bytes, FLOPs and memory of its clients. It prints the counts, and
    does not record them.
    """

    name: Literal["parameters"] = "parameters"
    classes: int = Field(100, gt=1, description="number of classes of the model's head")


class Resources(Config):
    """The CPUs and GPUs of each trial, and whether the load of the machine is recorded."""

    cpus_per_trial: float = Field(
        1, ge=0.1, description="CPU cores of each trial, which also set its number of torch threads"
    )
    gpus_per_trial: Annotated[float, Field(ge=0)] | Literal["auto"] | None = Field(
        None,
        description="GPUs of each trial; a fraction lets trials share a GPU, `auto` measures how many fit on one, and "
        "`null` means `auto` on machines with a GPU and 0 on others",
    )
    system_metrics: bool = Field(
        False, description="whether each round records the load of the machine, as `system/...` metrics in MLflow"
    )

    @property
    def threads(self) -> int:
        """Number of torch threads of a trial."""
        return max(int(self.cpus_per_trial), 1)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The device on which a trial runs: `cuda` if the trial uses a real GPU, otherwise `cpu`."""
        return "cuda" if self.on_gpu and logical_gpus() is None else "cpu"

    @property
    def gpus(self) -> float | Literal["auto"]:
        """The GPUs of each trial: `gpus_per_trial`, or 0 if it is null."""
        return 0.0 if self.gpus_per_trial is None else self.gpus_per_trial

    @property
    def on_gpu(self) -> bool:
        """True if a trial uses a GPU or a share of one."""
        return self.gpus == "auto" or self.gpus > 0


class NoScheduler(Config):
    """No pruning: every trial runs to its last round."""

    name: Literal["none"] = "none"


class TrialHalving(Config):
    """The settings of successive halving of single trials."""

    grace_rounds: int = Field(3, gt=0, description="round of the first rung; no trial is stopped before it")
    reduction_factor: float = Field(
        3,
        gt=1,
        description="eta: about 1 in eta trials passes a rung, and the next rung is at eta times as many rounds",
    )
    per: tuple[str, ...] = Field((), description=PER)


class ASHAScheduler(TrialHalving):
    """Successive halving of single trials (ASHA), which prunes the same trials for any number of workers.

    Trials are compared after certain communication rounds, called rungs. At a rung, a trial is compared with the
    earlier trials that reach the rung. Earlier trials are those with a lower number in the sweep. The trial continues
    if its value is in the best 1/eta of their values. If an earlier trial has not reached the rung yet, the trial may
    have to wait at the rung, and its worker runs another trial in the meantime.
    """

    name: Literal["asha"] = "asha"


class AsyncASHAScheduler(TrialHalving):
    """Asynchronous successive halving (ASHA), in which the pruned trials depend on the order of results.

    Trials are compared after certain communication rounds, called rungs. A trial is stopped at a rung if it is not
    among the best trials that have reached this rung so far. No trial waits. The rule is the same as in Ray's
    AsyncHyperBandScheduler.
    """

    name: Literal["asha_async"] = "asha_async"


class MedianScheduler(Config):
    """The median stopping rule.

    A trial is stopped if its best value so far is worse than the median of the other trials' running means. The running
    mean of a trial is the mean of its values up to the current round.
    """

    name: Literal["median"] = "median"
    grace_rounds: int = Field(3, gt=0, description="first round at which a trial may be stopped")
    fewest: int = Field(
        3, gt=0, description="number of other trials that must have reached the round before a trial is stopped"
    )
    per: tuple[str, ...] = Field((), description=PER)


class ArmsScheduler(Config):
    """Successive halving of whole arms: the arms with the best means continue, and the others are pruned.

    After certain communication rounds, called rungs, arms are compared by their means over the seeds. An arm can also
    continue if it is tied with the worst of the best arms: for at least a quarter of the seeds, it is at least as good
    as that arm. The baseline is never pruned.
    """

    name: Literal["arms"] = "arms"
    grace_rounds: int = Field(3, gt=0, description="round of the first rung; no arm is pruned before it")
    reduction_factor: float = Field(
        3,
        gt=1,
        description="eta: 1 in eta arms passes a rung, or more if arms are tied, and the next rung is at eta times as "
        "many rounds",
    )
    per: tuple[str, ...] = Field(
        (), description="hyperparameters, by dotted name; only arms with the same values of all of them are compared"
    )


class PopulationScheduler(Config):
    """Population-based training (Jaderberg et al., 2017). The samples of the search are the members of the population.

    A generation is a fixed number of rounds, which the option `interval` sets. After each generation, the worst members
    are replaced. Each successor continues from the state of one of the best members, with other hyperparameter values.
    The size of the population does not change.
    """

    name: Literal["pbt"] = "pbt"
    interval: int = Field(3, gt=0, description="number of rounds of a generation")
    quantile: float = Field(
        0.25,
        gt=0,
        le=0.5,
        description="share of the members to replace, and of the best members to copy, rounded down to whole members",
    )
    factors: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.8, 1.2),
        min_length=1,
        description="factors, one of which multiplies each copied value; the product is kept within the value's range",
    )
    resample: float = Field(
        0.25,
        ge=0,
        le=1,
        description="probability that a copied value is drawn anew from its range instead of being multiplied",
    )


Scheduler = Annotated[
    NoScheduler | ASHAScheduler | AsyncASHAScheduler | MedianScheduler | ArmsScheduler | PopulationScheduler,
    Field(discriminator="name"),
]


def compared_rounds(scheduler: Scheduler, rounds: int) -> list[int]:
    """Return the rounds before the last at which a scheduler compares trials.

    These rounds are always evaluated. The median rule has no fixed rounds: it compares evaluated rounds only.
    """
    if scheduler.name in ("asha", "asha_async", "arms"):
        return rungs(scheduler.grace_rounds, scheduler.reduction_factor, rounds)
    return [*range(scheduler.interval, rounds, scheduler.interval)] if scheduler.name == "pbt" else []


def decides_jointly(scheduler: Scheduler) -> bool:
    """Return whether a scheduler decides anew in each sweep, from the records of several trials, how a trial ends."""
    return scheduler.name in ("asha", "arms")


def pruning_note(scheduler: Scheduler) -> str | None:
    """Return a sentence on the reproducibility of the pruned trials, or None if no trial is pruned."""
    if scheduler.name in ("asha", "arms"):
        return f"Which trials `{scheduler.name}` prunes depends only on the recorded metrics."
    if scheduler.name in ("asha_async", "median"):
        return (
            f"Which trials `{scheduler.name}` prunes depends on the order in which trials report, so a repetition of "
            "this sweep may prune other trials."
        )
    return None


def rungs(grace_rounds: int, reduction_factor: float, rounds: int) -> list[int]:
    """Return the rungs, which are the rounds after which arms or trials are compared.

    The rungs are g, g * eta, g * eta^2, ..., rounded down. Only rungs below `rounds` are returned. g is `grace_rounds`,
    and eta is `reduction_factor`.

    >>> rungs(1, 3, 20), rungs(30, 3, 20)
    ([1, 3, 9], [])
    """
    found, milestone = list[int](), float(grace_rounds)
    while milestone < rounds:
        found.append(int(milestone))
        milestone *= reduction_factor
    return list(dict.fromkeys(found))


class GridSearch(Config):
    """The search that runs every arm of a grid with every seed."""

    name: Literal["grid"] = "grid"


class TPESearch(Config):
    """Optuna's tree-structured Parzen estimator (TPE), which learns from the results of earlier samples."""

    name: Literal["tpe"] = "tpe"
    samples: int = Field(24, gt=0, description="number of configurations to try")
    startup: int = Field(
        8,
        ge=0,
        description="number of random configurations before the estimator is used; trials of a warm start count too",
    )
    seed: int = Field(0, ge=0, description="seed of the search, independent of the seeds of the runs")
    in_flight: int = Field(
        4,
        gt=0,
        description="number of samples that may run at once: sample n is proposed from the results of samples 0 to "
        "n - in_flight, so the proposals do not depend on the number of workers",
    )
    first: tuple[Arm, ...] = Field((), description=FIRST)
    warm_start: str | None = Field(
        None,
        description="earlier sweep whose finished trials the estimator uses from the start, as `SPACE@SWEEP`, or as "
        "`SPACE` for the newest sweep of that search space",
    )


class RandomSearch(Config):
    """The search that draws the values of the hyperparameters at random."""

    name: Literal["random"] = "random"
    samples: int = Field(24, gt=0, description="number of configurations to try")
    seed: int = Field(0, ge=0, description="seed of the search, independent of the seeds of the runs")
    first: tuple[Arm, ...] = Field((), description=FIRST)


Search = Annotated[GridSearch | TPESearch | RandomSearch, Field(discriminator="name")]


def population_violations(search: Search, space: Mapping[str, Axis], scheduler: PopulationScheduler) -> Iterator[str]:
    """Yield the reasons why population-based training does not support the search or the axes, if there are any."""
    if search.name != "random":
        yield f"`scheduler` pbt needs `search` random, whose samples are the population, but it is {search.name}"
        return
    for name, axis in space.items():
        if axis.uniform is None and axis.loguniform is None:
            yield f"`scheduler` pbt needs a `uniform` or `loguniform` range, but `space.{name}` has `{axis.kind}`"
        if axis.step is not None or axis.when is not None:
            given = "`step`" if axis.step is not None else "`when`"
            yield f"`scheduler` pbt needs a range without `step` and `when`, but `space.{name}` has {given}"
        if name not in MOVABLE:
            hint = near(name, MOVABLE, 0.85)
            yield f"`scheduler` pbt changes values during a run, but `{name}` cannot change during a run{hint}"
    share = scheduler.quantile
    if search.samples > 1 and share * search.samples < 1:
        rule = f"must replace at least one of {search.samples} samples"
        yield f"`scheduler.quantile` {rule}, but it is {share:g}"
