"""How a search space is gone through: `search` of its file. No ray, no torch."""

from typing import Annotated, Literal

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.results.arms import Arm

FIRST = "points to try before others, `{name: value}` of each; names that one leaves out are sampled"


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
