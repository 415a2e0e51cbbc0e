"""Checkpoints, which store the state and the history of a run on disk."""

import math
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.common.errors import UserError
from fedsweep.common.files import write_atomically
from fedsweep.results import checkpoint
from fedsweep.results.checkpoint import Checkpoint, load, load_history, save
from fedsweep.results.history import RoundRecord, from_json, to_json
from fedsweep.testing.compare import identical
from fedsweep.types import AdapterState, ServerState


@dataclass(frozen=True)
class LongMemory(ServerState):
    """A server state with additional fields, like the states of some methods."""

    clients: dict[str, AdapterState]
    stage: dict[int, tuple[int, float, None]]
    extra: Any = None


def state(extra: Any = None) -> LongMemory:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(3, 2, generator=generator)
    return LongMemory(
        adapter={"head": head, "blocks.0/a": torch.randn(4, generator=generator).half()},
        layers=(0, 3, 11),
        clients={"noisy": {"head": head}, "plain": {"head": head[:, 1], "counts": torch.arange(4)}, "new": {}},
        stage={1: (2, 0.1 + 0.2, None), -1: (0, -0.0, None)},
        extra=extra,
    )


def round_trip(folder, checkpoint: Checkpoint) -> Checkpoint:
    save(folder / "run" / "checkpoint.safetensors", checkpoint)
    return load(folder / "run" / "checkpoint.safetensors", like=checkpoint.state)


def test_nested_states_are_restored_with_their_types_and_bits(tmp_path):
    before = state(extra=({"flag": True, "name": "é", "none": None}, (), {}, torch.tensor(True), torch.empty(0, 2)))
    after = round_trip(tmp_path, Checkpoint(7, before, ()))
    assert after.round == 7
    assert identical(after.state, before)
    assert after.state.clients["plain"]["head"].is_contiguous()


def test_the_correctly_predicted_images_are_restored_and_absent_if_there_are_none(tmp_path):
    right = {3: torch.tensor([1, 255], dtype=torch.uint8), 4: torch.tensor([0, 128], dtype=torch.uint8)}
    before = state(extra={"right": torch.ones(1)})
    after = round_trip(tmp_path, Checkpoint(4, before, (), right))
    assert identical(after.right, right)
    assert identical(after.state, before)
    without = tmp_path / "without"
    save(without, Checkpoint(4, before, ()))
    assert b"right/3" not in without.read_bytes()
    assert load(without, like=before).right == {}


def test_keys_with_the_same_text_do_not_collide(tmp_path):
    one, two = torch.zeros(1), torch.ones(1)
    before = state(extra={"a": {"b": one}, "a/b": two, 1: two, "1": one})
    assert identical(round_trip(tmp_path, Checkpoint(0, before, ())).state, before)


@pytest.mark.parametrize(
    ("extra", "path", "kind"),
    [
        ([1], "state/extra", "list"),
        ({"a": {1, 2}}, "state/extra/a", "set"),
        ((0, state()), "state/extra/1", "LongMemory"),
        ({(1, 2): 3}, "state/extra", "dict"),
    ],
)
def test_saving_a_state_that_could_not_be_restored_raises_an_error(tmp_path, extra, path, kind):
    with pytest.raises(TypeError) as refusal:
        save(tmp_path / "checkpoint", Checkpoint(0, state(extra), ()))
    assert str(refusal.value) == (
        "a server state may contain only tensors, tuples, dicts with keys of type str or int, numbers, strings, "
        f"booleans and None, but {path} is of type {kind}"
    )
    assert not list(tmp_path.iterdir())


@given(st.dictionaries(st.text(), st.floats(allow_nan=False)), st.floats(0, 1e9))
def test_history_floats_are_exact(metrics, seconds):
    history = [RoundRecord(0, {}, 0.0), RoundRecord(3, metrics, seconds)]
    assert identical(from_json(to_json(history)), history)


def test_the_history_is_read_with_the_state_and_alone(tmp_path):
    history = (RoundRecord(0, {"accuracy/mean": 0.1 + 0.2}, 0.5), RoundRecord(1, {"loss": math.pi / 3}, 1 / 3))
    assert identical(round_trip(tmp_path, Checkpoint(1, state(), history)).history, history)
    assert identical(load_history(tmp_path / "run" / "checkpoint.safetensors"), list(history))


@pytest.mark.parametrize("breaking", ["replace", "fsync"])
def test_a_failed_write_leaves_only_the_old_file(tmp_path, monkeypatch, breaking):
    path = tmp_path / "checkpoint"
    save(path, Checkpoint(1, state(), ()))

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, breaking, fail)
    with pytest.raises(OSError, match="disk full"):
        save(path, Checkpoint(2, state(), ()))
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]
    assert load(path, like=state()).round == 1


def test_a_write_replaces_the_whole_file_and_creates_its_folder(tmp_path):
    path = tmp_path / "deep" / "er" / "file"
    write_atomically(path, b"a long first text")
    write_atomically(path, b"short")
    assert path.read_bytes() == b"short"
    assert [file.name for file in path.parent.iterdir()] == ["file"]


def test_a_checkpoint_contains_adapters_but_no_backbone(federation, tmp_path):
    small = federation()
    save(tmp_path / "checkpoint", Checkpoint(0, small.initial_state(), ()))
    trainable = sum(parameter.numel() for parameter in small.model.trainable().values())
    assert 4 * trainable < (tmp_path / "checkpoint").stat().st_size < 4 * trainable + 30_000


def test_an_unknown_kind_of_packed_value_raises_an_error(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_pack", lambda *_: {"set": [1, 2]})
        save(path, Checkpoint(0, state(), ()))
    with pytest.raises(UserError, match="not a packed state"):
        load(path, like=state())
