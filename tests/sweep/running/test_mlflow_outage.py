"""A sweep with four parallel trials, during which its MLflow server with PostgreSQL is killed."""

from pathlib import Path

import pytest

from benchmarks.faults import mlflow_outage
from tests.sweep.helpers import environment
from tests.tracking.servers import POSTGRES, mlflow_server, postgres

pytestmark = [pytest.mark.slow, pytest.mark.skipif(POSTGRES is None, reason="PostgreSQL is not installed")]


def test_an_outage_of_the_server_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    assert environment()["RAY_AUTH_MODE"] == "disabled"
    with postgres() as database, mlflow_server(tmp_path / "mlflow", database) as server:
        (tmp_path / "work").mkdir()
        said: list[str] = []
        differences = mlflow_outage.play(tmp_path / "work", server, away=3, rounds=8, say=said.append)
    assert differences == []
    assert said[-1].startswith("compared: 4 trials, 4 runs, ")
