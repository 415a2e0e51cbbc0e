"""Augmentations, whose random choices are drawn separately for each image."""

import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.data.digits import DigitsData
from fedsweep.pretraining.augmentation import GlyphAugmentation, ImageAugmentation
from tests.pretraining.conftest import uniform_images

NO_GLYPHS = {"turn": 0.0, "scale": (1.0, 1.0), "shift": 0.0, "bold": 1.0, "contrast": 1.0}
STILL_GLYPHS = GlyphAugmentation(**NO_GLYPHS, thicken=0.0, stripes=0.0, noise=0.0, invert=0.0)
STILL = {"crop_area": (1.0, 1.0), "crop_ratio": (1.0, 1.0), "flip": 0.0}
PLAIN = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0}
STILL_IMAGES = ImageAugmentation(**STILL, **PLAIN, erase=0.0)
EVERYTHING = [
    GlyphAugmentation(bold=1.4, thicken=0.5, stripes=0.5, noise=0.5, invert=0.5),
    ImageAugmentation(erase=0.5),
]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("augmentation", EVERYTHING, ids=lambda one: one.name)
def test_images_keep_shape_type_and_range_and_the_input_is_unchanged(augmentation):
    pixels = uniform_images(64, 16)
    before = pixels.clone()
    varied = augmentation(pixels, generator())
    assert (varied.shape, varied.dtype) == (pixels.shape, torch.float32)
    assert varied.min() >= 0
    assert varied.max() <= 1
    assert torch.equal(pixels, before)


@pytest.mark.parametrize("augmentation", EVERYTHING, ids=lambda one: one.name)
def test_all_randomness_comes_from_the_generator(augmentation):
    pixels = uniform_images(32, 16)
    global_before = torch.random.get_rng_state()
    one, same, other = (augmentation(pixels, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), global_before)


@pytest.mark.parametrize("augmentation", EVERYTHING, ids=lambda one: one.name)
def test_equal_images_of_a_batch_become_different_ones(augmentation):
    pixels = uniform_images(1, 16).expand(32, -1, -1, -1)
    varied = augmentation(pixels, generator()).flatten(1)
    distances = torch.cdist(varied, varied) + 99 * torch.eye(32)
    assert distances.min() > 0.01


def test_with_all_options_at_zero_images_are_unchanged():
    pixels = uniform_images(16, 16)
    torch.testing.assert_close(STILL_IMAGES(pixels, generator()), pixels, atol=1e-5, rtol=0)
    grey = pixels.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    torch.testing.assert_close(STILL_GLYPHS(pixels, generator()), grey, atol=1e-5, rtol=0)


def test_flip_mirrors_left_and_right():
    pixels = uniform_images(16, 12)
    flipped = STILL_IMAGES.model_copy(update={"flip": 1.0})(pixels, generator())
    torch.testing.assert_close(flipped, pixels.flip(3), atol=1e-5, rtol=0)
    half = STILL_IMAGES.model_copy(update={"flip": 0.5})(pixels.repeat(40, 1, 1, 1), generator())
    mirrored = (half - pixels.flip(3).repeat(40, 1, 1, 1)).abs().amax((1, 2, 3)) < 1e-4
    assert 0.4 < mirrored.float().mean() < 0.6


def test_a_crop_keeps_its_area_and_stays_inside():
    # The colours of a pixel are its coordinates, so the corners of a crop show which part of the image it contains.
    axis = (torch.arange(64) + 0.5) / 64
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    pixels = torch.stack([x, y, x]).expand(200, -1, -1, -1)
    crops = ImageAugmentation(crop_area=(0.25, 0.5), crop_ratio=(0.5, 2.0), flip=0.0, **PLAIN)(pixels, generator())
    width = (crops[:, 0, 0, -1] - crops[:, 0, 0, 0]) * 64 / 63
    height = (crops[:, 1, -1, 0] - crops[:, 1, 0, 0]) * 64 / 63
    area, ratio = width * height, width / height
    assert area.min() > 0.24
    assert area.max() < 0.51
    assert area.std() > 0.05
    assert ratio.min() > 0.48
    assert ratio.max() < 2.05
    assert crops.min() >= axis[0]
    assert crops.max() <= axis[-1]


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colour_changes_are_those_of_torchvision(name):
    from torchvision.transforms.v2 import functional as reference

    pixels = 0.3 + 0.4 * uniform_images(8, 8)  # no value is clipped
    varied = STILL_IMAGES.model_copy(update={name: 0.3})(pixels, generator())
    adjust = getattr(reference, f"adjust_{name}")
    factors = torch.linspace(0.7, 1.3, 601).tolist()
    for before, after in zip(pixels, varied, strict=True):
        nearest = min((adjust(before, factor) - after).abs().max().item() for factor in factors)
        assert nearest < 1e-3
        assert (before - after).abs().max() > 1e-4


def test_erasing_covers_a_rectangle_of_one_colour():
    pixels = uniform_images(200, 32)
    varied = STILL_IMAGES.model_copy(update={"erase": 1.0})(pixels, generator())
    for before, after in zip(pixels, varied, strict=True):
        covered = ((before - after).abs() > 1e-4).any(0)
        rows, columns = covered.any(1).nonzero().flatten(), covered.any(0).nonzero().flatten()
        box = after[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert box.std((1, 2), correction=0).max() < 1e-3
        assert covered.float().mean() < 0.45


def test_glyphs_grow_to_the_size_of_the_embedded_digits():
    digits = DigitsData(domains=("plain",)).load().domains[0].train.images[:64].float() / 255
    varied = STILL_GLYPHS.model_copy(update={"scale": (0.5, 0.5)})(digits, generator())
    ink = varied[:, 0] > 0.2
    heights = ink.any(2).sum(1).float()
    assert 6.5 <= heights.mean() <= 8.5  # 14 rows, halved


def test_glyph_probabilities_are_shares_of_the_images():
    black = torch.zeros(2000, 3, 16, 16)
    inverted = STILL_GLYPHS.model_copy(update={"invert": 0.3})(black, generator())
    assert (inverted.amax((1, 2, 3)) == 1).float().mean() == pytest.approx(0.3, abs=0.03)
    noisy = STILL_GLYPHS.model_copy(update={"noise": 0.7, "noise_std": 0.1})(black, generator())
    assert (noisy.amax((1, 2, 3)) > 0).float().mean() == pytest.approx(0.7, abs=0.03)
    striped = STILL_GLYPHS.model_copy(update={"stripes": 1.0})(black, generator())
    assert (striped.amax((1, 2, 3)) > 0.01).float().mean() > 0.95
    assert striped.max() <= 0.5


@pytest.mark.parametrize(
    ("augmentation", "field", "value", "sentence"),
    [
        (GlyphAugmentation, "scale", [1.2, 1.0], "`augmentation.scale` must be a range above 0, but it is [1.2, 1.0]"),
        (ImageAugmentation, "crop_area", [0.0, 1.0], "`augmentation.crop_area` must be a range between 0 and 1, "
         "but it is [0.0, 1.0]"),
        (ImageAugmentation, "crop_ratio", [2.0, 1.0], "`augmentation.crop_ratio` must be a range above 0, "
         "but it is [2.0, 1.0]"),
    ],
)  # fmt: skip
def test_an_invalid_range_is_an_error(augmentation, field, value, sentence):
    with pytest.raises(UserError) as refusal:
        augmentation.of({field: value}, "here")
    assert str(refusal.value) == f"here: {sentence}."
