"""The content of MLflow's page besides curves, such as tags for grouping, data sets, notes and the saved view."""

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsweep.results import Store, SweepManifest, TrialPlan
from fedsweep.results.arms import Arm
from fedsweep.tracking import Destination
from fedsweep.tracking import ui as view
from fedsweep.tracking.parent_and_child_runs import Runs
from fedsweep.tracking.ui import page_links
from tests.fixtures import NewStore
from tests.tracking.helpers import MANIFEST, PLAN, finished, sweep_folder, trial

PLANS = [
    PLAN.model_copy(update={"key": f"k{rank}-{seed}", "arm": {"lora.rank": rank}, "seed": seed, "number": number})
    for number, (rank, seed) in enumerate([(4, 0), (4, 1), (8, 0), (8, 1)])
]
SWEEP = MANIFEST.model_copy(update={"baseline": {"lora.rank": 8}, "seeds": (0, 1), "scheduler": "arms"})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, new_store: NewStore) -> Store:
    return new_store(tmp_path_factory.mktemp("store"))


def opened(store: Store, experiment: str, folder: Path, manifest: SweepManifest = SWEEP) -> Runs:
    """Return the runs of an MLflow experiment with an open sweep, whose search space file begins with a question."""
    runs = Runs(Destination.of(store.root), experiment)
    (sweep_folder(folder) / "search_space.yaml").write_text("# Does it matter?\n#\n# More.\nseeds: [0, 1]\n")
    runs.open_sweep(manifest, folder)
    return runs


@pytest.fixture
def runs(root: Store, request: pytest.FixtureRequest, tmp_path: Path) -> Runs:
    return opened(root, request.node.name, tmp_path / "sweep")


def parent(runs: Runs) -> Any:
    assert runs.parent is not None
    return runs.client.get_run(runs.parent)


def children(runs: Runs) -> Sequence[Any]:
    return list(runs.client.search_runs([runs.experiment.id], "tags.`fedsweep.kind` = 'trial'"))


def datasets(run: Any) -> set[tuple[str, str, str]]:
    """Return the name, digest and context of each data set of a run."""
    return {(one.dataset.name, one.dataset.digest, one.tags[0].value) for one in run.inputs.dataset_inputs}


def shown(runs: Runs) -> dict[str, Any]:
    """Return the decoded saved view of the sweep."""
    value = runs.client.get_experiment(runs.experiment.id).tags[view.TAG + SWEEP.id]
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(value.removeprefix("deflate;"))))
    return found


def test_each_varied_hyperparameter_is_a_tag_under_its_short_name(runs: Runs) -> None:
    for plan in PLANS:
        runs.sync(trial(1, plan=plan))
    tags = {run.data.tags["fedsweep.key"]: run.data.tags for run in children(runs)}
    assert [(tags[plan.key]["rank"], tags[plan.key]["arm"], tags[plan.key]["fedsweep.seed"]) for plan in PLANS] == [
        ("4", "rank 4", "0"), ("4", "rank 4", "1"), ("8", "rank 8", "0"), ("8", "rank 8", "1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arm", "varied", "expected"),
    [
        ({"optimizer.lr": 0.0123456789}, ("optimizer.lr",), {"lr": "0.0123457", "arm": "lr 0.01235"}),
        ({"optimizer.lr": 1, "server.lr": 2}, (), {"optimizer.lr": "1", "server.lr": "2", "arm": "lr 1 · lr 2"}),
        ({"optimizer.lr": 1}, ("server.lr",), {"optimizer.lr": "1", "arm": "lr 1"}),
        ({"optimizer.lr": 1}, ("method.server.lr",), {"optimizer.lr": "1", "arm": "lr 1"}),
        (
            {"optimizer.lr": 1, "method.server.lr": 2}, (),
            {"optimizer.lr": "1", "server.lr": "2", "arm": "lr 1 · lr 2"},
        ),
        ({"without": ["method.cross"]}, (), {"without": "without cross", "arm": "without cross"}),
        ({"arm": "FedProx, tuned"}, (), {"arm": "FedProx, tuned"}),
        (
            {"method": {"name": "all_small", "depth": 3}}, (),
            {"method": "all_small (depth 3)", "arm": "method all_small (depth 3)"},
        ),
        ({}, (), {}),
    ],
)  # fmt: skip
def test_runs_have_tags_for_grouping(runs: Runs, arm: Arm, varied: tuple[str, ...], expected: dict[str, str]) -> None:
    runs.sweep = SWEEP.model_copy(update={"varied": varied})
    plan = PLAN.model_copy(update={"arm": arm})
    runs.sync(trial(1, plan=plan))
    tags = children(runs)[0].data.tags
    assert {name: tags[name] for name in tags if not name.startswith(("fedsweep.", "mlflow."))} == expected


def test_tags_of_a_parent_describe_its_sweep(runs: Runs) -> None:
    expected = {
        "kind": "sweep", "objective": "accuracy/mean max", "baseline": "lora.rank=8", "scheduler": "arms",
        "search": "grid", "experiment": "fedra_digits", "seeds": "0, 1", "varied": "lora.rank",
    }  # fmt: skip
    assert {f"fedsweep.{name}": value for name, value in expected.items()}.items() <= parent(runs).data.tags.items()


def test_the_sources_of_synthetic_images_are_a_tag_of_the_parent(runs: Runs) -> None:
    for plan, marks in zip(PLANS, ({}, {"synthetic": "surrogate"}, {"synthetic": "folder"}, {}), strict=True):
        runs.sync(finished(3, plan.model_copy(update={"marks": {**marks, "taken_from": "s0"}})))
    runs.close_sweep("FINISHED", {})
    tags = parent(runs).data.tags
    assert tags["fedsweep.synthetic"] == "folder, surrogate"
    assert "fedsweep.taken_from" not in tags


def test_datasets_are_inputs_once_however_often_they_are_synced(runs: Runs, root: Store, tmp_path: Path) -> None:
    expected: set[tuple[str, str, str]] = set()
    for again in (False, True):
        session = opened(root, runs.experiment.name, tmp_path / "again") if again else runs
        for plan in PLANS:
            session.sync(finished(3, plan))
        session.close_sweep("FINISHED", {})
        found = [datasets(run) for run in children(session)]
        assert [len(one) for one in found] == [2, 2, 2, 2]
        expected = set.union(*found)
        assert len(parent(session).inputs.dataset_inputs) == len(expected) == 3  # test images, and two training sets
        assert datasets(parent(session)) == expected
    assert {context for _, _, context in expected} == {"train", "eval"}
    (one, *_) = runs.client.search_runs([runs.experiment.id], "dataset.name = 'digits' and dataset.context = 'eval'")
    assert one is not None


def test_the_note_has_the_table_once_a_report_exists(runs: Runs, tmp_path: Path) -> None:
    experiment = runs.client.get_experiment(runs.experiment.id)
    assert experiment.tags["mlflow.note.content"] == "Does it matter?"
    assert "There is no report yet." in parent(runs).data.tags["mlflow.note.content"]
    report = tmp_path / "report"
    (report / "figures").mkdir(parents=True)
    (report / "table.md").write_text("# tiny\n\n| a | table |\n")
    (report / "figures" / "curves.svg").write_text("<svg/>")
    runs.close_sweep("FINISHED", {}, report)
    note = parent(runs).data.tags["mlflow.note.content"]
    assert "Does it matter?\n\n| a | table |" in note
    assert "fedsweep tune tiny --resume --sweep s1" in note
    assert [one.path for one in runs.client.list_artifacts(runs.parent, "report/figures")] == [
        "report/figures/curves.svg"
    ]


def test_a_sweep_without_its_search_space_file_has_no_question(runs: Runs, root: Store, tmp_path: Path) -> None:
    (tmp_path / "sweep" / "search_space.yaml").unlink()
    again = Runs(Destination.of(root.root), runs.experiment.name)
    again.open_sweep(SWEEP, tmp_path / "sweep")
    again.close_sweep("FINISHED", {})
    assert parent(again).data.tags["mlflow.note.content"].startswith("There is no report yet.")


def test_the_view_exists_from_the_start_and_gets_the_range_of_values_at_the_end(runs: Runs) -> None:
    first = shown(runs)
    assert first["searchFilter"] == f"tags.`mlflow.parentRunId` = '{runs.parent}'"
    assert first["compareRunCharts"][0]["range"] == {}
    runs.sync(finished(3, PLANS[0]))
    runs.close_sweep("FINISHED", {})
    held = shown(runs)["compareRunCharts"][0]["range"]
    assert held["yMin"] < 0 < 3 / 7 < held["yMax"]


def test_a_failure_to_save_the_view_is_no_error(
    root: Store, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(view, "sweep_view", refuse)
    runs = opened(root, request.node.name, tmp_path)
    runs.sync(finished(3, PLANS[0]))
    runs.close_sweep("FINISHED", {})
    assert parent(runs).info.status == "FINISHED"
    assert not any(name.startswith(view.TAG) for name in runs.client.get_experiment(runs.experiment.id).tags)


def test_a_rebuilt_database_has_the_same_content(tmp_path: Path, new_store: NewStore) -> None:
    def content(store: Store) -> list[Any]:
        runs = opened(store, "same", tmp_path / "sweep")
        for plan in PLANS[:2]:
            runs.sync(finished(3, plan))
        runs.close_sweep("FINISHED", {"trials/finished": 2.0})
        found = sorted([parent(runs), *children(runs)], key=lambda one: str(one.info.run_name))
        tags = [{**run.data.tags, "mlflow.parentRunId": "of this database"} for run in found]
        return [tags, [(run.data.params, run.data.metrics, datasets(run)) for run in found]]

    one, other = (content(new_store(tmp_path / name)) for name in ("one", "other"))
    assert len(one[0]) == 3
    assert one == other


def test_system_metrics_are_recorded_by_round(runs: Runs) -> None:
    measured = trial(3, plan=PLANS[0])
    history = [replace(one, system={"system/cpu_utilization_percentage": 10.0 * one.round}) for one in measured.history]
    runs.sync(replace(measured, history=history))
    (run,) = children(runs)
    written = runs.client.get_metric_history(run.info.run_id, "system/cpu_utilization_percentage")
    assert sorted((one.step, one.value) for one in written) == [(0, 0.0), (1, 10.0), (2, 20.0)]


def stored(store: Store, plans: Sequence[TrialPlan], manifest: SweepManifest) -> None:
    sweep = store.sweep(manifest.name, manifest.id)
    runs = opened(store, manifest.name, sweep.folder, manifest)
    sweep.create(manifest, {"search_space.yaml": "", "experiment.yaml": ""})
    for plan in plans:
        runs.sync(finished(3, plan))
    runs.close_sweep("FINISHED", {})


def test_the_first_address_is_the_view_of_the_newest_or_the_requested_sweep(
    tmp_path: Path, new_store: NewStore
) -> None:
    store = new_store(tmp_path)
    for number in (1, 2):
        created = f"2026-01-0{number}T00:00:00+00:00"
        stored(store, PLANS[:1], SWEEP.model_copy(update={"id": f"s{number}", "created": created}))
    links = page_links(store, "http://127.0.0.1:5000")
    first = next(iter(links.values()))
    assert first.endswith("viewStateShareKey=s2")
    assert "workflowType=machine_learning" in first
    assert not any(name in first for name in ("orderByKey", "searchFilter"))  # with one, the page ignores the view
    asked = page_links(store, "http://127.0.0.1:5000", sweep=store.find("tiny", "s1"))
    assert next(iter(asked.values())).endswith("viewStateShareKey=s1")
    assert set(asked) == set(links)
    assert asked["curves"].endswith("viewStateShareKey=s1.trials")
    assert not set(asked.values()) & set(links.values()) - {links["sweeps and their trials"]}


def test_a_missing_view_is_saved_if_possible(
    tmp_path: Path, new_store: NewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tmp_path)
    stored(store, PLANS[:1], SWEEP)
    client = Destination.of(store.root).client()
    number = client.get_experiment_by_name("tiny").experiment_id
    keys = [view.TAG + SWEEP.id, view.TAG + SWEEP.id + view.BY_TRIAL]
    before = {key: client.get_experiment(number).tags[key] for key in keys}
    for missing, kept in (keys, keys[::-1]):
        client.delete_experiment_tag(number, missing)
        with monkeypatch.context() as patch:
            patch.setattr(view, "encoded", lambda _: 1 / 0)
            links = page_links(store, "http://127.0.0.1:5000")
            assert "the sweep by arm" not in links
            assert "viewStateShareKey" not in links["curves"]
        assert "the sweep by arm" in page_links(store, "http://127.0.0.1:5000")
        tags = client.get_experiment(number).tags
        assert missing in tags
        assert tags[kept] == before[kept], "a view with the range of values must not be replaced by one without"
        client.set_experiment_tag(number, missing, before[missing])
