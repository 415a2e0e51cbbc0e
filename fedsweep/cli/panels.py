"""The panels of `fedsweep tune --help`, which group its options in the order in which a user needs them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

PANELS = {
    "What to run": ("dry_run", "experiment", "scheduler", "samples", "warm_start", "columns", "fresh"),
    "Seeds and arms": ("seeds", "until_decided", "smallest_effect", "first_seed", "exclude", "design", "subsets"),
    "Machines": ("at_once", "cpus_per_trial", "gpus_per_trial", "address", "join", "detached"),
    "Resume and record": (
        *("resume", "sweep", "verify", "store", "mlflow", "system_metrics"),
        *("format", "id_file", "help"),
    ),
}
"""The names of the options in each panel."""
_PLACES = {name: (place, panel) for panel, names in PANELS.items() for place, name in enumerate(names)}


class InPanels(TyperCommand):
    """A command whose help shows each option in its panel of `PANELS`, after the arguments."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters in the order of the help."""
        found = super().get_params(ctx)
        for one in found:
            if one.name in _PLACES:
                one.rich_help_panel = _PLACES[one.name][1]  # type: ignore[attr-defined]
        order = [*_PLACES]
        return sorted(found, key=lambda one: order.index(one.name) if one.name in _PLACES else -1)
