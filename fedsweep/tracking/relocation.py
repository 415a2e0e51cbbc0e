"""Correction of the addresses in MLflow's database after a results folder was copied or moved."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fedsweep.common.errors import UserError, warn
from fedsweep.common.files import LockedError, locked

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

    The addresses stay as they are, with a warning on stderr, if the database is read-only, or while a sweep is running
    in the folder, because that sweep may use the same folder under another path, for example in a container.

    Raises:
        UserError: The database is damaged, or another process has locked it.
    """
    database = root / "mlflow.db"
    if not database.exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=30)) as connection:
            present = ADDRESSES & set(connection.execute(COLUMNS))
            if not (stale := _stale(connection, present, root / "artifacts")):
                return
            if sweep := _running(root):
                _warn_once(
                    f"the results folder {root} was copied, moved or mounted at another path, and MLflow may not find "
                    f"its artifacts until sweep {sweep}, which is running in it, has ended."
                )
                return
            with connection:
                _replace(connection, present, stale, (root / "artifacts").as_uri())
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
            raise UserError(f"MLflow's database {database} cannot be used: {error}.") from None
        _warn_once(
            f"the results folder {root} was copied or moved and is read-only, so MLflow shows its metrics, but may not "
            "find its artifacts."
        )


def _stale(connection: sqlite3.Connection, present: AbstractSet[tuple[str, str]], artifacts: Path) -> list[str]:
    """Return the addresses of other folders for artifacts, which the database contains instead of `artifacts`."""
    if ("experiments", "artifact_location") not in present:
        return []
    former = {_artifacts(*one) for one in connection.execute("SELECT name, artifact_location FROM experiments")}
    return [one for one in former if one not in (None, artifacts.as_uri()) and not _same(one, artifacts)]


def _replace(
    connection: sqlite3.Connection, present: AbstractSet[tuple[str, str]], stale: Sequence[str], own: str
) -> None:
    for table, column in sorted(present):
        for one in stale:
            connection.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) "  # noqa: S608 (our own names)
                f"WHERE substr({column}, 1, ?) = ?",
                (own, len(one) + 1, len(one) + 1, f"{one}/"),
            )


def _running(root: Path) -> str:
    """Return the id of a sweep that a process on this machine is running in the results folder, or an empty string."""
    for lock in (root / "sweeps").glob("**/.lock"):
        try:
            with locked(lock, "taken"):
                pass
        except LockedError:
            return lock.parent.name
        except OSError:  # the folder is read-only, so no sweep is running in it
            return ""
    return ""


@functools.cache
def _warn_once(sentence: str) -> None:
    warn(sentence)


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
