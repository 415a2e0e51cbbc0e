"""Functions that parse, compare and label the arms of a sweep, and classes for the values that a paper reports.

This module does not import torch.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import Json, parse_yaml
from fedsweep.results.history import VALIDATION

Arm = dict[str, Json]
ABLATED = "without"  # entry of an arm: the dotted names of the components that an ablation removes
NAMED = "arm"  # entry of an arm: the name that the search space gives to a set of changes to the experiment
IN_WORDS = (NAMED, ABLATED)  # entries of an arm that are not hyperparameters
_SPECIAL = re.compile(r"""[,=()\[\]{}'"\x00-\x1f\x7f-\x9f\u2028\u2029]""")
"""Characters that strings in labels have only in quotes, because labels use them between values."""


class ReferenceArm(Config):
    """The values that a paper reports for one arm."""

    arm: Arm = Field(description="an arm of the grid, as values by dotted name")
    values: dict[str, float] = Field(min_length=1, description="metrics after the last round, accuracies in percent")

    def _violations(self) -> Iterator[str]:
        for metric, value in self.values.items():
            if is_accuracy(metric) and not 0 <= value <= 100:
                given = f"`{metric}` of {arm_label(self.arm)} is {value:g}"
                yield f"`reference` must give accuracies in percent, from 0 to 100, but {given}"


class Reference(Config):
    """The values that a paper reports, which tables show next to the sweep's own values."""

    source: str = Field(description="the paper and its table, e.g. `FedRA (Su, Li and Xue), Table 1`")
    arms: tuple[ReferenceArm, ...] = Field(
        min_length=1, description="the arms, each as `{arm: ..., values: {METRIC: NUMBER}}`"
    )

    def _violations(self) -> Iterator[str]:
        if not self.source.strip():
            yield f"`reference.source` must name the paper and its table, but it is `{self.source}`"
        keys = [identity(one.arm) for one in self.arms]
        for place, one in enumerate(self.arms):
            if keys[place] in keys[:place]:
                yield f"`reference` must list each arm once, but it lists {arm_label(one.arm)} twice"

    def metrics(self) -> list[str]:
        """Return all metrics for which the paper reports a value."""
        return list(dict.fromkeys(metric for one in self.arms for metric in one.values))

    def of_arm(self, arm: Mapping[str, Json]) -> dict[str, float]:
        """Return the paper's values for an arm, keyed by metric.

        The dict is empty if the paper reports no values for the arm.
        """
        return next((one.values for one in self.arms if identity(one.arm) == identity(arm)), {})

    def value(self, arm: Mapping[str, Json], metric: str) -> float | None:
        """Return the paper's value of a metric for an arm, or None if the paper reports no value.

        An accuracy is returned as a fraction from 0 to 1.

        >>> paper = Reference(source="Table 1", arms=(ReferenceArm(arm={"rank": 4}, values={"accuracy/mean": 54.73}),))
        >>> paper.value({"rank": 4}, "accuracy/mean"), paper.value({"rank": 8}, "accuracy/mean")
        (0.5473, None)
        """
        printed = self.of_arm(arm).get(metric)
        if printed is None or not is_accuracy(metric):
            return printed
        return round(printed / 100, 12)  # 54.73 / 100 is not the number closest to 0.5473


def is_accuracy(metric: str) -> bool:
    """Return whether a metric is an accuracy.

    Accuracies are stored as fractions from 0 to 1 and shown in percent. Differences between accuracies are shown in
    percentage points.
    """
    return metric.removeprefix(VALIDATION).startswith("accuracy/")


def shown_value(metric: str, value: float | None, nothing: str = "") -> str:
    """Return a value of a metric as text, in percent for accuracies. The text for None is `nothing`.

    >>> shown_value("accuracy/mean", 0.70712), shown_value("loss/test", 0.70712)
    ('70.71%', '0.7071')
    """
    if value is None:
        return nothing
    return f"{value:.2%}" if is_accuracy(metric) else f"{value:.4f}"


def identity(values: Json | Mapping[str, Json]) -> str:
    """Return the values as JSON text that can be used as a dict key.

    The values themselves cannot be dict keys: lists are not hashable, and `1`, `1.0` and `True` would be the same key.
    """
    return json.dumps(values, sort_keys=True)


def equality(values: Json | Mapping[str, Json]) -> str:
    """Return JSON text that is the same for equal values, even if one is an integer and the other a float.

    >>> equality({"alpha": 1.0, "on": True}), equality([4, 0.5])
    ('{"alpha": 1, "on": true}', '[4, 0.5]')
    """
    return identity(_with_integers(values))


def _with_integers(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case Mapping():
            return {name: _with_integers(one) for name, one in value.items()}
        case list() | tuple():
            return [_with_integers(one) for one in value]
        case _:
            return value


def same(one: Json, other: Json) -> bool:
    """Return whether two YAML values are equal: `1` equals `1.0`, but not `true`.

    >>> same(1, 1.0), same(1, True), same([4, 4], [4.0, 4]), same([1], [True])
    (True, False, True, False)
    """
    return equality(one) == equality(other)


def agrees(part: Mapping[str, Json], arm: Mapping[str, Json]) -> bool:
    """Return whether `arm` has all entries of `part`, with equal values. The numbers 1 and 1.0 are equal."""
    return all(name in arm and same(arm[name], value) for name, value in part.items())


def parse_arm(text: str) -> Arm:
    """Parse an arm such as `lora.rank=4,seed=0`, whose values are written in YAML.

    Raises:
        UserError: The text is not a list of NAME=VALUE entries, a value is not valid YAML, or a name occurs twice.

    >>> parse_arm("federation.depths=[12, 6],arm='a, b'")
    {'federation.depths': [12, 6], 'arm': 'a, b'}
    """
    arm: Arm = {}
    for word in at_commas(text):
        name, sign, value = (part.strip() for part in word.partition("="))
        if not sign or not name:
            raise UserError(f"an arm must be a list of NAME=VALUE, such as `lora.rank=4,seed=0`, but it is `{text}`.")
        if name in arm:
            raise UserError(f"an arm must set each hyperparameter once, but `{text}` sets `{name}` twice.")
        arm[name] = parse_yaml(value, f"the entry `{word.strip()}` of the arm")
    return arm


def arm_argument(arm: Mapping[str, Json]) -> str:
    """Return an arm as text that `parse_arm` can parse.

    >>> arm_argument({"lora.rank": 4, "without": ["method.cross"], "arm": "a, b"})
    'lora.rank=4,without=["method.cross"],arm="a, b"'
    """
    return ",".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arm.items())


def at_commas(text: str) -> list[str]:
    """Split a text at its commas, except for commas inside brackets or quotes."""
    parts, depth = [""], 0
    for piece in re.findall(r"""(?s)"(?:\\.|[^"\\])*"|'[^']*'|.""", text):
        depth += (piece in "[{(") - (piece in "]})")
        if piece == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def counterparts(arms: Collection[Mapping[str, Json]], baseline: Mapping[str, Json]) -> dict[str, Arm]:
    """Map the `identity` of each arm to its counterpart, the arm with which it is compared.

    The counterpart has the values in `baseline`. For all other hyperparameters, it has the same values as the arm. An
    arm with the values in `baseline` is its own counterpart. An arm is left out if its counterpart is not in `arms`.

    >>> rank_8 = {"lora.rank": 8, "optimizer.lr": 0.1}
    >>> counterparts([{"lora.rank": 4, "optimizer.lr": 0.1}, rank_8], {"lora.rank": 8}) == {
    ...     '{"lora.rank": 4, "optimizer.lr": 0.1}': rank_8,
    ...     '{"lora.rank": 8, "optimizer.lr": 0.1}': rank_8,
    ... }
    True
    """
    others: dict[str, Arm] = {}
    open_names: dict[tuple[str, ...], None] = {}
    for one in arms:
        if agrees(baseline, one):
            rest = {name: value for name, value in one.items() if name not in baseline}
            open_names[tuple(rest)] = None
            others[identity(rest)] = dict(one)
    found: dict[str, Arm] = {}
    for arm in arms:
        for names in open_names:  # arms differ in their names if some axes are conditional
            rest = {name: arm[name] for name in names if name in arm}
            if identity(rest) in others:
                found[identity(arm)] = others[identity(rest)]
    return found


def arm_label(arm: Mapping[str, Json]) -> str:
    """Return an arm as readable text. Floats have six significant digits.

    >>> arm_label({"lora.rank": 4, "optimizer.lr": 0.012345678})
    'lora.rank=4, optimizer.lr=0.0123457'
    >>> arm_label({"method": {"name": "all_small", "depth": 3}})
    'method=all_small (depth 3)'
    >>> arm_label({"lora.rank": 4, "without": ["method.cross", "lora.dropout"]}), arm_label({"without": []})
    ('lora.rank=4, without cross, lora.dropout', 'full')
    >>> arm_label({"lora.rank": 4, "arm": "FedProx, tuned"})
    'lora.rank=4, FedProx, tuned'
    """
    return ", ".join(setting(name, value, "=", 6) for name, value in arm.items()) or "as is"


def distinct_labels(arms: Collection[Mapping[str, Json]]) -> list[str]:
    """Return the label of each arm. Arms that share a label because of rounding are written with all digits.

    >>> distinct_labels([{"optimizer.lr": 0.12345678}, {"optimizer.lr": 0.12345679}, {"optimizer.lr": 0.1}])
    ['optimizer.lr=0.12345678', 'optimizer.lr=0.12345679', 'optimizer.lr=0.1']
    """
    labels = [arm_label(arm) for arm in arms]
    counted = Counter(labels)
    return [label if counted[label] == 1 else arm_argument(arm) for arm, label in zip(arms, labels, strict=True)]


def short_names(dotted: Iterable[str]) -> dict[str, str]:
    """Map each dotted name to its shortest ending that no other name shares.

    >>> short_names(["lora.rank", "optimizer.lr", "method.server.lr", "without"])
    {'lora.rank': 'rank', 'optimizer.lr': 'optimizer.lr', 'method.server.lr': 'server.lr', 'without': 'without'}
    """
    ends = {name: [name.split(".", skip)[-1] for skip in range(name.count("."), -1, -1)] for name in dotted}
    taken = Counter(end for several in ends.values() for end in several)
    return {name: next((end for end in several if taken[end] == 1), name) for name, several in ends.items()}


def setting(name: str, value: Json, sign: str = " ", digits: int = 4) -> str:
    """Return one entry of an arm as readable text, e.g. `rank 4` or `without cross`.

    Args:
        name: The name of the entry.
        value: The value of the entry.
        sign: The text between the name and the value.
        digits: The number of significant digits of floats.
    """
    if name == NAMED:
        return str(value)
    if name == ABLATED and isinstance(value, list):
        return f"without {', '.join(one.removeprefix('method.') for one in value)}" if value else "full"
    return f"{name}{sign}{shown_setting(value, digits)}"


def shown_setting(value: Json, digits: int = 4) -> str:
    """Return a value as readable text, written as in YAML except for floats and objects.

    Floats have `digits` significant digits. An object is written as its name, followed by its other fields in
    parentheses. A string is in quotes only if it would otherwise be read as another value, like the string `"8"`.

    >>> shown_setting({"name": "all_small", "depth": 3}), shown_setting([4, 4]), shown_setting(["l0", None])
    ('all_small (depth 3)', '[4, 4]', '[l0, null]')
    >>> shown_setting({"rank": 4, "alpha": 0.123456})
    '(rank 4, alpha 0.1235)'
    >>> shown_setting("sketch"), shown_setting("8"), shown_setting(["a, b", "none", "null"])
    ('sketch', '"8"', '["a, b", none, "null"]')
    """
    match value:
        case str():
            return value if _plain(value) else json.dumps(value, ensure_ascii=False)
        case float():
            return f"{value:.{digits}g}"
        case list():
            return f"[{', '.join(shown_setting(one, digits) for one in value)}]"
        case dict():
            named = isinstance(value.get("name"), str)
            fields = {field: one for field, one in value.items() if not (named and field == "name")}
            inner = ", ".join(f"{field} {shown_setting(one, digits)}" for field, one in fields.items())
            return " ".join(
                [*([shown_setting(value["name"])] if named else []), *([f"({inner})"] if inner or not named else [])]
            )
        case _:
            return json.dumps(value)


def shown_mapping(arm: Mapping[str, Json]) -> str:
    """Return an arm as it is written in a YAML file.

    >>> shown_mapping({"lora.rank": 8, "arm": "FedAvg, tuned", "without": []})
    '{lora.rank: 8, arm: "FedAvg, tuned", without: []}'
    """
    inner = (
        f"{name}: {json.dumps(value) if isinstance(value, dict | float) else shown_setting(value)}"
        for name, value in arm.items()
    )
    return f"{{{', '.join(inner)}}}"


@lru_cache(maxsize=4096)
def _plain(text: str) -> bool:
    """Return whether a text without quotes is read as this text, wherever it stands in the label of an arm."""
    try:
        return not _SPECIAL.search(text) and bool(parse_yaml(text, "a string") == text)
    except UserError:
        return False
