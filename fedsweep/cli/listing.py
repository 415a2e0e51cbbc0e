"""The command `fedsweep list`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from rich.table import Column, Table
from typer import Argument, Exit

from fedsweep.cli.completion import choices
from fedsweep.cli.json_output import FormatOption, document
from fedsweep.cli.options import DEFAULT_STORE, StoreOption, check_format
from fedsweep.cli.output import awaiting, relative, result_console
from fedsweep.common.errors import UserError, near
from fedsweep.common.paths import VERBS, Kind, available, own_files, results_folder, summary
from fedsweep.results import Store
from fedsweep.results.steering import is_running

TITLES: dict[Kind, str] = {"experiments": "Experiments", "search_spaces": "Search spaces", "pretrain": "Pre-training"}
SWEEPS, METHODS, METRICS, ALL, BROKEN = "sweeps", "methods", "metrics", "all", "broken"
SPACES = "spaces"
"""A short word for `search_spaces`."""
KINDS = (*TITLES, SPACES, SWEEPS, METHODS, METRICS, ALL)


def list_files(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[WORD]...",
            help="what to list: `experiments`, `spaces` (search spaces), `pretrain`, `all` (all three), `sweeps`, "
            "`methods` or `metrics`, and words that the name or the description must contain",
            autocompletion=choices(*TITLES, SPACES, SWEEPS, METHODS, METRICS, ALL),
        ),
    ] = None,
    format: FormatOption = "terminal",
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """List experiments, search spaces, pre-trainings, sweeps that were run, methods, or metrics.

    Without words, the shipped files are counted by folder, and only your own are listed one by one.

    Example: `fedsweep list ablations brick`, or `fedsweep list methods`
    """
    check_format(format, ("terminal", "json"))
    given = words or []
    kinds = [kind for kind in KINDS if given and given[0] in (kind, kind.removesuffix("s"))]
    wanted = [word.lower() for word in given[len(kinds) :]]
    if SWEEPS in kinds:
        sweeps = list_sweeps(Store.at(store), wanted)
        if wanted and not sweeps:
            raise UserError(f"no sweep in {_shown(store)} has {_and(wanted)} in its name; see `fedsweep list sweeps`.")
        document("list", sweeps=sweeps) if format == "json" else _show_sweeps(sweeps, store)
        return
    if {METHODS, METRICS} & {*kinds}:
        _list_names(kinds[0], wanted, format)
        return
    chosen = ["search_spaces" if kind == SPACES else kind for kind in kinds]
    asked = [kind for kind in TITLES if kind in chosen] or [*TITLES]
    files = [one for one in _files(asked) if _has(f"{one['name']} {one['description']}", wanted)]
    if wanted and not files:
        raise UserError(_nothing(asked, wanted))
    if format == "json":
        document("list", files=files)
    elif words:
        _show_files(files)
    else:
        _show_overview(files)


def _list_names(kind: str, words: Sequence[str], format: str) -> None:
    """Print the methods or the metrics whose description contains all words, or only the one that the words name.

    If the method of a plug-in cannot be used, the other methods are printed, and the exit code is 2.
    """
    from fedsweep.cli import method_list

    every, broken = method_list.list_methods() if kind == METHODS else (method_list.list_metrics(), [])
    for sentence in broken:
        print(f"fedsweep: {sentence}", file=sys.stderr)
    found = [one for one in every if [one["name"].lower()] == [*words]]
    found = found or [one for one in every if _has(" ".join(map(str, one.values())), words)]
    if not found:
        hint = near(words[0], [one["name"] for one in every]) or f"; see `fedsweep list {kind}`."
        raise UserError(f"no {kind.removesuffix('s')} has {_and(words)} in its name or description{hint}")
    if format == "json":
        document("list", **{kind: found}, **({BROKEN: broken} if kind == METHODS else {}))
    elif kind == METHODS:
        method_list.show_methods(found)
    else:
        method_list.show_metrics(found)
    if broken:
        raise Exit(2)


def _files(kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    """Return the YAML files of some kinds; one's own files come first."""
    known = [(kind, name, path) for kind in kinds for name, path in available(kind).items()]
    own = own_files(path for _, _, path in known)
    found = [
        {"kind": kind, "name": name, "description": summary(path), "own": path in own, "path": str(path)}
        for kind, name, path in known
    ]
    return sorted(found, key=lambda one: not one["own"])


def _has(text: str, words: Sequence[str]) -> bool:
    return all(word in text.lower() for word in words)


def _nothing(kinds: Sequence[Kind], words: Sequence[str]) -> str:
    what = f"no {TITLES[kinds[0]].lower().removesuffix('s')}" if len(kinds) == 1 else "nothing"
    names = dict.fromkeys(part for kind in kinds for name in available(kind) for part in (name, *name.split("/")))
    hint = near(words[0], [*KINDS, *names]) or "; run `fedsweep list all` to see all names."
    return f"{what} has {_and(words)} in its name or description{hint}"


def _and(words: Sequence[str]) -> str:
    return " and ".join(f"`{word}`" for word in words)


def _shown(store: str) -> str:
    return store if "://" in store else relative(results_folder(store).absolute())


def _show_files(files: Sequence[dict[str, Any]]) -> None:
    console = result_console()
    for kind, title in TITLES.items():
        if mine := [one for one in files if one["kind"] == kind]:
            title = f"{title}: fedsweep {VERBS[kind]} NAME"
            table = Table("name", "description", title=title, title_justify="left", box=None)
            for one in mine:
                table.add_row(one["name"], one["description"])
            console.print(table, "")


def _show_overview(files: Sequence[dict[str, Any]]) -> None:
    """Print one's own files, and the number of shipped files in each folder."""
    console, own = result_console(), [one for one in files if one["own"]]
    if own:
        console.print("Yours:")
        _show_files(own)
        console.print("Shipped:")
    table = Table(Column("files", justify="right"), "of", "to list them", box=None)
    for kind, title in TITLES.items():
        shipped = [one["name"] for one in files if one["kind"] == kind and not one["own"]]
        folders = Counter(name.rpartition("/")[0] for name in shipped)
        for folder, count in folders.items():
            what = f"{title.lower()}{f' in {folder}' if folder else ''}"
            table.add_row(str(count), what, f"fedsweep list {folder or kind}")
    console.print(table, "")
    console.print("`fedsweep list WORD` searches the names and the descriptions of all files.")
    console.print("`fedsweep list sweeps` lists the sweeps that were run.")


def list_sweeps(store: Store, words: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a description of each sweep whose name or id contains all words, newest first, in JSON types."""
    found = []
    with awaiting("Reading the sweeps"):
        for sweep in reversed(store.sweeps()):
            manifest = sweep.manifest()
            if _has(manifest.label, words):
                found.append(
                    {
                        "name": manifest.name,
                        "id": manifest.id,
                        "experiment": manifest.experiment,
                        "objective": manifest.metric,
                        "created": manifest.created,
                        "running": is_running(sweep),
                        "ended_trials": len(sweep.ended()),
                        "planned_trials": manifest.trials,
                    }
                )
    return found


def _show_sweeps(sweeps: Sequence[dict[str, Any]], store: str) -> None:
    console = result_console()
    if not sweeps:
        console.print(f"No sweep was found in {_shown(store)}; `--store` names another results folder.")
        return
    table = Table(Column("sweep", overflow="fold"), "started", Column("trials", justify="right"), "state", box=None)
    for one in sweeps:
        started = datetime.fromisoformat(one["created"]).astimezone()
        planned, ended = one["planned_trials"], one["ended_trials"]
        trials = str(ended) if planned is None else f"{ended} of {planned}"
        state = "complete" if planned is not None and ended >= planned else "not running here"
        state = "running" if one["running"] else state
        table.add_row(f"{one['name']}@{one['id']}", f"{started:%Y-%m-%d %H:%M}", trials, state)
    console.print(table)
