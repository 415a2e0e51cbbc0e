"""The setting `tune_each` of a search space: hyperparameters that are tuned for each arm with the same budget."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.results.history import VALIDATION, on_validation
from fedsweep.results.tuned_arms import Stage
from fedsweep.sweep.space.axes import Axis, names_of

if TYPE_CHECKING:
    from fedsweep.sweep.space.search_space import SearchSpace


class TuneEach(Config):
    """The value of `tune_each`: every arm tries the same samples, and keeps the one with the best validation value."""

    space: dict[str, Axis] = Field(
        min_length=1, description="tuned hyperparameters: one range or `choice` per dotted name"
    )
    samples: int = Field(8, ge=2, description="number of samples of each arm; the first is the arm's own values")
    seed: int = Field(
        1000, ge=0, description="seed of the drawn samples and of the trials that try them; not among `seeds`"
    )

    def _violations(self) -> Iterator[str]:
        for name, axis in self.space.items():
            if axis.grid is not None:
                yield f"`tune_each` needs a range or a `choice` for each name, but `tune_each.space.{name}` has `grid`"
            if axis.when:
                yield f"`tune_each` tunes every arm alike, but `tune_each.space.{name}` has the condition `when`"
            if len(names_of(name)) > 1:
                yield f"`tune_each` needs one name for each range, but `tune_each.space` has `{name}`"

    def without(self, names: Collection[str]) -> TuneEach | None:
        """Return a copy that does not tune the hyperparameters in `names`, or None if no other is tuned."""
        left = {name: axis for name, axis in self.space.items() if name not in names}
        return self.model_copy(update={"space": left}) if left else None


def wrong_tuning(space: SearchSpace) -> Iterator[str]:
    """Yield an error message for each other entry of a search space that does not fit its `tune_each`."""
    if (tuned := space.tune_each) is None:
        return
    places: dict[str, set[str]] = {
        "space": {name for key in space.space for name in names_of(key)},
        "named": {name for changes in (space.named or {}).values() for name in changes},
        "ablate": {*(space.ablate or ())},
        "fixed": {*space.fixed},
    }
    for name in tuned.space:
        yield from (
            f"`tune_each` tunes `{name}`, which cannot also be in `{place}`"
            for place, names in places.items()
            if name in names
        )
        if name == "seed":
            yield "`tune_each` cannot tune `seed`"
    if space.search.name != "grid":
        yield f"`tune_each` needs `search` grid, but it is {space.search.name}"
    if space.scheduler.name != "none":
        rule = "`tune_each` needs `scheduler` none, because samples are compared after the last round"
        yield f"{rule}, but it is {space.scheduler.name}"
    if tuned.seed in space.planned_seeds:
        yield f"`tune_each.seed` must not be one of the `seeds`, but it is {tuned.seed}"
    if space.objective.against is not None:
        yield "`tune_each` needs a single objective, but `objective.against` is given"
    if space.measure.name == "parameters":
        yield "`tune_each` needs trained trials, but `measure` parameters trains none"


def validation_metric(space: SearchSpace) -> str | None:
    """Return the objective on validation images, by which arms are tuned, or None if there is no such metric."""
    metric = space.goal.metric
    return metric if metric.startswith(VALIDATION) else on_validation(metric)


def staged(space: SearchSpace, stage: Stage | None) -> SearchSpace:
    """Return the search space of one of the linked sweeps of an ablation with `tune_each`.

    The tuning sweep has one seed, an objective on validation images and no declared comparisons. The other sweeps have
    those of the ablation.
    """
    if stage is None or stage.name != "tuning" or space.tune_each is None:
        return space
    objective = space.objective.model_copy(update={"metric": validation_metric(space)})
    changes = {"seeds": (space.tune_each.seed,), "objective": objective, "comparisons": ()}
    return space.model_copy(update=changes)
