"""Model versions in MLflow's registry, stored as artifacts of the run that trained the model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.common.errors import UserError, one_line
from fedsweep.tracking.destination import Destination
from fedsweep.tracking.experiment import check_server, error_sentence, find_run, sweep_tags, trial_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True)
class Registration:
    """The run and the model's name for a new version; found before the export begins."""

    client: MlflowClient
    model: str
    run_id: str

    @classmethod
    def of(cls, destination: Destination, model: str, experiment: str, key: str, sweep: str | None) -> Registration:
        """Find the run of a trial, below the parent run of `sweep` if given; raise UserError if this fails."""
        if not model.strip() or any(one in model for one in "/:"):
            raise UserError(f"`--register` must be a name without / and :, but it is `{model}`.")
        check_server(destination)
        missing = f"MLflow has no run of trial {key}; `fedsweep ui --deliver` brings it there."
        database = Path(destination.uri.removeprefix("sqlite:///"))
        if not destination.server and not database.exists():  # connecting would create an empty one
            raise UserError(missing)
        try:
            run_id = _run_id(destination.client(), experiment, key, sweep)
        except Exception as error:  # of MLflow, or of a library under it
            raise UserError(error_sentence(destination, error)) from None
        if run_id is None:
            raise UserError(missing)
        return cls(destination.client(), model, run_id)

    def add(self, folder: Path, path: str, tags: Mapping[str, str]) -> str:
        """Log a folder as artifacts below `path`, register it as a new version, and return the version's number."""
        try:
            self.client.log_artifacts(self.run_id, str(folder), path)
            with contextlib.suppress(Exception):  # it already exists, or the next call fails too
                self.client.create_registered_model(self.model)
            source = f"runs:/{self.run_id}/{path}"
            made = self.client.create_model_version(self.model, source, self.run_id, tags=dict(tags))
        except Exception as error:  # of MLflow, or of a library under it
            raise UserError(f"{folder} is written, but MLflow did not register it: {one_line(error)}.") from error
        return str(made.version)


def _run_id(client: MlflowClient, experiment: str, key: str, sweep: str | None) -> str | None:
    found = client.get_experiment_by_name(experiment)
    parent = find_run(client, found.experiment_id, sweep_tags(sweep)) if found and sweep else None
    if found is None or (sweep and parent is None):
        return None
    return find_run(client, found.experiment_id, trial_tags(key, parent))
