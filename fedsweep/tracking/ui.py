"""MLflow's web page for a results folder, with a saved view of each sweep that groups the trials by arm."""

from __future__ import annotations

import base64
import contextlib
import errno
import ipaddress
import json
import socket
import subprocess
import sys
import time
import urllib.parse
import zlib
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import Json
from fedsweep.results import Store, SweepManifest, SweepStore
from fedsweep.results.arms import IN_WORDS
from fedsweep.results.history import ACCUMULATED
from fedsweep.tracking.destination import Destination, tracking_uri
from fedsweep.tracking.experiment import PARENT, find_run, sweep_tags, tag_filter
from fedsweep.tracking.trial_description import ARM

if TYPE_CHECKING:
    from mlflow import MlflowClient


Extent = Mapping[str, tuple[float, float]]  # the smallest and the largest value of each metric
TAG = "mlflow.sharedViewState."  # prefix of the experiment's tags that contain saved views
BY_TRIAL = ".trials"  # end of the key of the view that shows each trial on its own
BEYOND = ("accuracy/mean_of_last_4", "megabytes/sent", "seconds/round")
"""Metrics of a trial's run that the trial's round records do not contain."""
BY_ROUND = ("accuracy/worst_domain", "loss/test", "loss/train")
COST = "megabytes/sent"
SECOND = ("accuracy/worst_domain", "accuracy/mean", "loss/test")
"""Metrics for the horizontal axis of the second scatter plot. The first one that no other axis shows is used."""


def save_views(
    client: MlflowClient,
    experiment_id: str,
    manifest: SweepManifest,
    parent: str,
    extent: Extent,
    saved: Container[str] = (),
) -> bool:
    """Save two views of a sweep for MLflow's page, by arm and by trial, and return whether both are saved.

    Each view is saved in a tag of the experiment. If saving fails, no error is raised, because MLflow does not
    document the format of views, and some servers are read-only.

    Args:
        client: The MLflow client.
        experiment_id: The id of the MLflow experiment.
        manifest: The sweep.
        parent: The id of the sweep's parent run.
        extent: The smallest and the largest value of each metric.
        saved: The names of existing tags, which are not written again.
    """
    with contextlib.suppress(Exception):
        by_arm = sweep_view(manifest, parent, extent)
        for key, view in ((manifest.id, by_arm), (manifest.id + BY_TRIAL, ungrouped(by_arm))):
            if TAG + key not in saved:
                client.set_experiment_tag(experiment_id, TAG + key, encoded(view))
        return True
    return False


def encoded(view: Json) -> str:
    """Return a view in the encoding that MLflow's page reads: compressed JSON in Base64."""
    content = json.dumps(view, separators=(",", ":"), ensure_ascii=False).encode()
    return "deflate;" + base64.b64encode(zlib.compress(content, 9)).decode()


def sweep_view(manifest: SweepManifest, parent: str, extent: Extent) -> dict[str, Any]:
    """Return a view with charts of the trials whose parent run is `parent`.

    The trials are grouped by arm, and curves show the mean and the range over seeds. `extent` maps a metric to its
    smallest and its largest value. These values determine the limits of the vertical axis in the metric's curve. If a
    metric is not in `extent`, or if its two values are equal, the axis begins at zero.
    """
    parameters = [name for name in manifest.varied if name not in IN_WORDS]
    return {
        "searchFilter": tag_filter({PARENT: parent}),
        # The page hides trials below their parent unless runs are sorted by a metric.
        "orderByKey": f"metrics.`{manifest.metric}`",
        "orderByAsc": manifest.mode == "min",
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "datasetsFilter": [],
        "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": ARM}]},
        "useGroupedValuesInCharts": True,
        "groupsExpanded": {},
        "runsHiddenMode": "SHOW_ALL",
        "hideEmptyCharts": True,
        "isAccordionReordered": True,
        "compareRunSections": [_section("sweep", opened=True), *map(_section, _folded(extent))],
        "compareRunCharts": _charts(manifest, parameters, extent),
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        "selectedColumns": [
            "attributes.`Dataset`",
            *(f"params.`{name}`" for name in parameters),
            f"metrics.`{manifest.metric}`",
            "tags.`fedsweep.outcome`",
        ],
    }


def ungrouped(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return a view with the same charts, in which each trial is shown on its own instead of the mean of its arm."""
    return {**view, "groupBy": None, "useGroupedValuesInCharts": False}


def _folded(extent: Extent) -> list[str]:
    """Return the names of the chart sections that MLflow's page creates itself. The view shows them collapsed.

    The page creates a section for each prefix of a metric's name, such as `accuracy` for `accuracy/mean`.
    """
    first = {name.rpartition("/")[0] or "Model metrics" for name in (*extent, *BEYOND)}
    return sorted({"System metrics" if name == "system" else name for name in first})


def _charts(manifest: SweepManifest, parameters: Sequence[str], extent: Extent) -> list[dict[str, Any]]:
    objective, against = manifest.metric, manifest.against.metric if manifest.against else COST
    other = COST if against in ACCUMULATED else against  # of these metrics, the page only has the last round's value
    by_round = dict.fromkeys([objective, *([other] if other != COST else []), *BY_ROUND])
    first, *curves = [
        _chart("LINE", f"curve {one}", metricKey=one, selectedMetricKeys=[one], range=_range(extent.get(one)), **LINE)
        for one in by_round
    ]
    second = next(one for one in SECOND if one not in (objective, other))
    charts = [first, _scatter("scatter", other, objective), _scatter("second scatter", second, objective)]
    if len(parameters) > 1:
        parallel = {"selectedParams": parameters, "selectedMetrics": [objective], "showAllRuns": False}
        charts.append(_chart("PARALLEL", "parallel", **parallel))
    return charts + curves


LINE: dict[str, Any] = {
    "xAxisKey": "step",
    "xAxisScaleType": "linear",
    "scaleType": "linear",
    "lineSmoothness": 0,
    "selectedXAxisMetricKey": "",
    "yAxisKey": "metric",
    "yAxisExpressions": [],
    "ignoreOutliers": False,
    "useGlobalXaxisKey": True,
    "useGlobalLineSmoothing": True,
}


def _range(extent: tuple[float, float] | None) -> dict[str, float]:
    if extent is None or extent[0] == extent[1]:
        return {}
    margin = 0.05 * (extent[1] - extent[0])
    return {"yMin": extent[0] - margin, "yMax": extent[1] + margin}


def _chart(kind: str, uuid: str, **rest: Any) -> dict[str, Any]:
    chart = {"type": kind, "uuid": uuid, "runsCountToCompare": 100, "metricSectionId": "section sweep"}
    return {**chart, "deleted": False, "isGenerated": False, **rest}


def _scatter(uuid: str, across: str, up: str) -> dict[str, Any]:
    """Return a scatter plot. The page fits both of its axes to the values, whereas its bars always begin at zero."""
    axes = {"xaxis": {"key": across, "type": "METRIC"}, "yaxis": {"key": up, "type": "METRIC"}}
    return _chart("SCATTER", uuid, **axes)


def _section(name: str, opened: bool = False) -> dict[str, Any]:
    section = {"uuid": f"section {name}", "name": name, "display": opened, "isReordered": True}
    return {**section, "deleted": False, "isGenerated": not opened}


LOOPBACK = "127.0.0.1"
ANYWHERE = ("0.0.0.0", "::")  # noqa: S104 (compared with the user's choice)
TRAINING = "workflowType=machine_learning"
"""The URL query that selects MLflow's page for model training instead of the page for language models."""
SIDE_BY_SIDE = 100  # largest number of runs in one URL: URLs have a limited length, and charts must stay readable


def check_free(host: str, port: int) -> bool:
    """Check that a server can listen on `host` and `port`, and return whether `host` is a loopback address.

    Raises:
        UserError: The address is invalid, the port is in use, or the user is not allowed to listen on the port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "nowhere.invalid", port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except (OSError, UnicodeError) as error:
        sentences: dict[int | None, str] = {
            errno.EADDRINUSE: f"port {port} is already in use on this machine; try `--port {port % 65535 + 1}`.",
            errno.EACCES: f"you are not allowed to listen on port {port}; try `--port 5000`.",
        }
        rule = "`--host` must be an address or a name of this machine, such as 127.0.0.1 or 0.0.0.0"
        number = getattr(error, "errno", None)
        raise UserError(sentences.get(number, f"{rule}, but it is `{host}`.")) from None
    return ipaddress.ip_address(address[0]).is_loopback


def server_command(root: Path, port: int, host: str = LOOPBACK) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts MLflow's server for a results folder, and the server's environment variables.

    The environment variables switch off job execution, telemetry, and messages below warnings. MLflow rejects requests
    from the pages of other sites, and requests to host names that are not allowed. By default, only loopback names are
    allowed. If `host` is not a loopback name, the command therefore allows all names of this machine.
    """
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", tracking_uri(root)]
    command += ["--default-artifact-root", (root / "artifacts").as_uri(), "--host", host, "--port", str(port)]
    command += ["--workers", "1", "--uvicorn-opts", "--log-level warning"]
    if host not in (LOOPBACK, "localhost", "::1"):
        names = _names(host)
        command += ["--allowed-hosts", ",".join(one for name in names for one in (f"{name}:{port}", name))]
        command += ["--cors-allowed-origins", ",".join(f"http://{name}:{port}" for name in names)]
    quiet = {"MLFLOW_LOGGING_LEVEL": "WARNING", "PYTHONWARNINGS": "ignore"}
    return command, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", **quiet}


def answers(server: subprocess.Popen[bytes], host: str, port: int) -> bool:
    """Wait until a new server accepts connections. Return False if its process ends first."""
    while server.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection((LOOPBACK if host in ANYWHERE else host, port), timeout=1).close()
            return True
        time.sleep(0.1)
    return False


def page_url(host: str, port: int) -> str:
    """Return the URL of MLflow's page. If `host` is a wildcard such as 0.0.0.0, the URL contains the machine's name."""
    return f"http://{_bracketed(socket.gethostname() if host in ANYWHERE else host)}:{port}"


def _names(host: str) -> list[str]:
    """Return all names and addresses of this machine, and `host` if it is not a wildcard such as 0.0.0.0."""
    own = socket.gethostname()
    names = ["localhost", LOOPBACK, "::1", own, socket.getfqdn(), *([] if host in ANYWHERE else [host])]
    with contextlib.suppress(OSError):  # the name does not resolve
        names += [str(address[4][0]) for address in socket.getaddrinfo(own, None)]
    for addresses in psutil.net_if_addrs().values():
        names += [one.address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
    return list(dict.fromkeys(_bracketed(name.partition("%")[0]) for name in names))


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def page_links(
    store: Store, url: str, destination: Destination | None = None, sweep: SweepStore | None = None
) -> dict[str, str]:
    """Return the URLs of MLflow's pages for a sweep, keyed by label. If `sweep` is None, the newest sweep is used.

    The URLs lead to the saved view by arm, the sweep's parent run, the table of all runs, the saved view with a curve
    for each trial, and a comparison of the trials. If a view does not exist, for example because an older version of
    fedsweep ran the sweep, it is saved first. If saving fails, the URLs of the view by arm and of the parent run are
    left out, and MLflow's page chooses the trials whose curves it shows.
    """
    sweeps = [sweep] if sweep is not None else store.sweeps()[-1:]
    if not sweeps:
        return {}
    manifest = sweeps[0].manifest()
    client = (destination or Destination.of(store.root)).client()
    experiment = client.get_experiment_by_name(manifest.name)
    if experiment is None:
        return {}
    number = experiment.experiment_id
    parent = find_run(client, number, sweep_tags(manifest.id))
    below = tag_filter({PARENT: parent} if parent else {"fedsweep.kind": "trial"})
    ids = ",".join(f'"{run.info.run_id}"' for run in client.search_runs([number], below, max_results=SIDE_BY_SIDE))
    runs = f"{url}/#/experiments/{number}/runs"
    charts = f"{runs}?{TRAINING}&compareRunsMode=CHART"
    metric = urllib.parse.quote(f"metrics.`{manifest.metric}`", safe="")  # without sorting, trials are hidden
    compared = urllib.parse.quote(f'?runs=[{ids}]&experiments=["{number}"]&{TRAINING}', safe="?=&")
    links = {
        "sweeps and their trials": f"{runs}?{TRAINING}",
        "curves": f"{charts}&orderByKey={metric}&orderByAsc={str(manifest.mode == 'min').lower()}",
        "trials side by side": f"{url}/#/compare-runs{compared}",
    }
    if parent is None:
        return links
    if not save_views(client, number, manifest, parent, {}, experiment.tags):
        return links
    by_arm = f"{charts}&viewStateShareKey={manifest.id}"
    links["curves"] = by_arm + BY_TRIAL
    return {"the sweep by arm": by_arm, "the sweep's results": f"{runs}/{parent}?{TRAINING}", **links}
