"""Settings and derived values that differ between arms although no arm names them, such as the scaling of LoRA.

This module does not import torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedsweep.common.config import flat
from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import ABLATED, IN_WORDS, NAMED, Arm, identity, shown_setting

SHOWN = 6  # a sentence lists at most this many values


@dataclass(frozen=True)
class DerivedValue:
    """A value that a run computes from several of its settings."""

    formula: str
    stated_by: tuple[str, ...]
    """The settings that state the value directly, by dotted name. An arm that changes one of them names the change."""


SCALING, COHORT_SHARE, TRAINED_SHARE = "scaling", "share of clients per round", "share of images for training"
STEPS, IMAGES = "local steps per 1000 images", "images per client and round"
DERIVED = {
    SCALING: DerivedValue("lora.alpha / lora.rank", ("lora.alpha", "lora.scaling", "lora.rank_scaling")),
    COHORT_SHARE: DerivedValue("clients per round / number of clients", ("federation.clients_per_round",)),
    STEPS: DerivedValue("1000 * local.epochs / local.batch_size", ("local.epochs", "local.steps")),
    IMAGES: DerivedValue("local.steps * local.batch_size", ("local.steps",)),
    TRAINED_SHARE: DerivedValue("after the shares for the server, test, tuning and validation", ()),
}
"""The derived values by name. `fedsweep.federation.derived_values` computes them from the configuration of a run."""


@dataclass(frozen=True)
class ResolvedArm:
    """An arm with the configuration and the derived values of its runs."""

    arm: Arm
    config: Mapping[str, Json]
    derived: Mapping[str, float]


def unnamed_changes(arms: Sequence[ResolvedArm]) -> list[str]:
    """Return one clause for each setting or derived value that arms change without naming it.

    A derived value is changed without being named if it differs between arms in which the settings that state it are
    equal. A setting is changed without being named if arms that do not name it have different values, or if an arm
    selects another component, such as another optimizer, whose default value for the setting differs.

    >>> arms = [ResolvedArm({"lora.rank": rank}, {}, {"scaling": 8 / rank}) for rank in (2, 8)]
    >>> unnamed_changes(arms)
    ['scaling differs between arms: 4, 1 (lora.alpha / lora.rank)']
    """
    settings = [flat(one.config) for one in arms]
    found = [
        f"{name} differs between arms: {_listed(one.derived[name] for one in arms if name in one.derived)} "
        f"({derived.formula})"
        for name, derived in DERIVED.items()
        if _differs(arms, settings, name, derived)
    ]
    if any(NAMED in one.arm for one in arms):
        return found  # the search space lists the settings of an arm that has a name
    for name in dict.fromkeys(name for values in settings for name in values if name != "seed"):
        having = [(one.arm, own) for one, own in zip(arms, settings, strict=True) if name in own]
        if _silently_set(name, having):
            found.append(f"{name} differs between arms: {_listed(own[name] for _, own in having)}")
    return found


def _differs(
    arms: Sequence[ResolvedArm], settings: Sequence[Mapping[str, Json]], name: str, derived: DerivedValue
) -> bool:
    values: dict[str, set[float]] = {}
    for one, own in zip(arms, settings, strict=True):
        if name in one.derived:
            stated = identity([own.get(setting) for setting in derived.stated_by])
            values.setdefault(stated, set()).add(one.derived[name])
    return any(len(different) > 1 for different in values.values())


def _silently_set(name: str, having: Sequence[tuple[Arm, Mapping[str, Json]]]) -> bool:
    """Return whether an arm changes the setting `name` without naming it.

    `having` contains the arms that have the setting, each with all settings of its runs.
    """
    unnamed = [(arm, own) for arm, own in having if not _names(arm, name)]
    if len({identity(own[name]) for _, own in unnamed}) > 1:
        return True
    return any(
        identity(other[name]) != identity(own[name]) and other.get(f"{entry}.name") != own.get(f"{entry}.name")
        for arm, own in unnamed
        for entry in arm
        if _within(name, entry)
        for _, other in having
    )


def _names(arm: Arm, name: str) -> bool:
    """Return whether an arm names a setting: as an entry, in the value of an entry, or as a removed component."""
    removed = arm.get(ABLATED)
    if isinstance(removed, list) and any(_within(name, str(one)) or name == one for one in removed):
        return True
    for entry, value in arm.items():
        if name == entry or (entry not in IN_WORDS and name == f"{entry}.name" and not isinstance(value, dict)):
            return True  # `method: fedra` names `method.name`
        if _within(name, entry) and isinstance(value, dict) and name.removeprefix(f"{entry}.") in flat(value):
            return True
    return False


def _within(name: str, entry: str) -> bool:
    return name.startswith(f"{entry}.")


def _listed(values: Iterable[Json]) -> str:
    """Return different values as text: all of them, or the smallest and the largest of many numbers."""
    different = list({identity(value): value for value in values}.values())
    if len(different) <= SHOWN:
        return ", ".join(map(shown_setting, different))
    numbers = [value for value in different if isinstance(value, int | float)]
    if len(numbers) == len(different):
        return f"{shown_setting(min(numbers))} to {shown_setting(max(numbers))}"
    return ", ".join([*map(shown_setting, different[:SHOWN]), "..."])
