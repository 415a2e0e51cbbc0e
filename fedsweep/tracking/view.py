"""A saved view of MLflow's page for one sweep: its curves, bars and scatter, grouped by arm.

MLflow's own Share button keeps such a view as a tag of the experiment, under a key that an address can name. The form
of its content is documented nowhere; here it is that of MLflow 3.17, and a test in a browser holds it. A page that does
not know it opens as usual.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

from fedsweep.common.yaml_values import Json
from fedsweep.results import SweepManifest
from fedsweep.results.arms import IN_WORDS
from fedsweep.results.history import ACCUMULATED
from fedsweep.tracking.picture import ARM

TAG = "mlflow.sharedViewState."
"""The experiment's tag of a view, but for its key."""
BEYOND = ("accuracy/mean_of_last_4", "megabytes/sent", "seconds/round")
"""Metrics of a trial that are none of its rounds' records."""
BY_ROUND = ("accuracy/worst_domain", "loss/test", "loss/train")
COST = "megabytes/sent"


def encoded(view: Json) -> str:
    """The tag's value, as MLflow's page reads it."""
    content = json.dumps(view, separators=(",", ":"), ensure_ascii=False).encode()
    return "deflate;" + base64.b64encode(zlib.compress(content, 9)).decode()


def sweep_view(manifest: SweepManifest, parent: str, extent: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Charts over the trials below a parent run, grouped by arm, with the mean over seeds and their range.

    Args:
        manifest: of the sweep.
        parent: the run's id.
        extent: the least and the largest value of each metric so far; without it curves are drawn from zero.
    """
    return {
        "searchFilter": f"tags.`mlflow.parentRunId` = '{parent}'",
        # Ordered by a metric the page shows trials alone; otherwise it folds them below their parent.
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
        "compareRunCharts": _charts(manifest, extent),
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        "selectedColumns": [
            "attributes.`Dataset`",
            *(f"params.`{name}`" for name in _parameters(manifest)),
            f"metrics.`{manifest.metric}`",
            "tags.`fedsweep.outcome`",
        ],
    }


def _parameters(manifest: SweepManifest) -> list[str]:
    return [name for name in manifest.varied if name not in IN_WORDS]


def _folded(extent: Mapping[str, tuple[float, float]]) -> list[str]:
    """Sections that the page makes of all metrics by the first parts of their names; they stay closed below ours."""
    first = {name.rpartition("/")[0] or "Model metrics" for name in (*extent, *BEYOND)}
    return sorted({"System metrics" if name == "system" else name for name in first})


def _charts(manifest: SweepManifest, extent: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
    objective, against = manifest.metric, manifest.against.metric if manifest.against else COST
    other = COST if against in ACCUMULATED else against  # the page knows the last round's value only
    by_round = dict.fromkeys([objective, *([other] if other != COST else []), *BY_ROUND])
    parameters = _parameters(manifest)
    charts = [
        _chart("LINE", f"curve {one}", metricKey=one, selectedMetricKeys=[one], range=_range(extent.get(one)), **LINE)
        for one in by_round
    ]
    charts.insert(1, _chart("BAR", "bars", metricKey=objective))
    axes = {"xaxis": {"key": other, "type": "METRIC"}, "yaxis": {"key": objective, "type": "METRIC"}}
    charts.insert(2, _chart("SCATTER", "scatter", **axes))
    if len(parameters) > 1:
        parallel = {"selectedParams": parameters, "selectedMetrics": [objective], "showAllRuns": False}
        charts.insert(3, _chart("PARALLEL", "parallel", **parallel))
    return charts


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
    """Of the vertical axis, with a margin."""
    if extent is None or extent[0] == extent[1]:
        return {}
    margin = 0.05 * (extent[1] - extent[0])
    return {"yMin": extent[0] - margin, "yMax": extent[1] + margin}


def _chart(kind: str, uuid: str, **rest: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "uuid": uuid,
        "runsCountToCompare": 100,
        "metricSectionId": "section sweep",
        "deleted": False,
        "isGenerated": False,
        **rest,
    }


def _section(name: str, opened: bool = False) -> dict[str, Any]:
    return {
        "uuid": f"section {name}",
        "name": name,
        "display": opened,
        "isReordered": True,
        "deleted": False,
        "isGenerated": not opened,
    }
