"""The objective, scheduler and search of a search space."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.errors import near
from fedsweep.results.arms import Arm
from fedsweep.results.history import History, last, over_the_run
from fedsweep.results.pareto import Against, Mode
from fedsweep.sweep.space.axes import Axis

MOVABLE = (
    *("optimizer.lr", "optimizer.momentum", "optimizer.weight_decay", "optimizer.clip_norm", "optimizer.eps"),
    *("base_optimizer.mu", "base_optimizer.alpha", "lora.dropout"),
    *("method.beta", "method.ramp", "method.gamma", "method.strength", "method.delta", "method.sal.threshold"),
    *("method.server_lr", "method.lambda_w", "method.lambda_theta", "method.lambda_d"),
    *("method.over.beta", "method.over.ramp"),
)
"""Hyperparameters that may change in the middle of a run, because a saved state keeps its meaning.

Others decide shapes, data, clients or the meaning of tensors: with another `lora.scaling` the same factors are another
model. FedDyn's state is in gradients, independent of alpha, and InclusiveFL's in steps, independent of beta. Clients'
optimizers are new in every round.
"""
PER = "trials are compared only with those that have the same values of these hyperparameters"
FIRST = "points to try before others, `{name: value}` of each; names that one leaves out are sampled"


class Objective(Config):
    """What is compared and tuned: a metric at a trial's last round, and what it is weighed against, if anything."""

    metric: str = Field("accuracy/mean", description="a metric of each round, taken at the last one")
    mode: Mode = Field("max", description="whether more or less of it is better")
    against: Against | None = Field(
        None, description="a second objective: trials are then compared by both, and none is pruned"
    )

    def _violations(self) -> Iterator[str]:
        if self.against is not None and self.against.metric == self.metric:
            yield f"`objective.against.metric` must be another one than `objective.metric` {self.metric}"

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The mode of each objective."""
        return (self.mode,) if self.against is None else (self.mode, self.against.mode)

    def values(self, history: History) -> tuple[float, ...] | None:
        """Return a finished trial's value of each objective, or None if one is missing or not finite."""
        found = [last(history, self.metric)]
        if self.against is not None:
            found.append(over_the_run(history, self.against.metric))
        values = tuple(value for value in found if value is not None and math.isfinite(value))
        return values if len(values) == len(found) else None


class NoScheduler(Config):
    """Every trial runs to its last round."""

    name: Literal["none"] = "none"


class ASHAScheduler(Config):
    """Asynchronous successive halving over communication rounds, in the stopping variant that Ray has too."""

    name: Literal["asha"] = "asha"
    grace_rounds: int = Field(3, gt=0, description="the first rung; no trial is stopped before it")
    reduction_factor: float = Field(3, gt=1, description="eta: about 1 in eta trials survives a rung")
    per: tuple[str, ...] = Field((), description=PER)


class MedianScheduler(Config):
    """A trial ends when its best value so far is below the median of what others had on average by that round."""

    name: Literal["median"] = "median"
    grace_rounds: int = Field(3, gt=0, description="no trial is stopped before this round")
    fewest: int = Field(3, gt=0, description="other trials that must have come as far")
    per: tuple[str, ...] = Field((), description=PER)


class ArmsScheduler(Config):
    """Whole arms fall, judged by paired differences over all their seeds; the baseline never does."""

    name: Literal["arms"] = "arms"
    grace_rounds: int = Field(3, gt=0, description="the first rung; no arm falls before it")
    reduction_factor: float = Field(3, gt=1, description="eta: 1 in eta arms has a place beyond a rung")
    per: tuple[str, ...] = Field(
        (), description="arms are compared only with those that have the same values of these hyperparameters"
    )


class PopulationScheduler(Config):
    """Population based training (Jaderberg et al., 2017): the worst go on from the best, with other values.

    The population is the samples of `search`. Nobody is stopped: a member that is replaced has a successor.
    """

    name: Literal["pbt"] = "pbt"
    interval: int = Field(3, gt=0, description="rounds of a generation")
    quantile: float = Field(
        0.25, gt=0, le=0.5, description="share of the members, rounded down, that are replaced, and that are copied"
    )
    factors: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.8, 1.2), min_length=1, description="a copied value is multiplied by one of these, within its range"
    )
    resample: float = Field(0.25, ge=0, le=1, description="or, with this probability, drawn anew from its range")


Scheduler = Annotated[
    NoScheduler | ASHAScheduler | MedianScheduler | ArmsScheduler | PopulationScheduler, Field(discriminator="name")
]


class GridSearch(Config):
    """Every arm of the grid with every seed."""

    name: Literal["grid"] = "grid"


class TPESearch(Config):
    """Optuna's tree-structured Parzen estimator."""

    name: Literal["tpe"] = "tpe"
    samples: int = Field(24, gt=0, description="configurations to try")
    startup: int = Field(
        8, ge=0, description="random configurations before the estimator is consulted; a warm start counts among them"
    )
    seed: int = Field(0, ge=0, description="root of the search's own randomness")
    in_flight: int = Field(
        4,
        gt=0,
        description="samples that may be out at once: sample n is proposed from the results of samples 0 to "
        "n - in_flight, so that the same are proposed whatever the number of workers",
    )
    first: tuple[Arm, ...] = Field((), description=FIRST)
    warm_start: str | None = Field(
        None,
        description="`SPACE` or `SPACE@SWEEP`: an earlier sweep, the newest unless its id is given, whose finished "
        "trials are known from the start",
    )


class RandomSearch(Config):
    """Independent samples."""

    name: Literal["random"] = "random"
    samples: int = Field(24, gt=0, description="configurations to try")
    seed: int = Field(0, ge=0, description="root of the search's own randomness")
    first: tuple[Arm, ...] = Field((), description=FIRST)


Search = Annotated[GridSearch | TPESearch | RandomSearch, Field(discriminator="name")]


def population_violations(search: Search, space: Mapping[str, Axis], scheduler: PopulationScheduler) -> Iterator[str]:
    """Yield the reasons, if any, why population based training does not support the search or the space."""
    if search.name != "random":
        yield f"`scheduler` pbt needs `search` random, whose samples are the population, not {search.name}"
        return
    for name, axis in space.items():
        if axis.uniform is None and axis.loguniform is None:
            yield f"`scheduler` pbt needs a `uniform` or `loguniform` range, which `space.{name}` does not give"
        if axis.step is not None or axis.when is not None:
            given = "a `step`" if axis.step is not None else "`when`"
            yield f"`scheduler` pbt needs a range without steps or conditions, but `space.{name}` has {given}"
        if name not in MOVABLE:
            other = f"`{name}` is none that may change there{near(name, MOVABLE, 0.85).rstrip('?')}"
            yield f"`scheduler` pbt changes values in the middle of a run, and {other}"
    share = scheduler.quantile
    if search.samples > 1 and share * search.samples < 1:
        yield f"`scheduler.quantile` of the {search.samples} samples must be one at least, but it is {share:g} of them"
