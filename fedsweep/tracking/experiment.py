"""Classes for an MLflow experiment and a registered model, and a function that checks an MLflow server."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fedsweep.common.errors import UserError, one_line, short, without_query
from fedsweep.common.paths import inside
from fedsweep.tracking.destination import Destination

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


DESCRIBED = "fedsweep.described"  # the tag of a run whose parameters have been recorded
KEY = "fedsweep.key"
PARENT = "mlflow.parentRunId"
PAGE = 1000  # runs per response; a larger response may exceed the client's timeout


def sweep_tags(sweep_id: str) -> dict[str, str]:
    """Return the tags that identify the parent run of a sweep."""
    return {"fedsweep.kind": "sweep", "fedsweep.sweep": sweep_id}


def trial_tags(key: str, parent: str | None) -> dict[str, str]:
    """Return the tags that identify the run of the trial `key`.

    `parent` is the id of the sweep's parent run, or None if the run does not belong to a sweep.
    """
    return {KEY: key, "fedsweep.kind": "trial", **({PARENT: parent} if parent else {})}


def tag_filter(tags: Mapping[str, str]) -> str:
    """Return MLflow's search filter for runs that have all of the given tags."""
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())


def find_run(client: MlflowClient, experiment_id: str, tags: Mapping[str, str]) -> str | None:
    """Return the id of a run that has all of the given tags, or None if there is no such run."""
    found = client.search_runs([experiment_id], tag_filter(tags), max_results=1)
    return str(found[0].info.run_id) if found else None


class Experiment:
    """An MLflow experiment. Its methods do not catch MLflow's exceptions."""

    def __init__(self, destination: Destination, name: str) -> None:
        self.destination, self.name = destination, name
        self.client = destination.client()
        self._unanswered: set[str] = set()  # keys of runs whose creation was not confirmed

    @cached_property
    def id(self) -> str:
        """The id of the experiment. If the experiment does not exist, it is created."""
        found = self.client.get_experiment_by_name(self.name)
        if found is None:
            folder = self.destination.artifacts
            location = None if folder is None else inside(folder, self.name).as_uri()
            try:
                return str(self.client.create_experiment(self.name, artifact_location=location))
            except Exception:  # another process created it at the same time, or the response was lost
                found = self.client.get_experiment_by_name(self.name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":  # the user deleted it on MLflow's page and then used it again
            self.client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def create(self, key: str, name: str, tags: dict[str, str]) -> Run:
        """Create and return a run.

        Args:
            key: The key of the trial or the id of the sweep that the run belongs to.
            name: The name of the run.
            tags: The tags of the run.
        """
        try:
            return self.client.create_run(self.id, run_name=name, tags=tags)
        except Exception:
            self._unanswered.add(key)
            raise

    def search(self, tags: Mapping[str, str]) -> list[Run]:
        """Return all runs that have all of the given tags, oldest first."""
        found: list[Run] = []
        token: str | None = ""
        while token is not None:
            page = self.client.search_runs(
                [self.id], tag_filter(tags), max_results=PAGE, order_by=["attributes.start_time ASC"],
                page_token=token or None,
            )  # fmt: skip
            found += page
            token = page.token or None
        return found

    def keep_one(self, same: Iterable[Run], keep: str | None = None) -> Run | None:
        """Return one of several runs of the same trial or sweep, and delete the others.

        There are several runs if MLflow created a run but the response was lost, so that the run was created again. If
        a run has the id `keep`, that run is kept. Otherwise, a run whose parameters have been recorded is preferred.
        If `same` is empty, the method returns None.
        """
        runs = sorted(same, key=lambda run: (run.info.run_id != keep, DESCRIBED not in run.data.tags))
        for late in runs[1:]:
            self.client.delete_run(late.info.run_id)
        return runs[0] if runs else None

    def delete_late(self, key: str, tags: Mapping[str, str], keep: str) -> None:
        """Delete all duplicates of the run whose id is `keep`.

        A slow server may have created the duplicates after a request to create the run had timed out.

        Args:
            key: The key of the trial or the id of the sweep that the run belongs to.
            tags: The tags by which the run and its duplicates are found.
            keep: The id of the run to keep.
        """
        if key in self._unanswered:
            self.keep_one(self.search(tags), keep)
            self._unanswered.discard(key)


def check_server(destination: Destination, experiment: str | None = None) -> None:
    """Raise UserError unless the server answers and grants access. A local database is not checked.

    If `experiment` is given, this function also checks write access: it creates the experiment of this name if
    necessary, and adds a tag to it. It also raises UserError if the server cannot receive artifacts from other
    machines.
    """
    if not destination.server:
        return
    asked = Experiment(destination, experiment or "")
    try:
        asked.client.search_experiments(max_results=1)
        if experiment is not None:
            asked.client.set_experiment_tag(asked.id, "fedsweep.version", metadata.version("fedsweep"))
            location = asked.client.get_experiment(asked.id).artifact_location
    except Exception as error:  # MLflow and the libraries below it raise many types
        raise UserError(error_sentence(destination, error)) from None
    if experiment is not None and urlsplit(location).scheme in ("", "file"):
        raise UserError(
            f"the MLflow server {destination.uri} stores the artifacts of `{experiment}` in {location}, a folder on "
            "the server's machine; start the server with --serve-artifacts, which is MLflow's default, so that it "
            "receives artifacts over HTTP."
        )


def error_sentence(destination: Destination, error: Exception) -> str:
    """Return an error message that states why a server or a local database cannot be used."""
    whole = one_line(error)
    if not destination.server:
        cause = short(without_query(whole))
        return f"MLflow's database {destination.uri.removeprefix('sqlite:///')} cannot be used: {cause}."
    status = getattr(error, "get_http_status_code", lambda: None)()
    if status in (401, 403):
        answer = re.search(r"Response body: '(.*)'", whole)
        detail = f": {short(answer[1])}" if answer and "<" not in answer[1] and answer[1].strip() else ""
        return (
            f"the MLflow server {destination.uri} denies access (HTTP {status}{detail}); set MLFLOW_TRACKING_USERNAME "
            "and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."
        )
    return f"the MLflow server {destination.uri} cannot be used: {_reason(whole)}."


def _reason(whole: str) -> str:
    if system := re.search(r"\[Errno -?\d+\] ([^'\")]+)", whole):
        return system[1]
    if "timed out" in whole:
        return "it did not respond in time"
    if status := re.search(r"(?:failed with error code|too many) (\d+)", whole):
        return f"it returned HTTP {status[1]}, so it has failed or is not an MLflow server"
    return "its response is not that of an MLflow server" if "not in a valid JSON format" in whole else short(whole)


class Registration:
    """A model in MLflow's registry. The method `add` adds a version of the model."""

    def __init__(self, destination: Destination, model: str, experiment: str, key: str, sweep: str | None) -> None:
        """Find the MLflow run of the trial `key`. If `sweep` is None, the trial does not belong to a sweep.

        Raises:
            UserError: The model's name is invalid, MLflow cannot be used, or MLflow has no run of this trial.
        """
        if not model.strip() or any(one in model for one in "/:"):
            raise UserError(f"`--register` must be a name without `/` and `:`, but it is `{model}`.")
        check_server(destination)
        missing = f"MLflow has no run of trial {key}; `fedsweep ui --deliver` creates it."
        database = Path(destination.uri.removeprefix("sqlite:///"))
        if not destination.server and not database.exists():  # connecting would create an empty one
            raise UserError(missing)
        try:
            self.client, self.model = destination.client(), model
            run_id = _run_id(self.client, experiment, key, sweep)
        except Exception as error:  # MLflow and the libraries below it raise many types
            raise UserError(error_sentence(destination, error)) from None
        if run_id is None:
            raise UserError(missing)
        self.run_id = run_id

    def add(self, folder: Path, path: str, tags: Mapping[str, str]) -> str:
        """Add the files in `folder` as a new version of the model, and return the number of the version.

        The files are logged as artifacts of the trial's run, in the artifact folder `path`.
        """
        try:
            self.client.log_artifacts(self.run_id, str(folder), path)
            with contextlib.suppress(Exception):  # it already exists, or the next call fails too
                self.client.create_registered_model(self.model)
            source = f"runs:/{self.run_id}/{path}"
            made = self.client.create_model_version(self.model, source, self.run_id, tags=dict(tags))
        except Exception as error:  # MLflow and the libraries below it raise many types
            raise UserError(
                f"the model was exported to {folder}, but MLflow did not register it: {one_line(error)}."
            ) from error
        return str(made.version)


def _run_id(client: MlflowClient, experiment: str, key: str, sweep: str | None) -> str | None:
    found = client.get_experiment_by_name(experiment)
    parent = find_run(client, found.experiment_id, sweep_tags(sweep)) if found and sweep else None
    if found is None or (sweep and parent is None):
        return None
    return find_run(client, found.experiment_id, trial_tags(key, parent))
