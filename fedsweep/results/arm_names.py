"""Selection of arms by name, in every form in which fedsweep prints the name of an arm or of a trial."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError, near
from fedsweep.common.yaml_values import Json, parse_yaml
from fedsweep.results.arms import (
    ABLATED,
    IN_WORDS,
    Arm,
    arm_label,
    at_commas,
    identity,
    parse_arm,
    same,
    setting,
    short_names,
    shown_setting,
)

SEED = "seed"
"""An entry that names one trial of an arm. An arm is named completely without it."""
BASELINE = " (baseline)"
"""The end of a baseline's label in a figure."""
ELLIPSIS = "…"
"""The sign for the words that a figure leaves out of a long label."""
_BETWEEN = re.compile(r"\s*(?:[,·]\s*|$)")
"""The text between two entries of an arm. Labels have commas, and the names of MLflow runs have dots."""
_WITHOUT_ENTRIES = re.compile(r"^as is\s*(?:[,·]\s*|$)")
"""The label of an arm without entries, at the beginning of a name."""


def select(text: str, arms: Sequence[Mapping[str, Json]], order: Sequence[str] = ()) -> list[int]:
    """Return the positions of the arms that `text` names; none if it names no arm.

    A name can contain all entries of an arm or only some of them. The entries can be written as in YAML or as in any
    output, e.g. `partition.alpha=1` or `alpha 1` for a `partition.alpha` of 1.0. Arms that are named completely are
    preferred to arms that have further entries, and exact values are preferred to rounded ones. In the label of a
    figure, a final `(baseline)` is ignored, and `…` stands for any text.

    Args:
        text: The name.
        arms: The arms. An entry `seed` is optional in a name.
        order: The order in which figures show the entries, from the manifest. By default, it is the order in the arms.

    >>> arms = [{"lora.rank": 4, "partition.alpha": 1.0}, {"lora.rank": 8, "partition.alpha": 1.0}]
    >>> select("lora.rank=8, partition.alpha=1", arms), select("alpha 1 · rank 4", arms), select("rank 5", arms)
    ([1], [0], [])
    >>> select("rank 8, alpha 1 (baseline)", arms), select("rank 8, …", arms)
    ([1], [1])
    """
    text = text.strip()
    label = " ".join(text.split()).removesuffix(BASELINE)
    present = dict.fromkeys(name for arm in arms for name in arm if name != SEED)
    names = [*(name for name in order if name in present), *(name for name in present if name not in order)]
    return (
        _with_entries(text, arms)
        or _with_entries(label, arms)
        or [place for place, arm in enumerate(arms) if any(abbreviates(label, one) for one in _in_figures(arm, names))]
    )


def unknown_arm(text: str, space: str, arms: Sequence[Mapping[str, Json]]) -> UserError:
    """Return the error about a name that fits no arm of a search space."""
    labels = [arm_label(one) for one in arms]
    known = near(text, labels) or f"; its arms are {'; '.join(labels)}."
    return UserError(f"no arm of {space} is named `{text}`{known}")


def abbreviates(label: str, words: str) -> bool:
    """Return whether `label` is equal to `words`, apart from white space, if each `…` stands for any text.

    >>> abbreviates("partition skew (…,\\n alpha 1)", "partition skew (clients 4, alpha 1)")
    True
    """
    pieces, bare = _without_spaces(label).split(ELLIPSIS), _without_spaces(words)
    if not (bare.startswith(pieces[0]) and bare.endswith(pieces[-1])):  # most labels differ here, which is fast
        return False
    return bool(re.fullmatch(".*".join(map(re.escape, pieces)), bare))


@lru_cache(maxsize=4096)
def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _in_figures(arm: Mapping[str, Json], names: Sequence[str]) -> Iterator[str]:
    """Yield the label of an arm in a figure, with short names that are unique among `names` or in this arm."""
    entries = {name: arm[name] for name in names if name in arm}
    for short in (short_names(names), short_names(entries)):
        yield ", ".join(setting(short[name], value) for name, value in entries.items()) or "as is"


def _with_entries(text: str, arms: Sequence[Mapping[str, Json]]) -> list[int]:
    """Return the positions of the arms that best fit `text`, which consists of entries."""
    exact = _exact(text)
    ranks = [_rank(text, exact, arm) for arm in arms]
    best = min((rank for rank in ranks if rank is not None), default=None)
    return [place for place, rank in enumerate(ranks) if rank is not None and rank == best]


def _exact(text: str) -> Arm | None:
    try:
        return parse_arm(text)
    except UserError:
        return None


def _rank(text: str, exact: Arm | None, arm: Mapping[str, Json]) -> tuple[bool, bool] | None:
    """Return whether `text` leaves out an entry of `arm`, and whether it has a rounded value; None if it does not fit.

    Lower ranks are better matches.
    """
    needed = arm.keys() - {SEED}
    if exact and all(name in arm and identity(arm[name]) == identity(value) for name, value in exact.items()):
        return bool(needed - exact.keys()), False
    if not text:
        return None
    if not needed:
        text = _WITHOUT_ENTRIES.sub("", text)
        if not text:
            return False, True
    ways = [bool(needed - used) for used in _readings(text, arm, frozenset())]
    return (min(ways), True) if ways else None


def _readings(text: str, arm: Mapping[str, Json], used: frozenset[str]) -> Iterator[frozenset[str]]:
    """Yield the entries of `arm` that `text` contains, for each way to read the whole text as entries of the arm."""
    if not text:
        yield used
        return
    for name in arm.keys() - used:
        for form in _forms(name, arm[name]):
            if text.startswith(form) and (end := _BETWEEN.match(text, len(form))):
                yield from _readings(text[end.end() :], arm, used | {name})
    word = at_commas(text)[0].split(" · ")[0]
    rest = text[len(word) :]
    end = _BETWEEN.match(rest)
    for found in _typed(word, arm) - used if end else ():
        yield from _readings(rest[end.end() :] if end else "", arm, used | {found})


def _forms(name: str, value: Json) -> set[str]:
    """Return all texts that fedsweep prints for one entry of an arm."""
    parts = name.split(".")
    names = [".".join(parts[place:]) for place in range(len(parts))]
    found = {setting(one, value, sign, digits) for one in names for sign in "= " for digits in (4, 6)}
    if isinstance(value, str):
        found |= {f"{one}={value}" for one in names}
    if name in IN_WORDS:  # tables show these entries in the column `arm`
        found |= {f"{one}={setting(name, value)}" for one in ("arm", name)}
    if name == ABLATED and isinstance(value, list):
        found |= {f"{ABLATED}={shown_setting(value)}"}
    return found - {""}


def _typed(word: str, arm: Mapping[str, Json]) -> set[str]:
    """Return the entries of `arm` that `word` names in the form NAME=VALUE, with VALUE written in YAML.

    NAME may be the end of a dotted name, or a field of an entry that is an object. An object may be given by its name
    alone. For an object of which `word` gives only a part, the set contains the dotted name of that part.
    """
    name, sign, text = (part.strip() for part in word.partition("="))
    read = _parsed(text) if sign and name else None
    if read is None:
        return set()
    whole = {one: value for one, value in arm.items() if one not in IN_WORDS}
    objects = {one: value for one, value in whole.items() if isinstance(value, dict)}
    inner = {f"{one}.{field}": value for one, given in objects.items() for field, value in flat(given).items()}
    named = {one: value["name"] for one, value in objects.items() if "name" in value}
    found = {one for one, value in {**whole, **inner}.items() if _ends(one, name) and same(value, read[0])}
    return found | {f"{one}.name" for one, value in named.items() if _ends(one, name) and same(value, read[0])}


def _ends(dotted: str, name: str) -> bool:
    return dotted == name or dotted.endswith(f".{name}")


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[Json] | None:
    """Return the value of a YAML text in a tuple, or None if the text is not valid YAML."""
    try:
        return (parse_yaml(text, "the name of an arm"),)
    except UserError:
        return None
