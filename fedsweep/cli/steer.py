"""The commands that change and stop a running sweep from another terminal."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from fedsweep.cli import json_output, json_results
from fedsweep.cli.json_output import FormatOption
from fedsweep.cli.options import DEFAULT_STORE, StoreOption, SweepArgument, check_format
from fedsweep.cli.output import awaiting, progress_console
from fedsweep.common.errors import UserError
from fedsweep.common.progress import loading
from fedsweep.results import Store, SweepStore
from fedsweep.results.arm_names import select, unknown_arm
from fedsweep.results.arms import arm_label
from fedsweep.results.steering import DropRequest, ExtendRequest, Request, Requests, StopRequest, is_running

if TYPE_CHECKING:
    from fedsweep.sweep.plan.plan import Plan

Command = Literal["extend", "drop", "stop"]
KINDS: dict[Command, str] = {"extend": "extended", "drop": "dropped", "stop": "stopped"}
"""The kind of the change that each command makes."""
LOOK_SECONDS = 0.2
"""Seconds between two looks at a sweep that another process runs."""


def stop(sweep: SweepArgument, format: FormatOption = "terminal", store: StoreOption = DEFAULT_STORE) -> None:
    """Stop a running sweep, as Ctrl-C does in its own terminal. All recorded rounds are kept.

    Example: `fedsweep stop ablations/lora_rank`
    """
    check_format(format, ("terminal", "json"))
    found = Store.at(store).find(sweep)
    name = found.manifest().label
    if not is_running(found):
        raise UserError(f"no process is running sweep {name}.")
    requests, before = Requests(found), len(found.manifest().changes)
    asked = requests.ask(StopRequest())
    try:
        with awaiting("Waiting until the sweep has stopped", always=True):
            while is_running(found):
                time.sleep(LOOK_SECONDS)
    finally:
        requests.withdraw(asked)
    ended, manifest = len(found.ended()), found.manifest()
    of = "" if manifest.trials is None else f" of {manifest.trials}"
    if any(one.kind == "stopped" for one in manifest.changes[before:]):
        said = f"Stopped with {ended}{of} trials ended. To continue, run `fedsweep tune {name} --resume`."
    else:
        said = f"The sweep has ended by itself, with {ended}{of} trials ended."
    _tell("stop", found, said, before, format)


def extend(
    sweep: SweepArgument,
    seeds: Annotated[
        str,
        Option(metavar="+N|SEED,...", help="seeds to add to every arm: `+5` for five more, or a list such as `7,8`"),
    ],
    format: FormatOption = "terminal",
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Add seeds to every arm of a sweep, which may be running.

    Example: `fedsweep extend ablations/brick_lambda --seeds +5`
    """
    check_format(format, ("terminal", "json"))
    home = Store.at(store)
    found = _changeable(home, sweep)
    before = len(found.manifest().changes)
    asked = ExtendRequest(seeds=_new_seeds(seeds, found.manifest().seeds))
    _tell("extend", found, _change(home, found, asked), before, format)


def drop(
    sweep: SweepArgument,
    arm: Annotated[str, Argument(metavar="ARM", help="the arm to drop, e.g. `lora.rank=1`")],
    format: FormatOption = "terminal",
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Stop an arm of a sweep, and leave it out of the results. Its trials are kept in the folder `dropped`.

    Example: `fedsweep drop ablations/lora_rank lora.rank=1`
    """
    check_format(format, ("terminal", "json"))
    home = Store.at(store)
    found = _changeable(home, sweep)
    plan, before = _plan(found), len(found.manifest().changes)
    places = select(arm, plan.arms, found.manifest().varied)
    if len(places) != 1:
        if not places:
            raise unknown_arm(arm, plan.name, plan.arms)
        several = ", ".join(arm_label(plan.arms[place]) for place in places)
        raise UserError(f"`{arm}` fits several arms of {plan.name}: {several}; give more of their values.")
    _tell("drop", found, _change(home, found, DropRequest(arm=plan.arms[places[0]])), before, format)


def _new_seeds(given: str, known: Sequence[int]) -> tuple[int, ...]:
    """Return the seeds that `--seeds` names.

    >>> _new_seeds("+2", [0, 1, 5]), _new_seeds("7, 8", [0])
    ((6, 7), (7, 8))
    """
    if re.fullmatch(r"\+[1-9]\d{0,5}", given.strip()):
        first = max(known) + 1
        return tuple(range(first, first + int(given)))
    if not re.fullmatch(r"\s*\d{1,9}\s*(,\s*\d{1,9}\s*)*", given):
        raise UserError(
            f"`--seeds` must be a number of new seeds such as +5, or a list such as 7,8, but it is `{given}`."
        )
    return tuple(int(one) for one in given.split(","))


def _changeable(home: Store, sweep: str) -> SweepStore:
    if home.uri is not None:
        raise UserError(f"sweeps in a remote results folder such as {home.where} cannot be changed; start a new sweep.")
    return home.find(sweep)


def _plan(sweep: SweepStore) -> Plan:
    with loading(progress_console(), "PyTorch", "fedsweep.sweep.plan.plan"):
        from fedsweep.sweep.running.steering import plan_of

    with awaiting("Checking the arms"):
        return plan_of(sweep.manifest())


def _tell(command: Command, sweep: SweepStore, said: str, before: int, format: str) -> None:
    """Print the result of a command. `before` is the number of changes to the sweep before this command."""
    if format != "json":
        print(said)
        return
    running = is_running(sweep)
    found = json_results.recorded(sweep, running)
    made = [one for one in found.pop("changes_made")[before:] if one["kind"] == KINDS[command]]
    json_output.document(
        command,
        space=sweep.manifest().name,
        id=sweep.folder.name,
        running=running,
        sentence=said,
        change=made[-1] if made else None,
        **found,
    )


def _change(home: Store, sweep: SweepStore, request: ExtendRequest | DropRequest) -> str:
    """Ask the process that runs a sweep for a change, or change a sweep that no process is running.

    Returns:
        A sentence about the change, followed by the command that runs its trials if no process runs them.
    """
    plan = _plan(sweep)
    from fedsweep.sweep.running.steering import change_at_rest, changed_plan

    changed_plan(plan, request)  # raises an error before anything is asked
    if is_running(sweep) and (said := _granted(sweep, request)):
        return said
    said, name = change_at_rest(request, home, sweep), sweep.manifest().label
    left = f"To run its trials, use `fedsweep tune {name} --resume`."
    return f"{said} {left if sweep.any_left() else f'To update its report, use `fedsweep report {name}`.'}"


def _granted(sweep: SweepStore, request: Request) -> str:
    """Ask the process that runs a sweep for a change, and return its answer, or "" if it has ended without an answer.

    Raises:
        UserError: The process has refused the change.
    """
    requests = Requests(sweep)
    name = requests.ask(request)
    try:
        with awaiting("Waiting until the running trials have ended their rounds", always=True):
            while True:
                running = is_running(sweep)
                if (answer := requests.answered(name)) is not None:
                    if answer.error is not None:
                        raise UserError(answer.error)
                    return answer.sentence
                if not running:
                    return ""
                time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        print("The change may still be made; `fedsweep status` lists the changes.", file=sys.stderr)
        raise
    finally:
        requests.withdraw(name)
