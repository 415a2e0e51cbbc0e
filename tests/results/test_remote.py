"""A remote results folder with two machines, simulated in the file system of this machine."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedsweep.common.errors import UserError
from fedsweep.common.paths import mirror_folder
from fedsweep.results import Outcome, Store, SweepStore, TrialPlan, TrialStore
from fedsweep.results.checkpoint import Checkpoint, load, save
from fedsweep.results.history import RoundRecord
from fedsweep.results.records import RIGHT
from fedsweep.results.remote import lease
from fedsweep.results.remote import objects as object_store
from fedsweep.results.remote.objects import UnreachableError, is_uri
from fedsweep.sweep.plan.reuse import Reuse
from fedsweep.sweep.pruning.trial_rules import Decision, Decisions
from fedsweep.sweep.running.open_sweep import clear_leftovers, exclusively
from fedsweep.types import ServerState
from tests.tracking.helpers import MANIFEST

ROUNDS = 2


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PAUSES", ())
    monkeypatch.setattr(lease, "SETTLES", 0.0)


class Machines:
    """The results folders of several simulated machines, which share only the remote objects."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.objects = folder, folder / "objects"
        self.objects.mkdir()

    def __getitem__(self, name: str) -> Store:
        return Store(self.folder / name, f"file://{self.objects}")

    def all(self) -> list[str]:
        return sorted(path.relative_to(self.objects).as_posix() for path in self.objects.rglob("*") if path.is_file())


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


def plan(key: str = "k", number: int = 0) -> TrialPlan:
    return TrialPlan(key=key, number=number, arm={"lora.rank": 4}, seed=0, config={})


def checkpoint(round: int) -> Checkpoint:
    import torch

    history = tuple(RoundRecord(one, {"accuracy/mean": 0.1 * one}, 0.5) for one in range(round + 1))
    return Checkpoint(round, ServerState({"w": torch.full((8, 8), float(round))}, (0,)), history)


def sweep_of(store: Store, sweep_id: str = "s1", **changes: Any) -> SweepStore:
    sweep = store.sweep(MANIFEST.name, sweep_id)
    manifest = MANIFEST.model_copy(update={"id": sweep_id, "processor": "cpu", **changes})
    sweep.create(manifest, {"experiment.yaml": "a: 1\n"})
    return sweep


def play(trial: TrialStore, round: int) -> None:
    """Save and send a checkpoint of the trial after `round` rounds, as a worker does on its machine."""
    assert trial.remote.place is not None
    from fedsweep.sweep.running.trainable import _trial_folder

    with _trial_folder(trial.remote.place, trial.folder.name, trial) as (mine, send):
        save(mine.checkpoint, checkpoint(round))
        send()


def test_another_machine_finds_the_sweep_and_its_rounds(machines: Machines) -> None:
    sweep = sweep_of(machines["one"])
    trial = sweep.trial("k")
    trial.plan(plan())
    play(trial, ROUNDS)
    assert trial.recorded() == []
    trial.remote.pull()
    assert trial.read().last_round == ROUNDS
    trial.end(Outcome(outcome="finished", round=ROUNDS))
    shutil.rmtree(machines.folder / "one")
    for name in ("one", "two"):
        found = machines[name].find(MANIFEST.name)
        assert [one.outcome and one.outcome.outcome for one in found.trials()] == ["finished"]
        assert [len(one.history) for one in found.trials()] == [ROUNDS + 1]
    with pytest.raises(UserError, match=f"there is no sweep of other in file://{machines.objects}"):
        machines["two"].find("other")


def test_a_damaged_manifest_that_is_restored_from_a_backup_in_the_remote_store_is_read(machines: Machines) -> None:
    sweep = sweep_of(machines["one"])
    remote = machines.objects / sweep.folder.relative_to(machines["one"].root) / "sweep.json"
    backup = remote.read_bytes()
    remote.write_bytes(b"damaged")
    with pytest.raises(UserError, match="restore it from a backup"):
        machines["two"].find(MANIFEST.name)
    remote.write_bytes(backup)
    assert machines["two"].find(MANIFEST.name).manifest() == sweep.manifest()


def test_only_columns_that_the_user_asked_for_are_recorded_as_options(machines: Machines) -> None:
    sweep = sweep_of(machines["one"], options={"seeds": [0, 1]})
    before = sweep.manifest()
    sweep.show(before.columns, asked=True)
    assert sweep.manifest() == before
    sweep.show(("seconds",), asked=False)  # columns from the YAML file
    assert (sweep.manifest().columns, sweep.manifest().options) == (("seconds",), {"seeds": [0, 1]})
    sweep.show(("megabytes",), asked=True)
    assert (sweep.manifest().columns, sweep.manifest().options["columns"]) == (("megabytes",), ["megabytes"])


def test_the_remote_store_contains_only_files_of_trials_and_sweeps(machines: Machines) -> None:
    store = machines["one"]
    sweep = sweep_of(store)
    (store.root / "mlflow.db").write_text("a view")
    with exclusively(sweep):
        (sweep.folder / "ray").mkdir()
        (sweep.folder / "ray" / "state").write_text("scratch")
        assert {".lease"} == {Path(one).name for one in machines.all()} - {"sweep.json", "experiment.yaml"}
        sweep.remote.push()
    folder = f"sweeps/{MANIFEST.name}/s1"
    assert machines.all() == [f"{folder}/experiment.yaml", f"{folder}/sweep.json"]


def test_a_session_begins_with_the_remote_files_and_not_with_local_leftovers(machines: Machines) -> None:
    sweep = sweep_of(machines["one"])
    stale = sweep.trial("k")
    stale.plan(plan())
    outcome = Outcome(outcome="failed", round=0)
    (stale.folder / "outcome.json").write_text(outcome.model_dump_json())  # its process was killed before it was sent
    with exclusively(machines["two"].find(MANIFEST.name)):
        pass
    again = machines["one"].find(MANIFEST.name)
    with exclusively(again):
        assert again.trial("k").outcome() is None
        clear_leftovers(again, ROUNDS, retry=True)


def test_failed_trials_are_also_reopened_in_the_remote_store(machines: Machines) -> None:
    sweep = sweep_of(machines["one"])
    for key in ("whole", "failed"):
        sweep.trial(key).plan(plan(key))
    play(sweep.trial("whole"), ROUNDS)
    sweep.trial("failed").end(Outcome(outcome="failed", round=0, error="x"))
    again = machines["two"].find(MANIFEST.name)
    with exclusively(again):
        clear_leftovers(again, ROUNDS, retry=True)
    ended = [one for one in machines.all() if one.endswith("outcome.json")]
    assert ended == [f"sweeps/{MANIFEST.name}/s1/trials/whole/outcome.json"]


def test_a_second_driver_is_rejected_on_this_machine_and_on_others(machines: Machines) -> None:
    with exclusively(sweep_of(machines["one"])):
        for name in ("one", "two"):
            other = machines[name].find(MANIFEST.name)
            with pytest.raises(UserError, match=r"^sweep s1 is being run by"), exclusively(other):
                pass
            assert other.remote.is_taken()
    assert not machines["two"].find(MANIFEST.name).remote.is_taken()


def test_a_trial_that_continues_another_trial_has_all_its_tensors(machines: Machines) -> None:
    sweep = sweep_of(machines["one"])
    sweep.trial("parent").plan(plan("parent"))
    play(sweep.trial("parent"), ROUNDS)
    sweep.trial("parent").remote.pull()
    child = sweep.trial("child")
    child.begin_from(sweep.trial("parent"), ROUNDS)
    child.plan(plan("child"))
    arrived = machines.objects / "sweeps" / MANIFEST.name / "s1" / "trials" / "child" / "checkpoint.safetensors"
    assert load(arrived, ServerState({}, (0,))).state.adapter["w"].tolist() == [[float(ROUNDS)] * 8] * 8
    play(child, ROUNDS + 1)
    child.remote.pull()
    child.remote.push()
    assert len(child.recorded()) == ROUNDS + 2
    assert load(arrived, ServerState({}, (0,))).round == ROUNDS + 1


def test_trials_of_an_earlier_remote_sweep_are_reused(machines: Machines) -> None:
    old = sweep_of(machines["one"], "s1")
    old.trial("k").plan(plan())
    play(old.trial("k"), ROUNDS)
    (old.trial("k").folder / RIGHT).write_text("{}")
    old.trial("k").end(Outcome(outcome="finished", round=ROUNDS))
    store = machines["two"]
    new = sweep_of(store, "s2")
    reuse = Reuse(store, new)
    fetched = {path.name for path in (store.root / "sweeps").glob("**/s1/**/*") if path.is_file()}
    assert fetched == {"sweep.json"}, "the files of trials that are not reused must not be downloaded"
    reuse.give(plan())
    objects = machines.objects / "sweeps" / MANIFEST.name
    for name in ("checkpoint.safetensors", RIGHT, "outcome.json"):
        assert (objects / "s2/trials/k" / name).read_bytes() == (objects / "s1/trials/k" / name).read_bytes()
    assert new.trial("k").read().outcome is not None


def test_decisions_are_sent_before_they_take_effect(machines: Machines) -> None:
    sweep = sweep_of(machines["one"])
    Decisions(sweep.folder / "decisions.jsonl", sweep.remote).add(Decision("k", 1, 0.5, stop=True))
    found = machines["two"].find(MANIFEST.name)
    assert ("k", 1) in Decisions(found.folder / "decisions.jsonl").made


def test_runs_outside_of_sweeps_are_also_sent(machines: Machines) -> None:
    run = machines["one"].run("fedra_digits", "stamp")
    run.plan(plan("stamp"))
    for round in (0, 1):
        save(run.checkpoint, checkpoint(round))
        run.remote.push()
    run.end(Outcome(outcome="finished", round=1))
    (found,) = machines["two"].runs()
    assert len(found.read().history) == 2


def test_a_worker_that_cannot_send_counts_as_lost(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the worker reaches Ray, which repeats the trial, and everything that was sent is kept."""
    from fedsweep.sweep.running import trainable

    trial = sweep_of(machines["one"]).trial("k")
    trial.plan(plan())
    play(trial, 1)
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(trainable.tune, "report", told.append)

    def rounds(store: TrialStore, *_: object) -> Any:
        yield from store.history()
        save(store.checkpoint, checkpoint(2))
        shutil.move(machines.objects, machines.folder / "away")
        (machines.objects).write_text("no folder")
        yield store.history()[-1]

    monkeypatch.setattr(trainable, "_rounds", rounds)
    with pytest.raises(UnreachableError):
        trainable.train(
            {"trial": "k", "until": 2, "gpus": 0},
            sweep=str(trial.folder.parent.parent),
            threads=1,
            device="cpu",
            environment={},
            remote=trial.remote.place,
        )
    assert [one["round"] for one in told] == [0, 1]
    machines.objects.unlink()
    shutil.move(machines.folder / "away", machines.objects)
    trial.remote.pull()
    assert trial.read().last_round == 1


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("foo://x/y", "but `foo://x/y` is not: "),
        ("s3:///x", "but `s3:///x` is not: Missing bucket name in S3 URI"),
        ("mock://x/y", "must name a bucket, such as s3://BUCKET/RUNS, but it is `mock://x/y`."),
        ("s3://key:cret@bucket/x", "must not contain credentials, but `s3://***@bucket/x` does; "),
        ("s3://bucket/x?secret_key=cret", "must not contain credentials, but `s3://bucket/x` does; "),
        ("abfs://c:cret@host/x", "must not contain credentials, but `abfs://***@host/x` does; "),
        ("http://[::x/y", "is not a valid URI: "),
    ],
)
def test_invalid_stores_are_rejected_without_showing_secrets(address: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        Store.at(address)
    assert str(refused.value).startswith("`--store` ")
    assert sentence in str(refused.value)
    assert "cret@" not in str(refused.value)
    assert "=cret" not in str(refused.value)


def test_a_file_uri_is_opened_as_a_folder(tmp_path: Path) -> None:
    store = Store.at(f"file://{tmp_path}/mlruns")
    assert (store.root, store.uri) == (tmp_path / "mlruns", None)
    assert Store.at("mlruns").uri is None
    assert not is_uri("C:/mlruns")


def test_mirrors_are_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path / "given"))
    assert mirror_folder("s3://b/x").parent == tmp_path / "given" / "stores"
    monkeypatch.delenv("FEDSWEEP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert mirror_folder("s3://b/x").parent == tmp_path / "xdg" / "fedsweep" / "stores"
    assert mirror_folder("s3://b/x") != mirror_folder("s3://b/y")


def test_a_trial_of_another_machine_is_downloaded_with_its_tensors(machines: Machines) -> None:
    from fedsweep.export.which_trial import find_trial

    sweep = sweep_of(machines["one"])
    for number, key in enumerate(("k1", "k2")):
        trial = sweep.trial(key)
        trial.plan(plan(key, number))
        play(trial, ROUNDS)
        trial.end(Outcome(outcome="finished", round=ROUNDS))
    run = machines["one"].run("alone", "s")
    run.plan(plan("s"))
    save(run.checkpoint, checkpoint(1))
    run.end(Outcome(outcome="finished", round=1))
    run.remote.push(needed=True)
    for name, round in (("k2", ROUNDS), (MANIFEST.name, ROUNDS), ("alone", 1)):
        found = find_trial(machines[f"other {name}"], name)
        read = load(found.trial.checkpoint, ServerState({}, ()))
        assert (read.round, read.state.adapter["w"][0, 0].item()) == (round, round)
