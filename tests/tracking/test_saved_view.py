"""The saved view of a sweep; whether MLflow's page understands it is for test_ui.py."""

import base64
import json
import zlib
from typing import Any

import pytest

from fedsweep.results import SweepManifest
from fedsweep.results.pareto import Against
from fedsweep.tracking.ui import encoded, sweep_view
from tests.tracking.helpers import MANIFEST

EXTENT = {"accuracy/mean": (0.5, 0.7), "accuracy/domain/plain": (0.1, 0.2), "loss/test": (1.0, 1.0)}


def charts(manifest: SweepManifest, extent: Any = EXTENT) -> dict[str, list[dict[str, Any]]]:
    """By their kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    for chart in sweep_view(manifest, "p1", extent)["compareRunCharts"]:
        found.setdefault(chart["type"], []).append(chart)
    return found


def test_a_view_is_of_the_trials_of_one_sweep_by_arm() -> None:
    view = sweep_view(MANIFEST, "p1", EXTENT)
    assert view["searchFilter"] == "tags.`mlflow.parentRunId` = 'p1'"
    assert view["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": "arm"}]
    assert (view["orderByKey"], view["orderByAsc"]) == ("metrics.`accuracy/mean`", False)
    assert sweep_view(MANIFEST.model_copy(update={"mode": "min"}), "p1", {})["orderByAsc"] is True


def test_the_objective_is_drawn_by_round_at_the_end_and_against_what_was_sent() -> None:
    found = charts(MANIFEST)
    assert found["LINE"][0]["metricKey"] == found["BAR"][0]["metricKey"] == "accuracy/mean"
    (scatter,) = found["SCATTER"]
    assert (scatter["xaxis"]["key"], scatter["yaxis"]["key"]) == ("megabytes/sent", "accuracy/mean")
    assert "PARALLEL" not in found


def test_several_hyperparameters_are_parallel_coordinates_and_words_are_none() -> None:
    (parallel,) = charts(MANIFEST.model_copy(update={"varied": ("lora.rank", "optimizer.lr", "without")}))["PARALLEL"]
    assert parallel["selectedParams"] == ["lora.rank", "optimizer.lr"]
    assert "PARALLEL" not in charts(MANIFEST.model_copy(update={"varied": ("arm", "lora.rank")}))


@pytest.mark.parametrize(("metric", "across"), [("loss/test", "loss/test"), ("bytes/up", "megabytes/sent")])
def test_a_second_objective_is_what_the_first_is_weighed_against(metric: str, across: str) -> None:
    found = charts(MANIFEST.model_copy(update={"against": Against(metric=metric)}))
    assert found["SCATTER"][0]["xaxis"]["key"] == across
    lines = [one["metricKey"] for one in found["LINE"]]
    assert len(lines) == len(set(lines))


def test_an_axis_holds_all_values_and_is_left_to_the_page_where_none_is_known() -> None:
    by_metric = {one["metricKey"]: one["range"] for one in charts(MANIFEST)["LINE"]}
    assert by_metric["accuracy/mean"]["yMin"] < 0.5 < 0.7 < by_metric["accuracy/mean"]["yMax"]
    assert by_metric["loss/test"] == by_metric["loss/train"] == {}


def test_all_other_metrics_are_folded_below() -> None:
    first, *rest = sweep_view(MANIFEST, "p1", {**EXTENT, "system/cpu_utilization_percentage": (0, 1)})[
        "compareRunSections"
    ]
    assert (first["name"], first["display"]) == ("sweep", True)
    assert {one["name"] for one in rest} == {
        "System metrics", "accuracy", "accuracy/domain", "loss", "megabytes", "seconds",
    }  # fmt: skip
    assert not any(one["display"] for one in rest)


def test_the_tag_is_deflated_json_that_mlflow_takes_for_the_largest_sweep() -> None:
    largest = MANIFEST.model_copy(update={"varied": tuple(f"method.hyperparameter_{one}" for one in range(40))})
    view = sweep_view(largest, "p" * 32, {f"section {one}/metric": (0.0, 1.0) for one in range(200)})
    value = encoded(view)
    assert json.loads(zlib.decompress(base64.b64decode(value.removeprefix("deflate;")))) == view
    assert len(value) < 20_000
