"""The setting `tune_each` of a search space: hyperparameters that are tuned for each arm with the same budget."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.results.history import on_validation
from fedsweep.results.seeds import SEED_STREAMS
from fedsweep.results.tuned_arms import Stage
from fedsweep.sweep.space.axes import Axis, below, names_of

if TYPE_CHECKING:
    from fedsweep.sweep.space.search_space import SearchSpace


class TuneEach(Config):
    """The value of `tune_each`: every arm tries the same samples, and keeps the one with the best validation value."""

    space: dict[str, Axis] = Field(
        min_length=1, description="tuned hyperparameters: one range or `choice` per dotted name"
    )
    samples: int = Field(8, ge=2, description="number of samples of each arm; the first has the arm's untuned values")
    seed: int = Field(
        1000, ge=0, description="seed of the drawn samples, and first seed of the trials that try them; not in `seeds`"
    )
    seeds: int = Field(
        1, ge=1, description="number of seeds with which each sample is tried; their mean is the value of the sample"
    )

    def _violations(self) -> Iterator[str]:
        for name, axis in self.space.items():
            if axis.grid is not None:
                yield f"`tune_each` needs a range or a `choice` for each name, but `tune_each.space.{name}` has `grid`"
            if axis.when:
                yield f"`tune_each` tunes every arm alike, but `tune_each.space.{name}` has the condition `when`"
            if len(names_of(name)) > 1:
                yield f"`tune_each` needs one name for each range, but `tune_each.space` has `{name}`"

    @property
    def tried_with(self) -> tuple[int, ...]:
        """The seeds with which each sample is tried."""
        return tuple(range(self.seed, self.seed + self.seeds))

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
        for place, names in places.items():
            arms = place != "fixed"  # a fixed `optimizer` only gives the untuned value of `optimizer.lr`
            if name in names:
                yield f"`tune_each` tunes `{name}`, which cannot also be in `{place}`"
            elif others := [one for one in sorted(names) if below(one, [name]) or (arms and below(name, [one]))]:
                yield f"`tune_each` tunes `{name}`, so `{others[0]}` cannot be in `{place}`"
        if name in ("seed", SEED_STREAMS):
            yield f"`tune_each` cannot tune `{name}`"
    if space.search.name != "grid":
        yield f"`tune_each` needs `search` grid, but it is {space.search.name}"
    if space.scheduler.name != "none":
        rule = "`tune_each` needs `scheduler` none, because samples are compared after the last round"
        yield f"{rule}, but it is {space.scheduler.name}"
    if both := sorted({*tuned.tried_with} & {*space.planned_seeds}):
        if tuned.seeds == 1:
            yield f"`tune_each.seed` must not be one of the `seeds`, but it is {tuned.seed}"
        else:
            tried = f"tries samples with the seeds {tuned.seed} to {tuned.tried_with[-1]}"
            yield f"`tune_each` {tried}, which must not be in `seeds`, but {both[0]} is; use another `tune_each.seed`"
    if space.objective.against is not None:
        yield "`tune_each` needs a single objective, but `objective.against` is given"
    if space.measure.name == "parameters":
        yield "`tune_each` needs trained trials, but `measure` parameters trains none"


def staged(space: SearchSpace, stage: Stage | None) -> SearchSpace:
    """Return the search space of one of the linked sweeps of an ablation with `tune_each`.

    The tuning sweep has its own seeds, an objective on validation images, and neither a baseline nor declared
    comparisons. Only the design `one_factor` keeps the baseline, which defines its arms. The other sweeps have the
    settings of the ablation.
    """
    if stage is None or stage.name != "tuning" or space.tune_each is None:
        return space
    objective = space.objective.model_copy(update={"metric": on_validation(space.goal.metric)})
    changes: dict[str, Any] = {"seeds": space.tune_each.tried_with, "objective": objective, "comparisons": ()}
    if space.design != "one_factor":
        changes["baseline"] = None
    return space.model_copy(update=changes)
