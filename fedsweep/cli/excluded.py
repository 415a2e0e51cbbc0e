"""The arms that `fedsweep tune --exclude` names, in every form in which `fedsweep drop` accepts an arm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedsweep.cli.early_check import all_arms
from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import parse_overrides
from fedsweep.results.arm_names import select, unknown_arm
from fedsweep.results.arms import Arm, agrees, parse_arm
from fedsweep.sweep.space.requested_space import RequestedSpace, read


def excluded_arms(texts: Sequence[str], space: str, overrides: Sequence[str], options: Mapping[str, Any]) -> list[Arm]:
    """Return the entries of `exclude` that `--exclude` stands for.

    A text such as `lora.rank=1` that agrees with arms becomes one entry, which leaves out all of these arms. Any other
    name becomes an entry for each arm that it names.

    Args:
        texts: The values of `--exclude`.
        space: The name of the search space.
        overrides: The changes to the experiment, as they are typed.
        options: The other changes to the search space, by dotted name.

    Raises:
        UserError: A text names no arm, and is not a list of NAME=VALUE. Wrong lists of NAME=VALUE are found later, with
            all other mistakes of the search space.
    """
    others = {name: value for name, value in options.items() if name != "exclude"}
    request = read(space, parse_overrides(list(overrides)), others)
    arms = [] if request.mistakes or request.space.search.name != "grid" else all_arms(request)
    return [arm for text in texts for arm in _entries(text, request, arms)]


def _entries(text: str, request: RequestedSpace, arms: Sequence[Arm]) -> Iterator[Arm]:
    try:
        entry = parse_arm(text)
    except UserError:
        entry = None
    if entry is not None and any(agrees(entry, arm) for arm in arms):
        yield entry
    elif places := select(text, arms):
        yield from (arms[place] for place in places)
    elif entry is not None:
        yield entry
    elif arms:
        raise unknown_arm(text, request.name, arms)
    elif (search := request.space.search.name) != "grid":
        raise UserError(f"`--exclude` needs `search` grid, but {request.where} has `search` {search}.")
    else:
        raise request.origin.error(request.mistakes)
