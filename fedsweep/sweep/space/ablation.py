"""Named arms and ablation arms, which are words for changes to the experiment. No ray, no torch."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import ABLATED, IN_WORDS, NAMED, Arm

Subsets = Literal["one", "all"]
SWITCH = {"on": True, "off": False}
"""Words for true and false: YAML 1.1 reads them as booleans, YAML 1.2 and fedsweep as text."""


def ablation_arms(components: Sequence[str], subsets: Subsets) -> list[Arm]:
    """Return the full method, then the arms that lack one component each, or with `all` every set of components.

    >>> ablation_arms(["method.cross", "method.quality"], "one")
    [{'without': []}, {'without': ['method.cross']}, {'without': ['method.quality']}]
    >>> ablation_arms(["method.cross", "method.quality"], "all")[3:]
    [{'without': ['method.cross', 'method.quality']}]
    """
    sizes = range(len(components) + 1 if subsets == "all" else 2)
    return [{ABLATED: list(chosen)} for size in sizes for chosen in itertools.combinations(components, size)]


def left_out_values(ablate: Mapping[str, Json], known: Mapping[str, Json]) -> dict[str, Json]:
    """Return the values that leave the components out; `on` and `off` set a boolean of the `known` values.

    >>> left_out_values({"method.cross": "off", "method.gate": "off"}, {"method.cross": True, "method.gate": "softmax"})
    {'method.cross': False, 'method.gate': 'off'}
    """
    return {
        name: SWITCH[value] if isinstance(known.get(name), bool) and value in ("on", "off") else value
        for name, value in ablate.items()
    }


def changes(
    arm: Arm, values: Mapping[str, Json], named: Mapping[str, Mapping[str, Json]] | None = None
) -> dict[str, Json]:
    """Return an arm's changes to the experiment, by dotted name.

    `values` leave the components out, and `named` holds the changes of each named arm.

    >>> changes({"lora.rank": 4, "without": ["method.cross"]}, {"method.cross": False, "method.quality": False})
    {'lora.rank': 4, 'method.cross': False}
    >>> changes({"arm": "FedAvg"}, {}, {"FedAvg": {"method": "ft", "optimizer.lr": 0.1}})
    {'method': 'ft', 'optimizer.lr': 0.1}
    """
    left_out, name = arm.get(ABLATED), arm.get(NAMED)
    own = dict((named or {})[name]) if isinstance(name, str) else {}
    axes = {name: value for name, value in arm.items() if name not in IN_WORDS}
    return own | axes | {name: values[name] for name in (left_out if isinstance(left_out, list) else [])}
