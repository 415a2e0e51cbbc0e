"""The command that repeats a sweep, and the options of `fedsweep tune` that change a search space."""

import json
import shlex

from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import Json, parse_yaml
from fedsweep.results.arms import arm_argument
from fedsweep.results.records import SweepManifest
from fedsweep.results.tuned_arms import STAGE, space_name

SPACE_OPTIONS = {
    "experiment": "experiment",
    "seeds": "seeds",
    "subsets": "subsets",
    "design": "design",
    "exclude": "exclude",
    "scheduler": "scheduler",
    "columns": "columns",
    "samples": "search.samples",
    "warm_start": "search.warm_start",
    "cpus_per_trial": "resources.cpus_per_trial",
    "gpus_per_trial": "resources.gpus_per_trial",
    "system_metrics": "resources.system_metrics",
}
"""Map each option of `tune` to the entry of the search space that it changes."""

UNTIL_OPTIONS = {"smallest_effect": "smallest_effect", "first_seed": "first"}
"""Map each option of `tune` that implies seeds until decided to the entry of `seeds` that it sets."""


def tune_command(manifest: SweepManifest) -> str | None:
    """Return the command that starts a sweep again, as it is typed in a shell.

    The command contains all changes to the experiment and to the search space. It leaves out options that do not affect
    results, such as the results folder.

    Returns:
        The command. None if the sweep was started from Python with a change for which `fedsweep tune` has no option.
    """
    flags, rules = ({entry: _flag(name) for name, entry in one.items()} for one in (SPACE_OPTIONS, UNTIL_OPTIONS))
    words = [
        space_name(manifest.name, manifest.stage),
        *(f"{name}={_in_yaml(value)}" for name, value in manifest.overrides.items()),
    ]
    for dotted, value in manifest.options.items():
        if dotted == STAGE:  # the command runs all linked sweeps
            continue
        if dotted == "seeds" and isinstance(value, dict) and {*value} <= {"until", *rules}:
            rule = [word for entry, one in value.items() if entry in rules for word in (rules[entry], str(one))]
            words += rule or ["--until-decided"]
            continue
        if dotted == "exclude" and isinstance(value, list):
            words += [word for arm in value for word in ("--exclude", arm_argument(arm))]
            continue
        if dotted not in flags or value is None or value is False or isinstance(value, dict):
            return None
        words.append(flags[dotted])
        if value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, list) else str(value))
    return shlex.join(["fedsweep", "tune", *words, *["--fresh"] * manifest.fresh])


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _in_yaml(value: Json) -> str:
    """Return a value in YAML on one line; a string is in quotes only if it would otherwise be read as another value."""
    if isinstance(value, str):
        try:
            if value.isprintable() and parse_yaml(value, "a string") == value:
                return value
        except UserError:
            pass
    return json.dumps(value, ensure_ascii=False)
