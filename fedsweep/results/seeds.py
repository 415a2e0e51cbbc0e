"""The setting `seeds` of a search space: the seeds of all arms, or further seeds until a comparison is decided.

This module does not import torch.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from fedsweep.common.config import Config
from fedsweep.common.randomness import StreamName
from fedsweep.results.arms import is_accuracy

SEED_STREAMS = "seed_streams"
"""The hyperparameter that `seeds.vary` sets."""
Vary = Annotated[tuple[StreamName, ...], Field(min_length=1)] | None
MOST_SEEDS = 200
"""The largest `seeds.at_most`. With as many looks, it already takes seconds to compute their boundaries."""
VARY = (
    "groups of random streams that the seed determines, as in the hyperparameter `seed_streams`; `null`: those of the "
    "experiment, usually all"
)


class ListedSeeds(Config):
    """The value of `seeds` with which all arms run with the same seeds, which determine some of the random streams."""

    list: Annotated[tuple[int, ...], Field(min_length=1, description="seeds that every arm runs with")]
    vary: Vary = Field(None, description=VARY)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that every arm runs with."""
        return self.list


class UntilDecided(Config):
    """The value of `seeds` with which each arm runs seed after seed until its comparisons are decided."""

    until: Literal["decided"] = "decided"
    at_most: int = Field(20, ge=2, le=MOST_SEEDS, description="largest number of seeds of an arm")
    at_least: int = Field(
        default_factory=lambda given: min(4, given.get("at_most", 4)),
        ge=2,
        description="number of seeds before the first decision, by default 4 or `at_most` if it is smaller",
    )
    smallest_effect: float | None = Field(
        None,
        gt=0,
        description="smallest difference that matters, in percentage points for accuracies and otherwise in the unit "
        "of the objective; two arms can then be decided to be equivalent; `null`: no test of equivalence",
    )
    first: int = Field(
        0,
        ge=0,
        description="first seed; the others follow it. Another first seed asks the same question with fresh seeds, so "
        "the answer does not depend on an earlier sweep",
    )
    vary: Vary = Field(None, description=VARY)

    def _violations(self) -> Iterator[str]:
        if self.at_least > self.at_most:
            yield f"`seeds.at_least` must be at most `seeds.at_most` {self.at_most}, but it is {self.at_least}"

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds that an arm may run with, in the order in which it runs them."""
        return tuple(range(self.first, self.first + self.at_most))

    @property
    def words(self) -> str:
        """The rule as a phrase, such as `until decided, 4 to 20`; with the first seed if it is not 0."""
        first = f" from seed {self.first}" if self.first else ""
        return f"until decided, {self.at_least} to {self.at_most}{first}"

    def effect(self, metric: str) -> float | None:
        """Return the smallest effect in the unit in which `metric` is stored; accuracies range from 0 to 1."""
        if self.smallest_effect is None:
            return None
        return self.smallest_effect / 100 if is_accuracy(metric) else self.smallest_effect


def varied_streams(seeds: tuple[int, ...] | ListedSeeds | UntilDecided) -> tuple[StreamName, ...] | None:
    """Return the random streams that the setting `seeds` names, or None if it names none."""
    return None if isinstance(seeds, tuple) else seeds.vary


def _form(value: object) -> str | None:
    if isinstance(value, dict):
        listed, until = "list" in value, bool(({*UntilDecided.model_fields} - {"vary"}) & {*value})
        return None if listed == until else "[list]" if listed else "[until]"
    if isinstance(value, list | tuple):
        return "[seeds]"
    return "[list]" if isinstance(value, ListedSeeds) else "[until]" if isinstance(value, UntilDecided) else None


# The tags are in brackets, as pydantic's names of types, which error messages leave out.
Seeds = Annotated[
    Annotated[tuple[int, ...], Field(min_length=1), Tag("[seeds]")]
    | Annotated[ListedSeeds, Tag("[list]")]
    | Annotated[UntilDecided, Tag("[until]")],
    Discriminator(
        _form,
        custom_error_type="seeds",
        custom_error_message="must be a list, `{list: [0, 1, 2], ...}` or `{until: decided, ...}`",
    ),
]
"""The setting `seeds` of a search space."""
