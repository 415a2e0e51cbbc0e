"""The saved view of a sweep; test_ui.py checks that MLflow's page can read it."""

import base64
import json
import zlib
from typing import Any

import pytest

from fedsweep.results import SweepManifest
from fedsweep.results.pareto import Against
from fedsweep.tracking.ui import encoded, sweep_view, ungrouped
from tests.tracking.helpers import MANIFEST

EXTENT = {"accuracy/mean": (0.5, 0.7), "accuracy/domain/plain": (0.1, 0.2), "loss/test": (1.0, 1.0)}


def charts(manifest: SweepManifest, extent: Any = EXTENT) -> dict[str, list[dict[str, Any]]]:
    """Return the charts of the saved view of a sweep, keyed by type."""
    found: dict[str, list[dict[str, Any]]] = {}
    for chart in sweep_view(manifest, "p1", extent)["compareRunCharts"]:
        found.setdefault(chart["type"], []).append(chart)
    return found


def test_a_view_groups_the_trials_of_one_sweep_by_arm() -> None:
    view = sweep_view(MANIFEST, "p1", EXTENT)
    assert view["searchFilter"] == "tags.`mlflow.parentRunId` = 'p1'"
    assert view["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": "arm"}]
    assert (view["orderByKey"], view["orderByAsc"]) == ("metrics.`accuracy/mean`", False)
    assert sweep_view(MANIFEST.model_copy(update={"mode": "min"}), "p1", {})["orderByAsc"] is True


def test_a_second_view_has_the_same_charts_of_all_trials_without_groups() -> None:
    by_arm = sweep_view(MANIFEST, "p1", EXTENT)
    by_trial = ungrouped(by_arm)
    assert (by_trial["groupBy"], by_trial["useGroupedValuesInCharts"]) == (None, False)
    assert by_trial["runsHiddenMode"] == "SHOW_ALL"
    assert by_trial["compareRunCharts"] == by_arm["compareRunCharts"]
    assert by_arm["groupBy"] is not None


def axes(manifest: SweepManifest) -> list[tuple[str, str]]:
    """Return the metrics on the two axes of each scatter plot of the saved view of a sweep."""
    return [(one["xaxis"]["key"], one["yaxis"]["key"]) for one in charts(manifest)["SCATTER"]]


def test_the_objective_has_a_line_chart_and_two_scatter_plots_but_no_bars_which_begin_at_zero() -> None:
    found = charts(MANIFEST)
    assert set(found) == {"LINE", "SCATTER"}
    assert found["LINE"][0]["metricKey"] == "accuracy/mean"
    assert axes(MANIFEST) == [("megabytes/sent", "accuracy/mean"), ("accuracy/worst_domain", "accuracy/mean")]


@pytest.mark.parametrize("objective", ["accuracy/worst_domain", "accuracy/mean", "loss/test", "accuracy/clients/mean"])
@pytest.mark.parametrize("against", [None, "accuracy/worst_domain", "accuracy/mean", "loss/test", "bytes/up"])
def test_no_two_scatter_plots_are_equal_and_none_shows_one_metric_twice(objective: str, against: str | None) -> None:
    second = None if against in (None, objective) else Against(metric=against)
    found = axes(MANIFEST.model_copy(update={"metric": objective, "against": second}))
    assert len(found) == len(set(found)) == 2
    assert all(across != up == objective for across, up in found)


def test_parallel_coordinates_show_several_hyperparameters_but_no_names_of_arms() -> None:
    (parallel,) = charts(MANIFEST.model_copy(update={"varied": ("lora.rank", "optimizer.lr", "without")}))["PARALLEL"]
    assert parallel["selectedParams"] == ["lora.rank", "optimizer.lr"]
    assert "PARALLEL" not in charts(MANIFEST.model_copy(update={"varied": ("arm", "lora.rank")}))


@pytest.mark.parametrize(("metric", "across"), [("loss/test", "loss/test"), ("bytes/up", "megabytes/sent")])
def test_a_second_objective_is_the_horizontal_axis_of_the_scatter_plot(metric: str, across: str) -> None:
    found = charts(MANIFEST.model_copy(update={"against": Against(metric=metric)}))
    assert found["SCATTER"][0]["xaxis"]["key"] == across
    lines = [one["metricKey"] for one in found["LINE"]]
    assert len(lines) == len(set(lines))


def test_an_axis_spans_all_values_or_is_left_to_the_page() -> None:
    by_metric = {one["metricKey"]: one["range"] for one in charts(MANIFEST)["LINE"]}
    assert by_metric["accuracy/mean"]["yMin"] < 0.5 < 0.7 < by_metric["accuracy/mean"]["yMax"]
    assert by_metric["loss/test"] == by_metric["loss/train"] == {}


def test_sections_of_other_metrics_are_collapsed() -> None:
    first, *rest = sweep_view(MANIFEST, "p1", {**EXTENT, "system/cpu_utilization_percentage": (0, 1)})[
        "compareRunSections"
    ]
    assert (first["name"], first["display"]) == ("sweep", True)
    assert {one["name"] for one in rest} == {
        "System metrics", "accuracy", "accuracy/domain", "loss", "megabytes", "seconds",
    }  # fmt: skip
    assert not any(one["display"] for one in rest)


def test_the_tag_of_the_largest_sweep_is_compressed_json_that_mlflow_accepts() -> None:
    largest = MANIFEST.model_copy(update={"varied": tuple(f"method.hyperparameter_{one}" for one in range(40))})
    view = sweep_view(largest, "p" * 32, {f"section {one}/metric": (0.0, 1.0) for one in range(200)})
    value = encoded(view)
    assert json.loads(zlib.decompress(base64.b64decode(value.removeprefix("deflate;")))) == view
    assert len(value) < 20_000
