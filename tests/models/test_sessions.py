"""Dropout masks, which depend only on the seed of a local session."""

import numpy as np
import pytest
import torch

from fedsweep.models.sessions import DropoutMasks, Segment, Session


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_masks_drop_the_given_share_and_keep_the_mean(rate):
    x = torch.empty(400_001)
    mask = DropoutMasks(3).next(x, rate)
    assert mask.shape == x.shape
    dropped = (mask == 0).double().mean().item()
    assert dropped == pytest.approx(rate, abs=5 * (rate * (1 - rate) / len(x)) ** 0.5)
    (scale,) = mask[mask != 0].unique().tolist()
    assert scale == pytest.approx(1 / (1 - rate), rel=1e-4)


def test_masks_depend_only_on_the_seed_and_the_shapes():
    shapes = [(3, 5), (7,), (2, 2, 2)]

    def drawn(seed):
        masks = DropoutMasks(seed)
        return [masks.next(torch.empty(shape), 0.5) for shape in shapes]

    assert all(map(torch.equal, drawn(1), drawn(1)))
    assert not all(map(torch.equal, drawn(1), drawn(2)))


def test_entries_of_a_mask_are_independent():
    mask = DropoutMasks(0).next(torch.empty(1000, 64), 0.5).numpy() > 0
    correlation = np.corrcoef(mask.T) - np.eye(64)
    assert np.abs(correlation).max() < 5 / 1000**0.5
    following = np.corrcoef(mask.ravel()[:-1], mask.ravel()[1:])[0, 1]
    assert abs(following) < 5 / mask.size**0.5


def test_masks_have_the_type_of_the_input():
    assert DropoutMasks(0).next(torch.empty(3, dtype=torch.float64), 0.5).dtype == torch.float64


def test_a_session_ends_even_after_an_error():
    session, masks = Session(), DropoutMasks(0)

    def fail():
        with session.drawing(masks), session.joined([Segment(1, {}, masks)]):
            assert session.masks is masks
            assert session.segments
            raise KeyError("the loss")

    with pytest.raises(KeyError, match="the loss"):
        fail()
    assert session == Session()
