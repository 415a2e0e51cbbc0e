"""The arithmetic of matrix products, which is an option of a run."""

import pytest
import torch

from fedsweep.federation.build_and_run import build
from fedsweep.federation.rounds import federate
from fedsweep.training.precision import arithmetic


def test_bfloat16_changes_the_digits_and_keeps_the_state_in_float32(federation):
    runs = {}
    for precision in ("float32", "bfloat16"):
        runs[precision] = list(federate(federation({"precision": precision, "federation.rounds": 1})))
    plain, rounded = (run[-1] for run in runs.values())
    assert rounded.metrics["loss/test"] != plain.metrics["loss/test"]
    assert rounded.metrics["loss/test"] == pytest.approx(plain.metrics["loss/test"], rel=0.15)
    assert all(tensor.dtype == torch.float32 for tensor in rounded.state.adapter.values())
    assert rounded.metrics["bytes/up"] == plain.metrics["bytes/up"]


@pytest.mark.parametrize("together", [True, False])
def test_bfloat16_follows_every_step(federation, monkeypatch, together):
    """If autocast kept the rounded weights of the first step, the loss would not fall as in float32."""
    if not together:
        monkeypatch.setattr("fedsweep.training.local_training.JOINED_ON_CPU", 1)
    losses = []
    for precision in ("float32", "bfloat16"):
        changes = {"precision": precision, "federation.rounds": 1, "local.steps": 8}
        losses.append(list(federate(federation(changes)))[-1].metrics["loss/train"])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize(
    "changes", [{}, {"method": "fedclip", "backbone": "digits_clip", "federation.depths": [6]}], ids=["vit", "clip"]
)
def test_bfloat16_outputs_can_be_cached(federation, tmp_path, changes):
    small = federation({**changes, "precision": "bfloat16", "federation.rounds": 1})
    assert small.trainer.reader.kept.folder is not None
    assert [one.round for one in federate(small)] == [0, 1]
    assert list(small.trainer.reader.kept.folder.glob("*.float32.*"))


def test_tf32_is_float32_on_a_cpu(federation):
    first, second = (
        list(federate(federation({"precision": precision, "federation.rounds": 1})))[-1].metrics
        for precision in ("float32", "tf32")
    )
    assert dict(first) == dict(second)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_the_callers_arithmetic_is_not_changed_between_rounds(federation, precision):
    before = torch.get_float32_matmul_precision()
    for _ in federate(federation({"precision": precision, "federation.rounds": 1})):
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == before


def test_tf32_is_set_on_a_gpu_and_taken_back_after_an_error():
    before = torch.get_float32_matmul_precision()

    def fail():
        with arithmetic("tf32", torch.device("cuda")):
            assert torch.get_float32_matmul_precision() == "high"
            raise KeyError("a round")

    with pytest.raises(KeyError, match="a round"):
        fail()
    assert torch.get_float32_matmul_precision() == before


def test_cached_outputs_of_another_precision_are_not_used(tiny):
    keys = set()
    for precision in ("float32", "tf32", "bfloat16"):
        reader = build(tiny.override({"precision": precision}, "test")).trainer.reader
        keys |= {reader.identity, reader.plain_identity}
    assert len(keys) == 6
