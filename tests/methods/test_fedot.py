"""Properties of FedOT."""

import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.federation.rounds import federate
from fedsweep.methods.capabilities import predicted
from fedsweep.methods.fedot import FedOT
from fedsweep.models.names import layer_of
from fedsweep.testing.compare import identical
from fedsweep.testing.rounds import one_round


@pytest.mark.parametrize(
    ("bottom", "top", "kept", "emulator"),
    [
        (2, 2, 0.5, (2, 4, 7, 9)),
        (2, 2, 1.0, tuple(range(2, 10))),
        (0, 1, 0.1, (0,)),
        (5, 5, 1.0, (5, 6)),
        (1, 0, 0.2, (1, 11)),
    ],
)
def test_the_emulator_is_spread_over_the_middle(bottom, top, kept, emulator):
    method = FedOT(bottom=bottom, top=top, kept=kept)
    assert method.emulator(range(12)) == emulator
    assert method.ends(range(12)) == (*range(bottom), *range(12 - top, 12))


def test_the_ends_and_the_head_are_trained_and_the_emulator_is_not(federation):
    built = federation({"method": {"name": "fedot", "bottom": 1, "top": 3, "kept": 0.5}})
    start, updates = one_round(built)
    assert {layer_of(name) for name in start.state.adapter} == {0, 9, 10, 11, None}
    assert {name for name in start.state.adapter if layer_of(name) is None} == {
        "backbone.head.weight", "backbone.head.bias",
    }  # fmt: skip
    for update in updates:
        assert update.allocation.held == (0, 1, 3, 6, 8, 9, 10, 11)
        assert update.allocation.trained == (0, 9, 10, 11)
        assert update.adapter.keys() == start.state.adapter.keys()


def test_the_server_inserts_the_ends_into_the_full_model(federation):
    built = federation({"method": {"name": "fedot", "kept": 0.25}})
    *_, last = federate(built)
    images = built.domains[0].test
    built.model.load_adapter(last.state.adapter)
    found = predicted(built.method, last.state, built.trainer.reader, images)
    with torch.no_grad():
        pixels = images.take(torch.arange(len(images)))[0]
        assert torch.equal(found, built.model(pixels, range(12)))
        assert not torch.equal(found, built.model(pixels, (0, 1, 2, 9, 10, 11)))


def test_with_the_whole_middle_and_no_lower_end_fedot_trains_the_blocks_of_lfft(federation):
    ours = one_round(federation({"method": {"name": "fedot", "bottom": 0, "top": 6, "kept": 1.0}}))[1]
    theirs = one_round(federation({"method": {"name": "lfft", "frozen": 0.5}}))[1]
    for one, other in zip(ours, theirs, strict=True):
        assert set(other.adapter) - set(one.adapter) == {"backbone.norm.weight", "backbone.norm.bias"}
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=0.05)
        assert not identical(one.adapter, {name: other.adapter[name] for name in one.adapter})


@pytest.mark.parametrize(("bottom", "top"), [(0, 0), (6, 6), (12, 1)])
def test_ends_without_blocks_or_without_a_middle_are_rejected(federation, bottom, top):
    with pytest.raises(UserError, match=f"less than 12, the number of blocks, but they are {bottom} and {top}"):
        federation({"method": {"name": "fedot", "bottom": bottom, "top": top}})
