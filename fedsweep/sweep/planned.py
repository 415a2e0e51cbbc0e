"""A planned list of trials as a Ray searcher."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from fedsweep.common.yaml_values import Json
from fedsweep.results import SweepStore, TrialPlan
from fedsweep.sweep.packing import Packing
from fedsweep.sweep.searcher import Announce, FolderSearcher, suggestion


class PlannedSearch(FolderSearcher):
    """Replays a list of trials. One that comes back without an outcome on disk is handed out again.

    It was measured and goes on, it ran out of a GPU's memory, or its worker was lost.
    """

    def __init__(
        self, sweep: SweepStore, plans: Sequence[TrialPlan], rounds: int, announce: Announce, packing: Packing
    ) -> None:
        super().__init__()
        self._sweep, self._left, self._rounds = sweep, list(plans), rounds
        self._announce, self._packing = announce, packing
        self._out: dict[str, TrialPlan] = {}
        self._back: list[TrialPlan] = []

    def suggest(self, trial_id: str) -> dict[str, Json] | str | None:  # type: ignore[override]
        """The next trial of the plan, or nothing for now."""
        for plan in self._back:
            if self._sweep.trial(plan.key).outcome() is None:
                bisect.insort(self._left, plan, key=lambda one: one.number)
        self._back.clear()
        offer = self._packing.choose([(plan, self._rounds) for plan in self._left])
        if offer is None:
            return None if self._out else self.FINISHED
        self._left.remove(offer.plan)
        self._out[trial_id] = offer.plan
        self._announce(offer.plan)
        return suggestion(offer)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """How it ended is read from disk, where it is written before Ray asks again."""
        plan = self._out.pop(trial_id)
        self._packing.ended(plan, None if error else result)
        self._back.append(plan)
