"""Destinations of MLflow runs: a server, or MLflow's SQLite database in a results folder."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from filelock import FileLock

from fedsweep.common.errors import UserError
from fedsweep.tracking.relocation import relocate

if TYPE_CHECKING:
    from mlflow import MlflowClient


def tracking_uri(root: Path) -> str:
    """Return the URI of MLflow's SQLite database in the results folder `root`."""
    return f"sqlite:///{root / 'mlflow.db'}"


def check_writable(root: Path) -> None:
    """Raise UserError unless the results folder and its MLflow database are writable."""
    probe = root / f".write-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
        if (root / "mlflow.db").exists():  # connecting would create an empty one
            with contextlib.closing(sqlite3.connect(root / "mlflow.db", timeout=30)) as database:
                database.execute("BEGIN IMMEDIATE")
                database.rollback()
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror or error if isinstance(error, OSError) else f"{error} (mlflow.db)"
        raise UserError(f"the results folder {root} cannot be written: {reason}.") from None


def check_could_write(root: Path) -> None:
    """Raise UserError unless the results folder `root` is writable or can be created. Nothing is left behind."""
    there = next(one for one in (root, *root.parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(f"the results folder {root} cannot be written: {error.strerror or error}.") from None


UNNAMED = ".mlflow.new.db"  # a local database whose tables are being created
SERVER = "mlflow.txt"  # a file in a sweep's folder with the address of its MLflow server, without the password
CLIENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    # MLflow's defaults are 7 retries and a timeout of 120 s. The recorder itself repeats failed writes, and a retry of
    # create_run would create a second run.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Defaults for environment variables of MLflow's client; values that the user has set take precedence."""


@dataclass(frozen=True)
class Destination:
    """The place where MLflow runs are written: a server, or the SQLite database in a results folder."""

    uri: str
    """The address for MLflow's client, without a password."""
    artifacts: Path | None = None
    """The folder for the artifacts of the local database; None for a server."""
    credentials: tuple[str, str] | None = field(default=None, repr=False)
    """User and password, if the address contained them."""

    @classmethod
    def of(cls, root: Path, address: str | None = None) -> Destination:
        """Return the destination that a value of `--mlflow` selects.

        Args:
            root: The results folder.
            address: The URL of an MLflow server. `store` and None select the SQLite database in `root`.

        Raises:
            UserError: The address is invalid.
        """
        if not address or address == "store":  # `store` overrides a server set in the environment
            return cls(tracking_uri(root), root / "artifacts")
        rule = "must be the URL of an MLflow server (http://HOST[:PORT] or https://...) or `store` for a local database"
        try:
            parts = urlsplit(address)
            valid = bool(parts.scheme in ("http", "https") and parts.hostname and parts.port != 0)
        except ValueError:  # a port that is not a number
            valid = False
        if not valid or parts.query or parts.fragment or re.search(r"[\s\x00-\x1f\x7f]", address):
            # Text before an @ may be a password.
            raise UserError(f"`--mlflow` {rule}, but it is `{re.sub('//.*@', '//***@', address)}`.")
        user, password = (unquote(one) if one else None for one in (parts.username, parts.password))
        host = parts.netloc.rpartition("@")[2]
        credentials = (user, password) if user and password else None
        return cls(f"{parts.scheme}://{host}{parts.path.rstrip('/')}", None, credentials)

    @classmethod
    def of_sweep(cls, root: Path, folder: Path, address: str | None = None) -> Destination:
        """Return the destination for `address`, or the sweep's previous destination if `address` is None.

        Args:
            root: The results folder.
            folder: The folder of the sweep.
            address: A value of `--mlflow`, or None.
        """
        path = folder / SERVER
        return cls.of(root, address or (path.read_text().strip() if path.exists() else None))

    @property
    def server(self) -> str | None:
        """The address of the server, or None for the local database."""
        return self.uri if self.artifacts is None else None

    def exists(self) -> bool:
        """Return whether the local database exists. For a server, return True."""
        return self.artifacts is None or (self.artifacts.parent / "mlflow.db").exists()

    def client(self) -> MlflowClient:
        """Return an MLflow client that has short timeouts and does not retry.

        MLflow's client creates the tables of a local database. If two processes create the tables at the same time,
        one of them fails, so the client of a local database is created under a lock. A process that is killed while it
        creates the tables would leave a database that MLflow cannot open. A new database therefore gets its name only
        when it is complete.
        """
        for name, value in CLIENT.items():
            os.environ.setdefault(name, value)
        if self.credentials:  # only environment variables reach all parts of MLflow's client, including artifacts
            os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"] = self.credentials
        from mlflow import MlflowClient

        for noisy in ("alembic", "mlflow"):  # after the import, which sets their levels
            logging.getLogger(noisy).setLevel(logging.WARNING)
        # It logs a traceback of every error of a database, and raises the error, which fedsweep reports in a sentence.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        self.relocate()
        with self.lock():
            if self.artifacts is not None and not self.exists():
                unnamed = self.artifacts.parent / UNNAMED
                unnamed.unlink(missing_ok=True)
                MlflowClient(tracking_uri=f"sqlite:///{unnamed}")
                unnamed.replace(self.artifacts.parent / "mlflow.db")
            return MlflowClient(tracking_uri=self.uri)

    def relocate(self) -> None:
        """Correct the addresses in a local database if the results folder was copied or moved.

        A sweep calls this method before it takes its own lock, because the addresses stay as they are while a sweep is
        running in the folder.

        Raises:
            UserError: The database is damaged, or another process has locked it.
        """
        if self.artifacts is not None and self.artifacts.parent.exists():
            with self.lock():
                relocate(self.artifacts.parent)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of a local database during the context. A server needs no lock.

        A results folder that is not writable has no lock either, because nobody creates tables in it.
        """
        folder = None if self.artifacts is None else self.artifacts.parent
        if folder is None or (folder.exists() and not os.access(folder, os.W_OK)):
            yield
            return
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".mlflow.lock"):
            yield
