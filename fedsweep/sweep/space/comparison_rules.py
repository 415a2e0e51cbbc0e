"""The rules that the settings `seeds: {until: decided}` and `comparisons` of a search space must keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fedsweep.results.arms import is_accuracy

if TYPE_CHECKING:
    from fedsweep.sweep.space.search_space import SearchSpace


def wrong_until_decided(space: SearchSpace) -> Iterator[str]:
    """Yield an error message for each rule that a search space with `seeds: {until: decided}` violates."""
    rule = "`seeds` {until: decided} needs"
    if space.search.name != "grid":
        yield f"{rule} `search` grid, but it is {space.search.name}"
    if space.scheduler.name != "none":
        needs = f"{rule} `scheduler` none, because no trial is pruned, but it is {space.scheduler.name}"
        yield f"{needs}; to prune trials, list the seeds, for example [0, 1, 2]"
    if space.baseline is None and not space.comparisons:
        yield f"{rule} a `baseline`, with which arms are compared, or `comparisons`, but there is neither"
    effect = None if space.until_decided is None else space.until_decided.smallest_effect
    if effect is not None and effect >= 100 and is_accuracy(space.goal.metric):
        yield f"`seeds.smallest_effect` must be less than 100 percentage points for an accuracy, but it is {effect:g}"


def wrong_comparisons(space: SearchSpace) -> Iterator[str]:
    """Yield an error message for each rule that a search space with declared comparisons violates."""
    rule, objective = "`comparisons` needs", space.goal.metric
    if space.search.name != "grid":
        yield f"{rule} `search` grid, but it is {space.search.name}"
    if space.scheduler.name != "none":
        yield f"{rule} `scheduler` none, because pruned trials are not compared, but it is {space.scheduler.name}"
    if space.measure.name == "parameters":
        yield f"{rule} trained trials, but `measure` parameters trains none"
    if space.until_decided is None or space.comparisons == "all":
        return
    for place, one in enumerate(space.comparisons):
        if one.metric not in (None, objective):
            yield (
                f"`comparisons.{place}.metric` must be the objective {objective}, by which `seeds` {{until: decided}} "
                f"decides, but it is {one.metric}; leave this comparison out, or list the seeds, for example [0, 1, 2]"
            )
