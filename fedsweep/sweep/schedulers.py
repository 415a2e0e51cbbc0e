"""Which trials are stopped early: `scheduler` of a search space. No ray, no torch."""

from typing import Annotated, Literal

from pydantic import Field

from fedsweep.common.config import Config


class NoScheduler(Config):
    """Every trial runs to its last round."""

    name: Literal["none"] = "none"


class ASHAScheduler(Config):
    """Asynchronous successive halving over communication rounds, in the stopping variant that Ray has too."""

    name: Literal["asha"] = "asha"
    grace_rounds: int = Field(3, gt=0, description="the first rung; no trial is stopped before it")
    reduction_factor: float = Field(3, gt=1, description="eta: about 1 in eta trials survives a rung")
    per: tuple[str, ...] = Field(
        (), description="trials are compared only with those that have the same values of these hyperparameters"
    )


class MedianScheduler(Config):
    """A trial ends when its best value so far is below the median of what others had on average by that round."""

    name: Literal["median"] = "median"
    grace_rounds: int = Field(3, gt=0, description="no trial is stopped before this round")
    fewest: int = Field(3, gt=0, description="other trials that must have come as far")
    per: tuple[str, ...] = Field(
        (), description="trials are compared only with those that have the same values of these hyperparameters"
    )


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
