"""Damaged and foreign files in the results folder, and the error messages and warnings about them."""

import io
import json
import shutil
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as to_bytes

from fedsweep.common.errors import UserError
from fedsweep.export.which_trial import find_trial
from fedsweep.report.arm_statistics import ArmTrials, notes
from fedsweep.results import Outcome, OutcomeName, Start, Store, SweepStore, TrialPlan, count_outcomes
from fedsweep.results.checkpoint import Checkpoint, load, load_history, save, without_tensors
from fedsweep.results.folders import read_right
from fedsweep.results.history import RoundRecord, to_json
from fedsweep.results.records import RIGHT, Attempt, Attempts
from fedsweep.results.right_images import RightImages
from fedsweep.sweep.plan.reuse import Reuse
from fedsweep.sweep.running.open_sweep import clear_leftovers
from fedsweep.types import ServerState
from tests.tracking.helpers import MANIFEST

HISTORY = (RoundRecord(0, {"accuracy/mean": 0.1}, 0.5), RoundRecord(1, {"accuracy/mean": 0.2}, 0.5))
STATE = ServerState({"w": torch.ones(8, 8)}, (0,))
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "not JSON": lambda _: b"\x89PNG\r\n\x1a\n\xff\xfe",
    "wrong type": lambda _: b"[1, 2]",
    "nested too deeply": lambda _: b"[" * 100_000,
}
JSON_DAMAGE: dict[str, Callable[[bytes], bytes]] = DAMAGE | {
    "wrong types of entries": lambda content: json.dumps({name: {"a": 1} for name in json.loads(content)}).encode(),
    "newer version": lambda content: json.dumps({**json.loads(content), "colour": "red"}).encode(),
}


def sweep_of(root: Path, sweep_id: str, name: str = "tiny", keys: str = "ab", **changes: Any) -> SweepStore:
    """Write a sweep whose trials have ended after one round, and return it."""
    made = Store(root).sweep(name, sweep_id)
    created = f"2026-01-01T00:00:0{sweep_id[-1]}Z"
    made.create(MANIFEST.model_copy(update={"id": sweep_id, "name": name, "created": created, **changes}), {})
    for number, key in enumerate(keys):
        trial = made.trial(key)
        trial.plan(TrialPlan(key=key, number=number, arm={"lora.rank": 4}, seed=number, config={}))
        save(trial.checkpoint, Checkpoint(1, STATE, HISTORY))
        trial.keep_attempts(Attempts(attempts=(Attempt(gpus=0.5),)))
        trial.end(Outcome(outcome="finished", round=1))
    return made


def read_or_rejected(path: Path, read: Callable[[], Any]) -> Any:
    """Return what `read` returns, or None if it raises the error message about a damaged checkpoint."""
    try:
        return read()
    except UserError as error:
        sentence = str(error)
    assert sentence.startswith(f"{path} is damaged or an incomplete copy: ")
    return None


def spoil(path: Path, damage: Callable[[bytes], bytes]) -> None:
    path.write_bytes(damage(path.read_bytes()))


@pytest.mark.parametrize("damage", JSON_DAMAGE)
def test_a_damaged_manifest_stops_only_what_names_its_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    sound, broken = sweep_of(tmp_path, "s1"), sweep_of(tmp_path, "s2", "other/space")
    file = broken.folder / "sweep.json"
    spoil(file, JSON_DAMAGE[damage])
    store = Store(tmp_path)
    assert [one.folder for one in store.sweeps()] == [sound.folder]
    assert [store.find(*asked).folder for asked in (("tiny",), ("s1",), ("tiny@s1",), ("tiny", "s1"))] == [
        sound.folder
    ] * 4
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith(f"fedsweep: warning: a sweep of other/space is left out: {file}")
    for asked in (("other/space",), ("s2",), ("other/space@s2",), ("other/space", "s2")):
        with pytest.raises(UserError) as caught:
            store.find(*asked)
        assert str(caught.value).startswith(str(file))
        assert str(caught.value).endswith(f"or delete the sweep's folder {broken.folder}.")
        assert "\n" not in str(caught.value)
    for name in ("other/space:lora.rank=4", "s2", "other/space@s2"):
        with pytest.raises(UserError) as caught:
            find_trial(store, name)
        assert str(caught.value).startswith(str(file))


def test_a_manifest_of_a_newer_version_is_named_as_such(tmp_path: Path) -> None:
    broken = sweep_of(tmp_path, "s1")
    spoil(broken.folder / "sweep.json", JSON_DAMAGE["newer version"])
    with pytest.raises(UserError) as caught:
        Store(tmp_path).find("tiny")
    assert str(caught.value) == (
        f"{broken.folder / 'sweep.json'}: `colour` is not an entry that this version of fedsweep knows; use the "
        "version of fedsweep that wrote it, restore it from a backup, or delete the sweep's folder "
        f"{broken.folder}."
    )


def test_an_older_damaged_sweep_of_the_same_search_space_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = sweep_of(tmp_path, "s1"), sweep_of(tmp_path, "s2")
    spoil(older.folder / "sweep.json", DAMAGE["empty"])
    assert Store(tmp_path).find("tiny").folder == newer.folder
    assert str(older.folder / "sweep.json") in capsys.readouterr().err


@pytest.mark.parametrize("name", ["trial.json", "outcome.json", "gpus.json", "checkpoint.safetensors"])
@pytest.mark.parametrize("damage", JSON_DAMAGE)
def test_a_damaged_file_of_a_trial_is_named_with_the_repair(tmp_path: Path, name: str, damage: str) -> None:
    sweep = sweep_of(tmp_path, "s1")
    file = sweep.trial("a").folder / name
    if damage not in DAMAGE and name == "checkpoint.safetensors":
        file.write_bytes(to_bytes({}, {"round": "1", "state": "{}", "history": '[{"colour": 1}]'}))
    else:
        spoil(file, JSON_DAMAGE[damage])
    with pytest.raises(UserError) as caught:
        sweep.trials()
    assert str(caught.value).startswith(str(file))
    assert str(caught.value).endswith(
        f"; delete the folder {file.parent} and resume the sweep with `--resume`, which runs this trial again."
    )
    for one in file.parent.iterdir():
        one.unlink()
    file.parent.rmdir()
    assert [one.plan.key for one in sweep.trials()] == ["b"]


@pytest.mark.parametrize("damage", [*JSON_DAMAGE, "too few bits", "a folder"])
def test_a_damaged_file_of_predictions_is_named_with_both_ways_out(tmp_path: Path, damage: str) -> None:
    sweep = sweep_of(tmp_path, "s1")
    file = sweep.trial("a").folder / RIGHT
    sound = RightImages.of_domains("d", {"photo": np.ones(20, bool)}, (), [None])
    file.write_bytes(sound.model_copy(update={"right": "AA=="} if damage == "too few bits" else {}).content())
    if damage == "a folder":
        file.unlink()
        file.mkdir()
    elif damage in JSON_DAMAGE:
        spoil(file, JSON_DAMAGE[damage])
    (trial, _) = sweep.trials()
    assert trial.right == file
    with pytest.raises(UserError) as caught:
        read_right(file)
    assert str(caught.value).startswith(str(file))
    assert str(caught.value).endswith(
        "; delete this file to get a report without the interval for other images, or delete the folder "
        f"{file.parent} and resume the sweep with `--resume`, which runs this trial again."
    )
    shutil.rmtree(file) if file.is_dir() else file.unlink()
    assert [one.right for one in sweep.trials()] == [None, None]


def test_all_damaged_trials_are_named_in_one_message(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "s1", keys="abcd")
    for key in "acd":
        spoil(sweep.trial(key).folder / "trial.json", DAMAGE["empty"])
    with pytest.raises(UserError, match=r"; 2 more trials cannot be read: c, d\.$"):
        sweep.trials()


@pytest.mark.parametrize("name", ["outcome.json", "checkpoint.safetensors"])
def test_a_damaged_trial_of_another_sweep_is_not_reused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    alike = {"processor": "cpu", "digests": {"packages": "p"}}
    earlier, mine = sweep_of(tmp_path, "s1", **alike), sweep_of(tmp_path, "s2", keys="", **alike)
    plans = [one.plan for one in earlier.trials()]
    spoil(earlier.trial("a").folder / name, DAMAGE["truncated"])
    reuse = Reuse(Store(tmp_path), mine)
    given = [reuse.give(plan) for plan in plans]
    assert [one.marks for one in given] == [{}, {"taken_from": "s1"}]
    assert [mine.trial(key).planned for key in "ab"] == [False, True]
    told = capsys.readouterr().err
    assert told.startswith("fedsweep: warning: a trial of sweep s1 is not reused but run again: ")
    assert str(earlier.trial("a").folder / name) in told


def test_folders_of_other_programs_are_ignored(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "s1")
    for folder in (sweep.folder / "trials", sweep.trial("a").folder, sweep.folder, tmp_path / "sweeps"):
        foreign = folder / ".ipynb_checkpoints"
        foreign.mkdir()
        for name in ("trial.json", "outcome.json", "sweep.json", ".trial.json.x"):
            (foreign / name).write_text("a copy")
    torn = sweep.trial("a").folder / ".checkpoint.safetensors.abc"
    torn.write_text("half")
    clear_leftovers(sweep, rounds=1, retry=True)
    assert [one.plan.key for one in sweep.trials()] == ["a", "b"]
    assert sorted(sweep.ended()) == ["a", "b"]
    assert [one.folder for one in Store(tmp_path).sweeps()] == [sweep.folder]
    assert not torn.exists()
    assert len([*tmp_path.rglob(".trial.json.x")]) == 4


@pytest.mark.parametrize("name", ["trial.json", "outcome.json", "gpus.json", "checkpoint.safetensors"])
def test_a_folder_in_the_place_of_a_file_is_damage(tmp_path: Path, name: str) -> None:
    sweep = sweep_of(tmp_path, "s1")
    (path := sweep.trial("a").folder / name).unlink()
    path.mkdir()
    with pytest.raises(UserError) as caught:
        sweep.trials()
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("outcome", ["finished", "pruned", "diverged"])
@pytest.mark.parametrize("last", [None, 0])
@pytest.mark.parametrize("retry", [True, False])
def test_an_ended_trial_without_its_rounds_is_missing_and_reopened(
    tmp_path: Path, outcome: OutcomeName, last: int | None, retry: bool
) -> None:
    sweep = sweep_of(tmp_path, "s1", trials=2)
    for key in "ab":
        sweep.trial(key).end(Outcome(outcome=outcome, round=1))
    assert not sweep.any_left()
    sweep.trial("a").checkpoint.unlink()
    if last is not None:
        save(sweep.trial("a").checkpoint, Checkpoint(last, STATE, HISTORY[: last + 1]))
    lost, sound = sweep.trials()
    assert (lost.missing, lost.outcome, lost.last_round) == (True, None, -1 if last is None else last)
    assert (sound.missing, sound.outcome) == (False, Outcome(outcome=outcome, round=1))
    assert count_outcomes([lost, sound])[outcome] == 1
    said = "seed 0 missing: its recorded rounds are not on disk, and a resume runs it again"
    assert said in notes(ArmTrials({"lora.rank": 4}, (lost, sound)), "accuracy/mean")
    with pytest.raises(UserError) as caught:
        find_trial(Store(tmp_path), "tiny:lora.rank=4, seed=0")
    how = "all of" if last is None else "some of"
    more = "." if last is None else "; `--unfinished` exports its state after round 0."
    assert str(caught.value) == f"trial a of tiny@s1 has ended, but {how} its recorded rounds are not on disk{more}"
    assert sweep.any_left()
    clear_leftovers(sweep, rounds=1, retry=retry)
    assert sweep.trial("a").outcome() is None
    assert not sweep.trials()[0].missing
    assert sweep.trial("b").outcome() is not None


def test_the_rounds_of_a_failed_trial_are_not_needed(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "s1", trials=2)
    sweep.trial("a").end(Outcome(outcome="failed", round=1))
    sweep.trial("a").checkpoint.unlink()
    clear_leftovers(sweep, rounds=1, retry=False)
    assert not sweep.trials()[0].missing
    assert sweep.trials()[0].outcome == Outcome(outcome="failed", round=1)


def test_an_ended_trial_without_its_plan_is_reopened_with_its_rounds(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "s1", trials=2)
    (sweep.trial("a").folder / "trial.json").unlink()
    assert sweep.any_left()
    clear_leftovers(sweep, rounds=1, retry=False)
    assert (sweep.trial("a").outcome(), sweep.trial("b").outcome()) == (None, Outcome(outcome="finished", round=1))
    assert sweep.trial("a").history() == [*HISTORY]


@pytest.mark.parametrize("moved_on", [False, True])
def test_a_lost_checkpoint_of_a_member_is_copied_again_from_its_parent(tmp_path: Path, moved_on: bool) -> None:
    sweep = sweep_of(tmp_path, "s1", trials=None)
    parent, child = sweep.trial("a"), sweep.trial("b")
    parent.reopen()
    child.plan(child.read().plan.model_copy(update={"start": Start(key="a", round=1)}))
    child.checkpoint.unlink()
    if moved_on:
        save(parent.checkpoint, Checkpoint(2, STATE, (*HISTORY, RoundRecord(2, {"accuracy/mean": 0.3}, 0.5))))
        with pytest.raises(UserError) as caught:
            clear_leftovers(sweep, rounds=3, retry=False)
        assert str(caught.value) == (
            f"sweep s1 cannot be resumed because {child.checkpoint} is missing and trial a, which this trial continues "
            "from round 1, is no longer at this round; restore the file from a copy, or start a new sweep."
        )
    else:
        clear_leftovers(sweep, rounds=3, retry=False)
        assert child.checkpoint.read_bytes() == parent.checkpoint.read_bytes()
        assert child.outcome() is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["round", "metrics", "seconds", "memory", "system", "colour"])
ROWS = st.lists(st.dictionaries(FIELDS, VALUES, max_size=6), max_size=2)
TEXTS = VALUES.map(json.dumps) | ROWS.map(json.dumps) | st.text(max_size=20) | st.just(to_json(HISTORY))
NODES = st.dictionaries(st.sampled_from(["tensor", "dict", "tuple", "value"]), VALUES, min_size=1, max_size=1)
STATES = st.dictionaries(st.sampled_from(["adapter", "layers"]), NODES | VALUES, max_size=2).map(json.dumps)


@given(st.none() | st.fixed_dictionaries({}, optional={"round": TEXTS, "history": TEXTS, "state": TEXTS | STATES}))
@example({"history": to_json(HISTORY), "round": "1", "state": "{"})
@example({"history": '[{"round": "1", "metrics": {"a": 1}, "seconds": 0.1}]', "round": "1", "state": "{}"})
@example({"history": "[" * 100_000, "round": "1", "state": "{}"})
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_metadata_of_a_checkpoint_are_read_or_reported_as_damage(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    path = tmp_path / "checkpoint.safetensors"
    content = to_bytes({}, metadata)
    readers: list[Callable[[], Any]] = [lambda: load_history(path), lambda: load(path, STATE)]
    for one in (content, without_tensors(io.BytesIO(content))):
        path.write_bytes(one)
        for reader in readers:
            found = read_or_rejected(path, reader)
            history = found.history if isinstance(found, Checkpoint) else found or ()
            assert all(type(one.round) is int for one in history)
            assert isinstance(sum(value for one in history for value in (one.seconds, *one.metrics.values())), Real)


@given(st.binary(max_size=40) | st.integers(0, 400))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_content_of_a_checkpoint_is_read_or_reported_as_damage(tmp_path: Path, content: bytes | int) -> None:
    path = tmp_path / "checkpoint.safetensors"
    save(path, Checkpoint(1, STATE, HISTORY))
    whole = path.read_bytes()
    torn = content if isinstance(content, bytes) else whole[: min(content, len(whole) - 1)]
    for one in (torn, without_tensors(io.BytesIO(torn))):
        path.write_bytes(one)
        assert read_or_rejected(path, lambda: load_history(path)) in (list(HISTORY), None)
