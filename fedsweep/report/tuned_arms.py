"""The values that were tuned for each arm, in the tables and sentences of a report."""

from collections import Counter
from collections.abc import Sequence

from fedsweep.common.yaml_values import Json
from fedsweep.report.arm_statistics import ArmStatistics
from fedsweep.report.units_and_labels import NOTHING, arm_words, names
from fedsweep.results import SweepManifest
from fedsweep.results.arms import identity, shown_setting
from fedsweep.results.tuned_arms import Stage, space_name


def tuned_values(manifest: SweepManifest, one: ArmStatistics) -> dict[str, Json]:
    """Return the values of the tuned hyperparameters with which an arm ran, by dotted name.

    The dict is empty unless the sweep runs each arm with its chosen values.
    """
    stage = manifest.stage
    if stage is None or stage.name != "tuned":
        return {}
    used = stage.used(one.arm.values, one.arm.trials[0].plan.config)
    return {name: used.get(name) for name in stage.names}


def tuned_cells(manifest: SweepManifest, one: ArmStatistics) -> dict[str, str]:
    """Return the cells of the columns of the tuned hyperparameters, as a dict from column to text."""
    values = tuned_values(manifest, one)
    return {name: NOTHING if value is None else shown_setting(value) for name, value in values.items()}


def about_tuning(manifest: SweepManifest, arms: Sequence[ArmStatistics]) -> list[str]:
    """Return the sentences of the legend that state how the arms were tuned; empty for other sweeps."""
    if (stage := manifest.stage) is None:
        return []
    tuned, space = ", ".join(stage.names), space_name(manifest.name, stage)
    if stage.name == "tuning":
        tried = Counter(identity(stage.untuned({**one.arm.values})) for one in arms)
        most = "up to " * any(number < stage.samples for number in tried.values())
        seeds = "one seed" if len(manifest.seeds) == 1 else f"{len(manifest.seeds)} seeds"
        return [
            f"Every arm tries {most}{stage.samples} samples of {tuned} with {seeds}: its untuned value and drawn "
            f"values, which are the same for all arms. The sweep {space}/tuned runs each arm with its best sample."
        ]
    if stage.name == "common":
        return [f"All arms run without tuning of {tuned}. The sweep {space}/tuned compares the arms after tuning."]
    value, was = ("value", "was") if len(stage.names) == 1 else ("values", "were")
    everyone = "Each arm, including the baseline," if manifest.baseline is not None else "Each arm"
    most = "up to " * any(one.tried not in (None, stage.samples) for one in stage.chosen)
    return [
        f"{everyone} has the {value} of {tuned} that {was} best among {most}{stage.samples} samples on the validation "
        f"images (sweep {stage.sweep}). The intervals do not include the randomness of tuning. "
        f"In the sweep {space}, the same arms run without tuning.",
        *_without_choice(manifest, stage, arms),
    ]


def _without_choice(manifest: SweepManifest, stage: Stage, arms: Sequence[ArmStatistics]) -> list[str]:
    """Return a sentence that names the arms of which no sample finished, if there are any."""
    dotted = names(manifest, arms)
    found = [one.arm.values for one in arms if (own := stage.choice(one.arm.values)) is None or own.sample is None]
    if not found:
        return []
    named = "; ".join(arm_words(arm, dotted) for arm in found)
    return [f"No sample has finished, so the arm has its untuned value: {named}."]
