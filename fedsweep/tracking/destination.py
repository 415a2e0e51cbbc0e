"""Where runs are recorded: a server's address, or MLflow's SQLite database in a results folder."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from fedsweep.common.errors import UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient


def tracking_uri(root: Path) -> str:
    """The SQLite database of a store."""
    return f"sqlite:///{root / 'mlflow.db'}"


def check_writable(root: Path) -> None:
    """Find out before anything starts whether the store and its database can be written.

    Raises:
        UserError: they cannot.
    """
    probe = root / f".write-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
        if (root / "mlflow.db").exists():  # connecting would make an empty one
            with contextlib.closing(sqlite3.connect(root / "mlflow.db", timeout=30)) as database:
                database.execute("BEGIN IMMEDIATE")
                database.rollback()
    except OSError as error:
        raise UserError(f"the tracking store {root} cannot be written: {error.strerror or error}.") from None
    except sqlite3.Error as error:
        raise UserError(f"the tracking store {root} cannot be written: {error} (mlflow.db).") from None


OWN = "store"
"""The address that means the store's own database, where the environment names a server."""
SERVER = "mlflow.txt"
"""The file of a sweep's folder that names the server on which it is shown; never with a password."""
CLIENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    # MLflow's own are 7 retries with growing pauses, and 120 s. Here what fails is due again later, and a retried
    # create_run would make a second run.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""What MLflow's client reads from the environment, unless the user has set it."""


@dataclass(frozen=True)
class Destination:
    """A database or a server that MLflow's client can write to."""

    uri: str
    """For MLflow's client; never holds a password."""
    artifacts: Path | None = None
    """The folder for artifacts of the store's own database; a server knows its own place."""
    credentials: tuple[str, str] | None = field(default=None, repr=False)
    """User and password, where the address held them."""

    @classmethod
    def of(cls, root: Path, address: str | None = None) -> Destination:
        """The server at an address, or the database of a store where there is none.

        Raises:
            UserError: that is no address of a server.
        """
        if not address or address == OWN:
            return cls(tracking_uri(root), root / "artifacts")
        rule = "must be http://HOST[:PORT] or https://... of an MLflow server, or `store` for the store's own database"
        try:
            parts = urlsplit(address)
            valid = bool(parts.scheme in ("http", "https") and parts.hostname and parts.port != 0)
        except ValueError:  # a port that is no number
            valid = False
        if not valid or parts.query or parts.fragment or re.search(r"[\s\x00-\x1f\x7f]", address):
            # Whatever stands before an @ may be a password.
            raise UserError(f"`--mlflow` {rule}, but it is `{re.sub('//.*@', '//***@', address)}`.")
        user, password = (unquote(one) if one else None for one in (parts.username, parts.password))
        host = parts.netloc.rpartition("@")[2]
        credentials = (user, password) if user and password else None
        return cls(f"{parts.scheme}://{host}{parts.path.rstrip('/')}", None, credentials)

    @classmethod
    def of_sweep(cls, root: Path, folder: Path, address: str | None = None) -> Destination:
        """The server or database on which a sweep is shown already, unless an address names another."""
        path = folder / SERVER
        return cls.of(root, address or (path.read_text().strip() if path.exists() else None))

    @property
    def is_server(self) -> bool:
        """Whether another process answers for the database."""
        return self.artifacts is None

    @property
    def server(self) -> str | None:
        """Its address, or None for the store's own database."""
        return self.uri if self.is_server else None

    def client(self) -> MlflowClient:
        """MLflow's client, with short timeouts and no retries of its own."""
        for name, value in CLIENT.items():
            os.environ.setdefault(name, value)
        if self.credentials:  # the only way into all of MLflow's client, its artifacts included
            os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"] = self.credentials
        from mlflow import MlflowClient

        for noisy in ("alembic", "mlflow"):  # after the import, which sets their levels
            logging.getLogger(noisy).setLevel(logging.WARNING)
        return MlflowClient(tracking_uri=self.uri)
