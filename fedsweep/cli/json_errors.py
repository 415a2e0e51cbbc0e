"""The parts of an error message for programs: the place of the mistake, the rule, the value and similar names.

An error message of fedsweep has the form `PLACE: ARM: RULE, but it is VALUE; did you mean NAME?`, in which most parts
are optional (see `UserError`). This module takes such a sentence apart.
"""

from __future__ import annotations

import json
import re
from typing import Any

MISTAKE = {
    "sentence": "the mistake in words, without its place",
    "file": "YAML file with the mistake, or null if it is not in a YAML file",
    "line": "line in this file, from 1, or null",
    "column": "column in this line, from 1, or null",
    "where": "origin of the value in words, such as `search space mine` or `arm lora.rank=4`, or null",
    "name": "name of the hyperparameter, entry, option or object that is wrong, or null",
    "rule": "the sentence without the value and without similar names",
    "value": "the invalid value, or null if the sentence states none",
    "near": "list of similar valid names; empty if there are none",
}
"""The fields of a mistake."""
_PLACE = re.compile(r"(?P<file>[^\n`]+?\.ya?ml):(?P<line>\d+):(?P<column>\d+): ")
_WHERE = re.compile(r"(?P<where>(?:search space|experiment|pre-training|arm|all \d+ arms|\d+ of \d+ arms)\b.*?): (?=`)")
_SEVERAL = re.compile(r"(?P<where>[^\n]+) has \d+ mistakes:\n- (?P<mistakes>.+)", re.DOTALL)
_NEAR = re.compile(r"; did you mean (?P<near>.+)\?\Z")
_OPTIONS = re.compile(r" \(Possible options: (?P<near>[^)]+)\)")
_HINT = re.compile(r"; (?:see|its arms are|it reports|use|run|the \w+ are) .*\Z")
_VALUE = re.compile(r",? but (?:it|one|they) (?:is|are|has|contains?) (?P<value>.+)\Z")
_NAME = re.compile(
    r"`([^`]+)`|(?<!\w)'([^']+)'|(?<![\w-])(--[a-z][a-z-]*)"
    r"|\bsweep of (\S+)|\bsweep (\S+@[^\s.]+)|((?<!\S)/\S+)(?= cannot be written)"
)
"""A name in an error message: in backticks, in quotes, an option, a search space, a sweep, or a folder."""


def mistakes(message: str) -> list[dict[str, Any]]:
    """Return the mistakes that an error message states, each as an object with the fields `MISTAKE`.

    >>> found = mistakes("mine.yaml:4:3: arm lora.rank=-8: `lora.rank` must be greater than 0, but it is -8.")
    >>> [(one["file"], one["line"], one["where"], one["name"], one["value"]) for one in found]
    [('mine.yaml', 4, 'arm lora.rank=-8', 'lora.rank', -8)]
    >>> [one["near"] for one in mistakes("there is no search space `mime`; did you mean `mine` or `mile`?")]
    [['mine', 'mile']]
    """
    several = _SEVERAL.fullmatch(message)
    if several is None:
        return [_mistake(message)]
    return [_mistake(one, several["where"]) for one in several["mistakes"].split("\n- ")]


def _mistake(sentence: str, where: str | None = None) -> dict[str, Any]:
    place = _PLACE.match(sentence)
    sentence = sentence[place.end() :] if place else sentence
    if origin := _WHERE.match(sentence):
        where, sentence = origin["where"], sentence[origin.end() :]
    rule, close = _without_near(sentence)
    value = _VALUE.search(rule)
    rule = rule[: value.start()] if value else rule
    named = _NAME.search(rule)
    return {
        "sentence": sentence,
        "file": place["file"] if place else None,
        "line": int(place["line"]) if place else None,
        "column": int(place["column"]) if place else None,
        "where": None if place and not origin else where,
        "name": next(filter(None, named.groups())) if named else None,
        "rule": rule,
        "value": _value(value["value"]) if value else None,
        "near": close,
    }


def _without_near(sentence: str) -> tuple[str, list[str]]:
    """Return a sentence without the similar names and the hints at its end, and the similar names."""
    found = _NEAR.search(sentence) or _OPTIONS.search(sentence)
    rule = sentence[: found.start()] if found else sentence
    rule = _HINT.sub("", rule).rstrip(".")
    if found is None:
        return rule, []
    words = re.split(r" or |, ", found["near"])
    return rule, [one.strip("`'") for one in words]


def _value(shown: str) -> Any:
    """Return a value as it is shown in an error message, as JSON if it can be read as JSON and else as text.

    >>> _value("[0, 0]"), _value("`fedraa`"), _value("0.5"), _value("{lora.rank: 4}")
    ([0, 0], 'fedraa', 0.5, '{lora.rank: 4}')
    """
    try:
        return json.loads(shown)
    except ValueError:
        return shown.strip("`") if shown.count("`") == 2 else shown
