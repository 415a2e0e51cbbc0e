"""Whether an MLflow server answers, lets us in, and takes what we want to write."""

from __future__ import annotations

import re
from importlib import metadata
from urllib.parse import urlsplit

from fedsweep.common.errors import UserError, one_line
from fedsweep.tracking.destination import Destination
from fedsweep.tracking.runs import Runs


def check_server(destination: Destination, experiment: str | None = None) -> None:
    """Find out before anything starts whether a server can be written to; the store's own database needs no question.

    With `experiment`, that is made where it is missing, and tagged: who may only read is told so at once.

    Raises:
        UserError: it does not answer, refuses access, or would leave artifacts on this machine's disk.
    """
    if not destination.is_server:
        return
    runs = Runs(destination, experiment or "")
    try:
        runs.probe()
        if experiment is not None:
            runs.client.set_experiment_tag(runs.experiment_id, "fedsweep.version", metadata.version("fedsweep"))
            location = runs.client.get_experiment(runs.experiment_id).artifact_location
    except Exception as error:  # MLflow's own, and those of what it is built on
        raise UserError(refusal(destination, error)) from None
    if experiment is not None and urlsplit(location).scheme in ("", "file"):
        raise UserError(
            f"the MLflow server {destination.uri} keeps the artifacts of `{experiment}` in {location}, which is a path "
            "of its own machine and not of this one; a server with --serve-artifacts, as is MLflow's default, takes "
            "them over HTTP."
        )


def refusal(destination: Destination, error: Exception) -> str:
    """Why a server, or the store's own database, cannot be used: one sentence."""
    whole = one_line(error)
    if not destination.is_server:
        return f"MLflow's database {destination.uri.removeprefix('sqlite:///')} cannot be used: {_short(whole)}."
    status = getattr(error, "get_http_status_code", lambda: None)()
    if status in (401, 403):
        answer = re.search(r"Response body: '(.*)'", whole)
        told = f": {_short(answer[1])}" if answer and "<" not in answer[1] and answer[1].strip() else ""
        return (
            f"the MLflow server {destination.uri} refuses access (HTTP {status}{told}); MLflow's client takes a name "
            "and password from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or a MLFLOW_TRACKING_TOKEN."
        )
    return f"the MLflow server {destination.uri} does not answer: {_reason(whole)}."


def _reason(whole: str) -> str:
    """The part of MLflow's long message that a person needs."""
    if system := re.search(r"\[Errno -?\d+\] ([^'\")]+)", whole):
        return system[1]
    if "timed out" in whole:
        return "no answer in time"
    if status := re.search(r"(?:failed with error code|too many) (\d+)", whole):
        return f"what is there is no MLflow server, or one in trouble (HTTP {status[1]})"
    if "not in a valid JSON format" in whole:
        return "what is there is no MLflow server"
    return _short(whole)


def _short(text: str) -> str:
    words = " ".join(text.split())
    return (words if len(words) <= 160 else f"{words[:160]} ...").rstrip(".")
