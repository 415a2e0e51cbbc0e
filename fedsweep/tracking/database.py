"""Where MLflow's database lies, and whether it can be written."""

import contextlib
import os
import sqlite3
from pathlib import Path

from fedsweep.common.errors import UserError


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
