"""What is compared and tuned: `objective` of a search space. No ray, no torch."""

import math
from typing import Self

from pydantic import Field, model_validator

from fedsweep.common.config import Config
from fedsweep.results.history import History, last, over_the_run
from fedsweep.results.pareto import Against, Mode


class Objective(Config):
    """What is compared and tuned: a metric at a trial's last round, and what it is weighed against, if anything."""

    metric: str = Field("accuracy/mean", description="a metric of each round, taken at the last one")
    mode: Mode = Field("max", description="whether more or less of it is better")
    against: Against | None = Field(
        None, description="a second objective: trials are then compared by both, and none is pruned"
    )

    @model_validator(mode="after")
    def _two(self) -> Self:
        if self.against is not None and self.against.metric == self.metric:
            raise ValueError(f"`objective.against.metric` must be another one than `objective.metric` {self.metric}")
        return self

    @property
    def modes(self) -> tuple[Mode, ...]:
        """One mode, or one of each objective."""
        return (self.mode,) if self.against is None else (self.mode, self.against.mode)

    def values(self, history: History) -> tuple[float, ...] | None:
        """What a whole trial has of each objective, or None where it lacks one or one is not finite."""
        found = [last(history, self.metric)]
        if self.against is not None:
            found.append(over_the_run(history, self.against.metric))
        values = tuple(value for value in found if value is not None and math.isfinite(value))
        return values if len(values) == len(found) else None
