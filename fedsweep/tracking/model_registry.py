"""A model version in MLflow's registry: an exported folder among the artifacts of the run that it comes from."""

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
    """What is known before anything is exported: the run, and that the registry can be asked."""

    client: MlflowClient
    model: str
    run_id: str

    @classmethod
    def of(cls, destination: Destination, model: str, experiment: str, key: str, sweep: str | None) -> Registration:
        """Find the run of a trial in the MLflow experiment of its search space, or of a single run in that of its own.

        Raises:
            UserError: MLflow refuses the model's name, does not answer, or has no such run.
        """
        if not model.strip() or any(one in model for one in "/:"):
            raise UserError(f"`--register` must be a name without / and :, but it is `{model}`.")
        check_server(destination)
        missing = f"MLflow has no run of trial {key}; `fedsweep ui --deliver` brings it there."
        database = Path(destination.uri.removeprefix("sqlite:///"))
        if not destination.is_server and not database.exists():  # to ask would make an empty one
            raise UserError(missing)
        try:
            run_id = _run_id(destination.client(), experiment, key, sweep)
        except Exception as error:  # MLflow's own, and those of what it is built on
            raise UserError(error_sentence(destination, error)) from None
        if run_id is None:
            raise UserError(missing)
        return cls(destination.client(), model, run_id)

    def add(self, folder: Path, path: str, tags: Mapping[str, str]) -> str:
        """Log the folder among the run's artifacts below `path`, and make it a new version; its number.

        Raises:
            UserError: MLflow does not take it; the folder is as it was.
        """
        try:
            self.client.log_artifacts(self.run_id, str(folder), path)
            with contextlib.suppress(Exception):  # it is there already, or the next call says why not
                self.client.create_registered_model(self.model)
            source = f"runs:/{self.run_id}/{path}"
            made = self.client.create_model_version(self.model, source, self.run_id, tags=dict(tags))
        except Exception as error:  # MLflow's own, and those of what it is built on
            raise UserError(f"{folder} is written, but MLflow did not register it: {one_line(error)}.") from error
        return str(made.version)


def _run_id(client: MlflowClient, experiment: str, key: str, sweep: str | None) -> str | None:
    """Return the run with the trial's key, below the sweep's if it is of one; a trial may be in several sweeps."""
    found = client.get_experiment_by_name(experiment)
    parent = find_run(client, found.experiment_id, sweep_tags(sweep)) if found and sweep else None
    if found is None or (sweep and parent is None):
        return None
    return find_run(client, found.experiment_id, trial_tags(key, parent))
