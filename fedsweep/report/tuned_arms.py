"""The values that were tuned for each arm, in the tables and sentences of a report."""

from collections.abc import Sequence

from fedsweep.common.yaml_values import Json
from fedsweep.report.arm_statistics import ArmStatistics
from fedsweep.report.units_and_labels import NOTHING, arm_words, names
from fedsweep.results import SweepManifest
from fedsweep.results.arms import shown_setting
from fedsweep.results.tuned_arms import Stage, space_name


def tuned_values(manifest: SweepManifest, one: ArmStatistics) -> dict[str, Json]:
    """Return the values of the tuned hyperparameters with which an arm ran, by dotted name.

    The dict is empty unless the sweep runs each arm with its own values.
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
        return [
            f"Every arm tries the same {stage.samples} samples of {tuned} with one seed: its own value and "
            f"{len(stage.drawn)} drawn ones. The sweep {space}/tuned runs each arm with its best sample."
        ]
    if stage.name == "common":
        return [f"All arms at the common value of {tuned}. The sweep {space}/tuned compares the arms after tuning."]
    return [
        f"Each arm tuned, {stage.samples} samples: {tuned} by the validation images of sweep {stage.sweep}, the "
        f"baseline as well. The intervals do not include the randomness of tuning. "
        f"The sweep {space} has the same arms at the common value.",
        *_without_choice(manifest, stage, arms),
    ]


def _without_choice(manifest: SweepManifest, stage: Stage, arms: Sequence[ArmStatistics]) -> list[str]:
    """Return a sentence that names the arms of which no sample finished, if there are any."""
    dotted = names(manifest, arms)
    found = [one.arm.values for one in arms if (own := stage.choice(one.arm.values)) is None or own.sample is None]
    if not found:
        return []
    named = "; ".join(arm_words(arm, dotted) for arm in found)
    return [f"No sample finished, so the arm has the common value: {named}."]
