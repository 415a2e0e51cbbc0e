"""Ray's view of arms that climb together: a searcher that hands out climbs from rung to rung, and who is stopped."""

from __future__ import annotations

from typing import Any

from ray.tune.schedulers import FIFOScheduler

from fedsweep.common.yaml_values import Json
from fedsweep.sweep.climb import Climb
from fedsweep.sweep.generations import Generations
from fedsweep.sweep.packing import Packing
from fedsweep.sweep.searcher import Announce, FolderSearcher, suggestion


class ClimbingSearch(FolderSearcher):
    """A trial is handed out once for each rung that its arm climbs to; its checkpoint on disk is where it goes on."""

    def __init__(self, climb: Climb | Generations, announce: Announce, packing: Packing) -> None:
        super().__init__()
        self._climb, self._announce, self._packing = climb, announce, packing
        self._out: dict[str, str] = {}

    def suggest(self, trial_id: str) -> dict[str, Json] | str | None:  # type: ignore[override]
        """The most urgent climb, or one that may turn out to be in vain, or nothing for now."""
        wanted = self._climb.wanted()
        free = [(self._climb.plans[key], until) for key, until in wanted if key not in self._out.values()]
        offer = self._packing.choose(free)
        if offer is None:
            return None if self._out else self.FINISHED
        self._out[trial_id] = offer.plan.key
        self._announce(offer.plan)
        return suggestion(offer)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """It can be handed out again; what it recorded is read from disk."""
        key = self._out.pop(trial_id)
        self._packing.ended(self._climb.plans[key], None if error else result)
        self._climb.refresh(key)


class ClimbingScheduler(FIFOScheduler):
    """Stops what is played beyond a rung that its arm did not pass."""

    def __init__(self, climb: Climb) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.climb = climb

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Called by Ray in the driver for each report."""
        key = trial.config["trial"]
        if result["round"] in self.climb.milestones:
            self.climb.refresh(key)
        fallen = self.climb.fallen(key) and result["round"] >= self.climb.visible(key)
        return FIFOScheduler.STOP if fallen else FIFOScheduler.CONTINUE
