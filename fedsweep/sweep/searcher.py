"""What fedsweep's searchers for Ray have in common."""

from __future__ import annotations

from collections.abc import Callable

from ray.tune.search import Searcher

from fedsweep.common.yaml_values import Json
from fedsweep.results import TrialPlan
from fedsweep.sweep.packing import Offer

Announce = Callable[[TrialPlan], None]


class FolderSearcher(Searcher):
    """A searcher that knows only what lies in the sweep's folder, which is what a resume reads too."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing is Ray's to keep."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, see `save`."""


def suggestion(offer: Offer) -> dict[str, Json]:
    """A trial's Ray configuration: flat dotted hyperparameters, the key under which the whole plan is on disk.

    Also the round that it climbs to, and its part of a GPU; it may be handed out again to climb further, or with more.
    """
    plan = offer.plan
    return {"trial": plan.key, **plan.arm, "seed": plan.seed, "until": offer.until, "gpus": offer.gpus}
