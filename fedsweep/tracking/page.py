"""MLflow's page over a store: the server's command and addresses worth opening."""

import sys
import urllib.parse
from pathlib import Path

from fedsweep.store import Store
from fedsweep.tracking.database import tracking_uri


def server_command(root: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """The command of MLflow's server over a store, bound to loopback, and the environment that keeps it small."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", tracking_uri(root)]
    command += ["--default-artifact-root", (root / "artifacts").as_uri(), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1"]
    return command, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


def page_links(store: Store, url: str) -> dict[str, str]:
    """Addresses within MLflow's page: the runs of the newest sweep, their curves, its trials side by side."""
    from mlflow import MlflowClient

    sweeps = store.sweeps()
    if not sweeps:
        return {}
    manifest = sweeps[-1].manifest()
    client = MlflowClient(tracking_uri=tracking_uri(store.root))
    experiment = client.get_experiment_by_name(manifest.name)
    if experiment is None:
        return {}
    number = experiment.experiment_id
    parents = client.search_runs([number], f"tags.`fedsweep.sweep` = '{manifest.id}'", max_results=1)
    below = f"tags.`mlflow.parentRunId` = '{parents[0].info.run_id}'" if parents else "tags.`fedsweep.kind` = 'trial'"
    ids = ",".join(f'"{run.info.run_id}"' for run in client.search_runs([number], below))
    runs = f"{url}/#/experiments/{number}/runs?workflowType=machine_learning"
    # Ordered by a metric, MLflow shows children beside their parent; otherwise it folds them below it.
    metric = urllib.parse.quote(f"metrics.`{manifest.metric}`", safe="")
    charts = (
        f"{runs}&compareRunsMode=CHART&orderByKey={metric}&orderByAsc={'false' if manifest.mode == 'max' else 'true'}"
    )
    compare = urllib.parse.quote(f'?runs=[{ids}]&experiments=["{number}"]', safe="?=&")
    return {"sweeps and their trials": runs, "curves": charts, "trials side by side": f"{url}/#/compare-runs{compare}"}
