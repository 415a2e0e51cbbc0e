"""Metrics of other installed packages, which are measured after a round if `evaluation.metrics` names them.

A package adds a metric with an entry point in the group `fedsweep.metrics`. Its class inherits from `RoundMetric`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from torch import Tensor

from fedsweep.common import plugins
from fedsweep.models.layered import LayeredModel
from fedsweep.training.drift_and_structural_bias import Placed
from fedsweep.training.local_training import Objective
from fedsweep.types import ClientUpdate, ServerState

BUILT_IN = ("drift", "structural_bias")
TAKEN = (
    *BUILT_IN,
    *("accuracy", "allocation", "bytes", "evaluation", "gate", "gpu", "lora", "loss", "megabytes", "parameters"),
    *("sal", "seconds", "synthetic", "system", "validation"),
)
"""Names that metrics of plug-ins cannot have, because the names of fedsweep's own metrics begin with them."""


@dataclass(frozen=True)
class Quantity:
    """The description of a metric in tables and figures: a label, and a unit that follows it in parentheses."""

    label: str
    unit: str = ""

    @property
    def title(self) -> str:
        """The label with the unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True)
class MeasuredRound:
    """A round that has just ended, with everything from which a metric can be computed."""

    round: int
    seed: int
    """The seed of the run, for random streams (`fedsweep.common.randomness.stream`)."""
    model: LayeredModel
    """The full model with the adapter of `after`. A metric may load another adapter."""
    objective: Objective
    """The loss that the clients minimise."""
    before: ServerState
    """The server's state before local training."""
    after: ServerState
    """The server's state at the end of the round."""
    updates: Sequence[ClientUpdate]
    """The updates that the cohort sent."""
    placed: Sequence[Placed]
    """The clients of the cohort, with their blocks and stand-ins (modules that replace missing blocks)."""
    images: Tensor
    """A sample of the test images of all domains, uint8 (n, 3, height, width). It is the same in every round."""


class RoundMetric(ABC):
    """The base class of metrics that are measured after each evaluated round.

    One class can report several values, for example one for each part of the model. The name of each value begins with
    the name of the class and a slash, as in `update_norm/total`.
    """

    name: ClassVar[str]
    """The name in `evaluation.metrics`."""
    quantities: ClassVar[Mapping[str, Quantity]]
    """The label and the unit of each value, keyed by the name of the value."""

    @abstractmethod
    def measure(self, measured: MeasuredRound) -> dict[str, float]:
        """Return the values of a round, keyed by the names in `quantities`.

        The states and updates must not be changed, and random numbers must come from streams of their own.
        """


@cache
def round_metrics() -> dict[str, type[RoundMetric]]:
    """Return the classes of the metrics of other installed packages, keyed by name."""
    found = plugins.load("metrics", RoundMetric, TAKEN, _fault)  # type: ignore[type-abstract]
    return {one.name: one for one in found}


def _fault(found: type[RoundMetric]) -> str | None:
    quantities = getattr(found, "quantities", None)
    if not isinstance(quantities, Mapping) or not quantities:
        return "has a mapping `quantities` from the names of its values to their labels and units"
    if wrong := [name for name in quantities if not str(name).startswith(f"{found.name}/")]:
        return f"reports values whose names begin with `{found.name}/`, but one is `{wrong[0]}`"
    return None


def names_of(asked: Sequence[str]) -> list[str]:
    """Return the names of the values that the metrics of plug-ins report, of those that `evaluation.metrics` lists."""
    return [*titles_of(asked)]


def titles_of(asked: Sequence[str]) -> dict[str, str]:
    """Return the titles of the values that the metrics of plug-ins report, keyed by the names of the values."""
    known = round_metrics()
    classes = (known[name] for name in asked if name in known)
    return {name: quantity.title for one in classes for name, quantity in one.quantities.items()}


def measure(asked: Sequence[str], measured: MeasuredRound) -> dict[str, float]:
    """Return the values of a round that the metrics of plug-ins report.

    Args:
        asked: The metrics that `evaluation.metrics` lists. Those of fedsweep itself are ignored.
        measured: The round.

    Raises:
        ValueError: A metric returned other names than it lists, or a value that is not a finite number.
    """
    found: dict[str, float] = {}
    for name, kind in round_metrics().items():
        if name in asked:
            measured.model.load_adapter(measured.after.adapter)
            values = kind().measure(measured)
            if set(values) != set(kind.quantities):
                listed, returned = (", ".join(sorted(one)) or "none" for one in (kind.quantities, values))
                raise ValueError(f"the metric {name} must return the values {listed}, but it returned {returned}")
            if wrong := [one for one, value in values.items() if not math.isfinite(value)]:
                raise ValueError(f"the metric {name} must return finite numbers, but {wrong[0]} is {values[wrong[0]]}")
            found |= {one: float(values[one]) for one in kind.quantities}
    return {one: found[one] for one in names_of(asked)}
