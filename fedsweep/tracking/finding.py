"""Runs of one MLflow experiment, found by their tags, made once whatever answers are lost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fedsweep.common.paths import inside
from fedsweep.tracking.destination import Destination

if TYPE_CHECKING:
    from mlflow.entities import Run

DESCRIBED = "fedsweep.described"
"""The tag of a run that has its parameters."""


class Experiment:
    """One MLflow experiment. Raises what MLflow raises."""

    def __init__(self, destination: Destination, name: str) -> None:
        self.destination, self.name = destination, name
        self.client = destination.client()
        self._id: str | None = None
        self._doubtful: set[str] = set()  # whose making had no answer

    @property
    def id(self) -> str:
        """Its number, made on first use."""
        if self._id is None:
            self._id = self._open()
        return self._id

    def _open(self) -> str:
        found = self.client.get_experiment_by_name(self.name)
        if found is None:
            folder = self.destination.artifacts
            location = None if folder is None else inside(folder, self.name).as_uri()
            try:
                return str(self.client.create_experiment(self.name, artifact_location=location))
            except Exception:  # another process made it just now, or it was made and the answer lost
                found = self.client.get_experiment_by_name(self.name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":  # on MLflow's page; whoever runs it again wants to see it again
            self.client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def make(self, key: str, name: str, tags: dict[str, str]) -> Run:
        """A new run."""
        now = int(time.time() * 1000)
        try:
            return self.client.create_run(self.id, start_time=now, run_name=name, tags=tags)
        except Exception:
            self._doubtful.add(key)
            raise

    def search(self, tags: Mapping[str, str]) -> list[Run]:
        """All runs with these tags, oldest first."""
        where = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        found: list[Run] = []
        page = None
        while page is None or page.token:
            page = self.client.search_runs(
                [self.id],
                where,
                max_results=1000,
                order_by=["attributes.start_time ASC"],
                page_token=page.token if page else None,
            )
            found += page
        return found

    def one(self, same: Iterable[Run], keep: str | None = None) -> Run | None:
        """The run to go on with among those with the same tags.

        Others are deleted: a server made them, but its answer was lost, or it was made only after we had asked again.
        """
        runs = sorted(same, key=lambda run: (run.info.run_id != keep, DESCRIBED not in run.data.tags))
        for late in runs[1:]:
            self.client.delete_run(late.info.run_id)
        return runs[0] if runs else None

    def delete_late(self, key: str, tags: Mapping[str, str], keep: str) -> None:
        """Once more, where a run's making had no answer: a slow server may have made another one since."""
        if key in self._doubtful:
            self.one(self.search(tags), keep)
            self._doubtful.discard(key)
