"""A population as a Ray searcher: every member is handed out once for each generation."""

from __future__ import annotations

from ray.tune.search import Searcher

from fedsweep.common.yaml_values import Json
from fedsweep.sweep.climbing import ClimbingSearch
from fedsweep.sweep.generations import Generations
from fedsweep.sweep.packing import Packing
from fedsweep.sweep.searcher import Announce


class PopulationSearch(ClimbingSearch):
    """A member climbs to the end of its generation; its checkpoint on disk is where it goes on."""

    def __init__(self, population: Generations, announce: Announce, packing: Packing) -> None:
        super().__init__(population, announce, packing)
        self._population = population

    def suggest(self, trial_id: str) -> dict[str, Json] | str | None:  # type: ignore[override]
        """A member that has not come to the end of the generation, or nothing before all of them have."""
        for successor in self._population.unplanned():  # before a parent goes on
            self._announce(successor)
        if self._population.unplanned():  # no more can be written
            return Searcher.FINISHED
        return super().suggest(trial_id)
