"""The embedded digits data set, which has six domains: the same scans in six styles."""

import pytest
import torch
from sklearn.datasets import load_digits

from fedsweep.common.errors import UserError
from fedsweep.data.data_config import load
from fedsweep.data.digits import RENDERERS, STYLES, DigitsData, enlarge, read_scans, rotate, stripes, thicken, to_uint8
from fedsweep.types import FederatedData

THUMBNAILS = {
    "plain": [63.3, 59.4, 53.4, 54.2],
    "rotated": [77.1, 48.2, 39.4, 65.3],
    "inverted": [191.7, 195.6, 201.6, 200.8],
    "noisy": [95.2, 85.5, 95.7, 78.7],
    "thick": [124.3, 119.8, 112.8, 109.5],
    "textured": [102.0, 102.9, 113.3, 113.9],
}
"""The mean of each quadrant of the first training image in each style."""


@pytest.fixture(scope="module")
def data() -> FederatedData:
    return DigitsData().load()


def test_each_of_six_domains_has_every_scan(data):
    assert tuple(domain.name for domain in data.domains) == STYLES
    assert len(STYLES) == 6
    assert data.class_names == tuple("0123456789")
    for domain in data.domains:
        assert (len(domain.train), len(domain.test)) == (1797 - 359, 359)


def test_the_scans_equal_those_of_scikit_learn():
    scans, labels = read_scans()
    expected, targets = load_digits(return_X_y=True)
    assert scans.flatten(1).double().tolist() == expected.tolist()
    assert labels.tolist() == targets.tolist()


def test_images_are_uint8_and_labels_are_digits(data):
    for part in (part for domain in data.domains for part in (domain.train, domain.test)):
        assert part.images.shape == (len(part), 3, 16, 16)
        assert part.images.dtype == torch.uint8
        assert part.images.is_contiguous()
        assert part.labels.dtype == torch.int64
        assert set(part.labels.tolist()) == set(range(10))


def test_every_domain_has_the_same_scans_in_the_same_split(data):
    plain = data.domains[0]
    for domain in data.domains[1:]:
        assert torch.equal(domain.train.labels, plain.train.labels)
        assert torch.equal(domain.test.labels, plain.test.labels)
    inverted = data.domains[STYLES.index("inverted")]
    for here, there in ((plain.train, inverted.train), (plain.test, inverted.test)):
        total = here.images.int() + there.images.int()
        assert set(total.unique().tolist()) <= {254, 255, 256}  # the sum of two rounded values
        assert (total == 255).double().mean() > 0.9


def test_domains_differ_in_every_image(data):
    for place, first in enumerate(data.domains):
        for second in data.domains[place + 1 :]:
            assert (first.test.images != second.test.images).flatten(1).any(1).all(), (first.name, second.name)


def test_no_scan_is_both_in_training_and_test_images(data):
    for domain in data.domains:
        trained = {image.numpy().tobytes() for image in domain.train.images}
        tested = {image.numpy().tobytes() for image in domain.test.images}
        assert len(trained) > 1400
        assert len(tested) > 350
        assert not trained & tested


def test_the_split_covers_all_classes_about_evenly(data):
    held_out = data.domains[0].test.labels.bincount(minlength=10)
    assert held_out.sum() == 359
    assert held_out.min() >= 20


def test_the_same_configuration_gives_bit_identical_images(data):
    again = DigitsData().load()
    assert again.digest == data.digest
    for first, second in zip(data.domains, again.domains, strict=True):
        assert torch.equal(first.train.images, second.train.images)
        assert torch.equal(first.test.images, second.test.images)


def test_the_digest_covers_domains_their_order_and_the_split(data):
    digests = {
        DigitsData(domains=domains, test_fraction=fraction).load().digest
        for domains, fraction in [
            (("plain", "thick"), 0.2), (("thick", "plain"), 0.2), (("plain",), 0.2), (("plain", "thick"), 0.3),
        ]
    }  # fmt: skip
    assert len(digests | {data.digest}) == 5


def test_a_domain_does_not_depend_on_the_other_domains(data):
    few = DigitsData(domains=("textured", "noisy", "rotated")).load()
    for domain in few.domains:
        whole = data.domains[STYLES.index(domain.name)]
        assert torch.equal(domain.train.images, whole.train.images)
        assert torch.equal(domain.test.images, whole.test.images)


def test_loading_twice_shares_the_images():
    config = DigitsData(domains=("plain",))
    assert load(config) is load(DigitsData(domains=("plain",)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"domains": ["plain", "bold"]},
            "`data.domains` must be among plain, rotated, inverted, noisy, thick, textured, but one is `bold`.",
        ),
        ({"domains": ["plain", "plain"]}, "`data.domains` must not repeat a domain, but it is ['plain', 'plain']."),
        ({"domains": []}, "`domains` must have at least 1 item, but it is []."),
        ({"test_fraction": 0.001}, "`test_fraction` must be greater than or equal to 0.01, but it is 0.001."),
        ({"test_fraction": 1}, "`test_fraction` must be less than or equal to 0.99, but it is 1."),
    ],
)
def test_an_invalid_configuration_is_an_error(changes, sentence):
    with pytest.raises(UserError) as refusal:
        DigitsData.of(changes, "data")
    assert str(refusal.value) == f"data: {sentence}"


def test_enlarged_glyphs_keep_a_margin_and_their_range():
    glyphs = enlarge(torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)).round())
    assert glyphs.shape == (4, 1, 16, 16)
    assert glyphs[:, :, 0].abs().max() == glyphs[:, :, :, -1].abs().max() == 0
    assert glyphs.min() == 0
    assert glyphs.max() == 1


def test_pixels_are_rounded_and_clamped():
    grey = torch.tensor([-1.0, 0.0, 0.4 / 255, 0.6 / 255, 1.0, 2.0]).view(1, 1, 1, 6)
    assert to_uint8(grey)[0, :, 0].tolist() == [[0, 0, 0, 1, 255, 255]] * 3


def test_images_are_turned_enlarged_and_shifted():
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(images, torch.tensor([90.0, 180.0]))
    expected = torch.stack([torch.rot90(images[0], 1, (1, 2)), torch.rot90(images[1], 2, (1, 2))])
    torch.testing.assert_close(turned, expected, atol=1e-5, rtol=0)
    ones, straight = torch.ones(1, 1, 8, 8), torch.zeros(1)
    assert rotate(ones, straight, scale=torch.tensor([0.5])).sum() == pytest.approx(16, abs=1e-4)
    shifted = rotate(images[:1], straight, shift=torch.tensor([[0.5, 0.0]]))
    torch.testing.assert_close(shifted[..., :6], images[:1, ..., 2:])


def test_thickened_strokes_cover_the_original_strokes():
    glyphs = torch.zeros(1, 1, 5, 5)
    glyphs[0, 0, 2, 2] = 0.5
    expected = torch.zeros(5, 5)
    expected[1:4, 1:4] = 0.5
    assert torch.equal(thicken(glyphs)[0, 0], expected)


@pytest.mark.parametrize("style", [style for style in STYLES if style != "noisy"])
@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_images_without_noise_need_no_clamping(style, level):
    """A level of 0 leaves only the background, and a level of 1 only the ink."""
    images = RENDERERS[style](torch.full((50, 1, 16, 16), level), torch.Generator().manual_seed(0))
    assert images.min() >= 0
    assert images.max() <= 1


@pytest.mark.parametrize(("style", "quadrants"), THUMBNAILS.items())
def test_the_images_are_those_of_published_results(data, style, quadrants):
    """The means tolerate the rounding of other processors, but no other random numbers."""
    image = data.domains[STYLES.index(style)].train.images[0].double()
    means = image.mean(0).reshape(2, 8, 2, 8).mean((1, 3)).flatten()
    assert means.tolist() == pytest.approx(quadrants, abs=0.5)


def test_stripes_depend_only_on_their_generator():
    first, second, other = (stripes(3, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert first.min() >= 0
    assert first.max() <= 1
