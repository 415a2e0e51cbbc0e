"""Correction of the addresses in MLflow's database after a results folder was copied or moved."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fedsweep.common.errors import UserError

ADDRESSES = {
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
}
"""The columns of MLflow's database that contain addresses of artifacts, as pairs of a table and a column."""
COLUMNS = "SELECT one.name, column.name FROM sqlite_master one JOIN pragma_table_info(one.name) column"


def relocate(root: Path) -> None:
    """Replace the addresses of another results folder's artifacts with the addresses of the artifacts in `root`.

    MLflow stores absolute addresses. In a copy of a results folder, they refer to the artifacts of the original. The
    command `mlflow db move-resources` does not change the addresses of existing runs.

    Raises:
        UserError: An address must be replaced, but the database is not writable.
    """
    database, own = root / "mlflow.db", (root / "artifacts").as_uri()
    if not database.exists():
        return
    with contextlib.closing(sqlite3.connect(database, timeout=30)) as connection:
        present = ADDRESSES & set(connection.execute(COLUMNS))
        if ("experiments", "artifact_location") not in present:
            return
        former = {_artifacts(*one) for one in connection.execute("SELECT name, artifact_location FROM experiments")}
        stale = [one for one in former if one is not None and one != own and not _same(one, root / "artifacts")]
        try:
            with connection:
                for table, column in sorted(present):
                    for one in stale:
                        connection.execute(
                            f"UPDATE {table} SET {column} = ? || substr({column}, ?) "  # noqa: S608 (our own names)
                            f"WHERE substr({column}, 1, ?) = ?",
                            (own, len(one) + 1, len(one) + 1, f"{one}/"),
                        )
        except sqlite3.Error as error:
            raise UserError(
                f"the results folder {root} is a copy, and MLflow's addresses of its artifacts must be corrected, but "
                f"mlflow.db cannot be written: {error}."
            ) from None


def _artifacts(experiment: str, location: str | None) -> str | None:
    """Return the address of the folder `artifacts` that contains an experiment's artifacts, or None if it has none."""
    below = Path("/", experiment).as_uri().removeprefix("file://")
    if not location or not location.startswith("file://") or not location.endswith(f"/artifacts{below}"):
        return None
    return location.removesuffix(below)


def _same(address: str, folder: Path) -> bool:
    """Return whether an address refers to an existing folder under another of its names, such as a link."""
    path = Path(unquote(urlsplit(address).path))
    return path.exists() and folder.exists() and path.samefile(folder)
