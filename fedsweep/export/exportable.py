"""What cannot be exported, told before anything is built."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedsweep.common.errors import UserError, near
from fedsweep.federation.run import content_digests
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import ExportObstacle, SeparateModels
from fedsweep.results.records import TrialPlan


def check_target(target: Path) -> None:
    """Refuse a folder that holds anything, or that cannot be made.

    Raises:
        UserError: it does, or cannot.
    """
    if target.is_dir() and any(target.iterdir()):
        raise UserError(f"`--to` must be a new or an empty folder, but {target} is not empty.")
    if target.exists() and not target.is_dir():
        raise UserError(f"`--to` must be a new or an empty folder, but {target} is a file.")
    above = next(one for one in target.absolute().parents if one.exists())
    if not above.is_dir():
        raise UserError(f"`--to` must be a new or an empty folder, but {above} in {target} is a file.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"`--to` {target} cannot be made: {above} cannot be written.")


def check_exportable(config: RunConfig, client: str | None = None) -> None:
    """Refuse a method whose model is more, or less, than a tuned backbone with its head.

    Raises:
        UserError: it is, or the client has no model of its own.
    """
    method, clients = config.method, list(config.client_domains())
    separate = isinstance(method, SeparateModels)
    if client is not None and client not in clients:
        hint = near(client, clients) or f"; there are {some(clients)}."
        raise UserError(f"`--client`: there is no client `{client}`{hint}")
    obstacle = ExportObstacle.of_method(method).export_obstacle(
        config.depths(), config.backbone.depth, client is not None
    )
    if obstacle is not None:
        whose = "the global model" if client is None else f"client {client}"
        own = "" if client is not None or not separate else "; `--client` exports a client's own model"
        raise UserError(
            f"`method` {method.name} cannot be exported: {whose} predicts with {obstacle}, for which neither PEFT nor "
            f"the backbone's own library has a place{own}."
        )
    if client is not None and not separate:
        raise UserError(
            f"`--client` is for methods whose clients have models of their own, but those of `method` {method.name} "
            "share one."
        )


def check_content(config: RunConfig, plan: TrialPlan) -> None:
    """Refuse to put what was tuned on other weights, or under other classes.

    Raises:
        UserError: files that the run names are missing, or were replaced since.
    """
    for name, found in content_digests(config).items():
        if plan.digests.get(name, found) != found:
            raise UserError(f"the {name} of trial {plan.key} changed since it ran; it cannot be exported.")


def some(names: Sequence[str], most: int = 6) -> str:
    """The names, or the first of them and how many more.

    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
