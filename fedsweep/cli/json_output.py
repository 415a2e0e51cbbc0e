"""The JSON documents that commands print with `--format json`, and the description of their fields."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from fedsweep.cli.completion import choices
from fedsweep.cli.json_errors import MISTAKE, mistakes
from fedsweep.cli.json_results import ARM, CHANGE, COMPARISON, FAILURE, TRIAL
from fedsweep.common.config import Config

INVALID = 2
"""The exit code of a command whose input is invalid."""
FORMAT = 1
"""The version of the documents. It changes if a field is removed or gets another meaning, but not for a new field."""
FormatOption = Annotated[
    str,
    Option("--format", help="format to print: `terminal` or `json`", autocompletion=choices("terminal", "json")),
]

EXIT_CODES = {
    "0": "success; a trial that diverged is a result and no error",
    "1": "a trial, the report or a check failed, or results could not be stored",
    "2": "invalid input",
    "129, 130, 143": "interrupted by SIGHUP, by Ctrl-C, or by SIGTERM or `kill`: 128 plus the number of the signal",
}
"""The exit codes of all commands."""
_CODE = "exit code of the command: 0, 1 if a trial or the report failed, or 128 plus the number of a signal"
_STATUS = "`complete`, `failed` (a trial has failed), `interrupted` (trials are left to run) or `running`"
_CHANGES = "list of the changes made by hand, oldest first: see [a change](#a-change)"
_FAILURES = "list of the trials that have failed or diverged: see [a failure](#a-failure)"
_TRIALS = (
    "the numbers `ended`, `begun` (begun but not ended) and `planned` (null if unknown; for a running sweep with seeds "
    "until decided, the number until the next decision)"
)
SWEEP = {
    "space": "name of the search space",
    "id": "id of the sweep",
    "status": _STATUS,
    "experiment": "name of the experiment",
    "objective": "metric by which arms are compared",
    "mode": "`max` or `min`",
    "seeds": "list of the seeds",
    "trials": "number of ended trials by outcome: `finished`, `pruned`, `diverged` and `failed`",
    "planned_trials": "planned number of trials, or null if unknown",
    "folder": "folder of the sweep",
    "files": "paths of the files of the report",
    "arms": "list of arms with their statistics: see [an arm](#an-arm)",
    "table": "list of arms, with the columns of the report's `table.csv`, such as `worst_domain_accuracy`, and one "
    "column for each hyperparameter of the arms",
    "findings": "list of sentences below the table",
    "each_trial": "list of the trials that have begun: see [a trial](#a-trial)",
    "failures": _FAILURES,
    "changes_made": _CHANGES,
}
"""The fields of a sweep with results."""
PLAN = {
    "space": "name of the search space",
    "experiment": "name of the experiment",
    "objective": "metric by which arms are compared",
    "mode": "`max` or `min`",
    "arms": "list of arms, each an object from dotted name to value; null for a search that samples values",
    "labels": "list of the names of these arms, which `drop` and `compare` accept; null without `arms`",
    "baseline": "object from dotted name to value, which the baseline has; null without a baseline",
    "sampled": "object from dotted name to the sampled range as text; null for a grid",
    "trials": "number of trials; the largest possible number with seeds until decided",
    "rounds": "number of rounds of each trial",
    "seeds": "list of the seeds, or null with seeds until decided",
    "until_decided": "the rule of seeds until decided, or null: `at_most`, `at_least`, `smallest_effect`, `first` and "
    "`vary`, as in [the setting `seeds`](hyperparameters.md#seeds-with-until)",
    "search": "name of the search",
    "scheduler": "name of the scheduler",
    "counts": "list of arms with their parameter counts and their clients' costs; only if the space counts parameters",
    "clients": "with `--dry-run` and `federation.capacity`: list with `arm`, `clients`, `depth`, `rank`, and the costs "
    "of each of these clients in a round after the first",
    "expected_seeds": "with `--dry-run` and seeds until decided: list with `spread` (standard deviation of the paired "
    "differences, in the unit of `smallest_effect`; null if it does not matter), `case` (`no difference`, or `smallest "
    "effect` for every arm), `seeds` (mean per arm), `baseline` (its mean, or null) and `decided` (share of the "
    "comparisons)",
}
"""The fields of the plan of a sweep."""
STATE = {
    "space": "name of the search space",
    "id": "id of the sweep",
    "status": _STATUS,
    "running": "true if a process runs the sweep",
    "process": "number of this process, or null",
    "machine": "name of the machine on which it runs, or null",
    "started": "time in UTC at which this process began to run the sweep; without a process, the value of `created`",
    "created": "time in UTC at which the sweep was created",
    "folder": "folder of the sweep",
    "objective": "metric by which arms are compared",
    "mode": "`max` or `min`",
    "rounds": "number of rounds of each trial",
    "seeds": "list of the seeds",
    "trials": _TRIALS,
    "joined": "other processes that run trials of the sweep: list with `process`, `machine` and `parallel`",
    "parallel": "number of trials at the same time in all processes, or null",
    "seconds_left": "estimated time in seconds, or null before a first round has ended",
    "changes": "the sentences of `changes_made`",
    "changes_made": _CHANGES,
    "trials_begun": "list of the trials that have begun but not ended: see [a trial](#a-trial)",
    "failures": _FAILURES,
    "arms": "list of the arms of which a trial has begun: see [an arm](#an-arm)",
}
"""The fields of the state of a sweep."""
CHANGED = {
    "space": "name of the search space",
    "id": "id of the sweep",
    "running": "true if a process runs the sweep after the change",
    "status": _STATUS,
    "trials": _TRIALS,
    "change": "the change that was made: see [a change](#a-change); null if the sweep ended before it was stopped",
    "sentence": "the result of the command in words",
}
"""The fields of a changed or stopped sweep."""
NESTED: dict[str, dict[str, str]] = {
    "A sweep with results": SWEEP,
    "The state of a sweep": STATE,
    "The plan of a sweep": PLAN,
    "An arm": ARM,
    "A comparison": COMPARISON,
    "A trial": TRIAL,
    "A failure": FAILURE,
    "A change": CHANGE,
    "A mistake": MISTAKE,
}
"""The fields of the objects in the documents."""
ERROR = {
    "command": "the command, or null if the words name none",
    "error": "the error message, which is also printed to stderr",
    "exit_code": "exit code of the command",
    "mistakes": "with exit code 2, list of the mistakes in the input: see [a mistake](#a-mistake); otherwise empty",
}
"""The fields of a document about an error, besides `format`."""
FIELDS: dict[str, dict[str, str]] = {
    "list": {
        "files": "list of YAML files: `kind`, `name`, `description`, `own` (true for your own files) and `path`",
        "sweeps": "only for `list sweeps`: `name`, `id`, `experiment`, `objective`, `created`, `running`, "
        "`ended_trials` and `planned_trials` (null if unknown)",
        "methods": "only for `list methods`: `name`, `needs`, `description` and `source`",
        "broken": "only for `list methods`: list of sentences about plug-ins that cannot be used; if there are any, "
        "the exit code is 2",
        "metrics": "only for `list metrics`: `name`, `kind` (`column` or `metric`) and `description`",
    },
    "show": {
        "experiment": "name of the experiment",
        "values": "object from dotted name to value, with all hyperparameters of the experiment",
        "plan": "for a search space instead: see [the plan of a sweep](#the-plan-of-a-sweep)",
    },
    "tune": {
        "sweeps": "list of sweeps, usually of one: see [a sweep with results](#a-sweep-with-results)",
        "exit_code": _CODE,
        "plans": "with `--dry-run`, instead: list of plans, usually of one: see [the plan of a "
        "sweep](#the-plan-of-a-sweep)",
        "parallel": "with `--dry-run`: number of trials at the same time",
        "seconds": "with `--dry-run`: estimated duration of all sweeps in seconds",
        "estimated_from": "with `--dry-run`: source of the estimate, in words",
        "background": "with `--detach`, instead: the `space` and the `id` of the sweep, the number of its `process` "
        "and its `log` file, which contains what the command would print to stderr, followed by its document",
    },
    "status": {
        "sweeps": "list of sweeps: see [the state of a sweep](#the-state-of-a-sweep)",
    },
    "extend": CHANGED,
    "drop": CHANGED,
    "stop": CHANGED,
    "report": {"sweep": "see [a sweep with results](#a-sweep-with-results)"},
    "compare": {
        "comparisons": "list of pairs of arms: see [a comparison](#a-comparison)",
        "findings": "list of sentences below the table",
    },
    "export": {
        "folder": "folder of the exported model",
        "model": "description of the exported model",
        "key": "key of the trial",
        "seed": "seed of the trial",
        "round": "round after which the model was saved",
        "outcome": "outcome of the trial",
        "metrics": "object from name to value, with the metrics of this round",
        "chosen": "reason for the choice among several trials, or null",
        "registered": "name and version in MLflow's model registry, or null",
    },
    "predict": {
        "images": "list of images: `path`, and `predictions`, a list of `class` and `probability`",
        "broken": "list of images that cannot be read: `path` and `reason`",
        "accuracy": "accuracy from 0 to 1 if every image is in a folder named after its class, or null",
    },
    "doctor": {"checks": "list of checks: `check`, `works` (true or false) and `sentence`"},
    "data prepare": {
        "data_set": "the content of `card.json`",
        "folder": "folder of the prepared data set",
        "already": "true if it had already been prepared",
        "warnings": "list of sentences",
    },
    "data list": {
        "data_sets": "list of prepared data sets: `name`, `size`, `folder`, `images`, `classes`, `domains`, `digest`",
        "damaged": "list of error messages",
        "unfinished": "list of folders of preparations that were interrupted",
        "layouts": "list of the layouts that `data prepare` can read: `name` and `files`",
    },
    "data show": {
        "data_set": "the content of `card.json`",
        "counts": "object from domain to class to the numbers of images, `train` and `test`",
        "verified": "true if all pixels were read and are unchanged",
        "picture": "path of the picture with sample images",
        "images": "only with `--split`: list of images with `domain`, `class` and `path`",
    },
    "data partition": {
        "partitions": "list of distinct partitions: `title`, `skew` and `clients`, a list with `id`, `images` (object "
        "from class to number) and `distance`",
        "picture": "path of the figure",
    },
    "data generate": {
        "data_set": "the content of `card.json`",
        "folder": "folder of the prepared data set",
        "new": "number of images that were generated by this call",
    },
}
FIELDS["confirm"] = {
    "search_space": "path of the search space that the command wrote; null with `--dry-run`",
    **FIELDS["tune"],
}
"""The fields of the document of each command, besides `format` and `command`."""


def text(command: str, **fields: object) -> str:
    """Return the JSON document of a command.

    Raises:
        ValueError: A field is not described in `FIELDS`.
    """
    if unknown := fields.keys() - FIELDS[command].keys():
        raise ValueError(f"fields without a description: {sorted(unknown)}")
    content = {"format": FORMAT, "command": command, **fields}
    return json.dumps(plain(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def document(command: str, **fields: object) -> None:
    """Print the JSON document of a command."""
    print(text(command, **fields), end="", flush=True)


def error(sentence: str, exit_code: int, words: Sequence[str] = ()) -> None:
    """Print the JSON document of a command that ends with an error. `words` are the words of the command line."""
    content = {
        "format": FORMAT,
        "command": named(words),
        "error": sentence,
        "exit_code": exit_code,
        "mistakes": mistakes(sentence) if exit_code == INVALID else [],
    }
    print(json.dumps(plain(content), ensure_ascii=False, allow_nan=False), flush=True)


def named(words: Sequence[str]) -> str | None:
    """Return the command that the words of a command line name, or None if they name no command with JSON output.

    >>> named(["data", "show", "digits"]), named(["tune", "list"]), named(["tun"])
    ('data show', 'tune', None)
    """
    known = (" ".join(words[:count]) for count in (2, 1))
    return next((one for one in known if one in FIELDS or one == "run"), None)


def asked(words: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON.

    >>> asked(["list", "--format", "json"]), asked(["list", "--format", "terminal"])
    (True, False)
    """
    return "--json" in words or "--format=json" in words or ("--format", "json") in pairwise(words)


def plain(value: Any) -> Any:
    """Return a value in JSON types. A number that is not finite is None, and a path is text."""
    if isinstance(value, Config):
        return plain(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes):
        return [plain(one) for one in value]
    if hasattr(value, "tolist"):  # a number or an array of numpy
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
