"""The decoding of images, which gives the pixels of timm's transform or a reason for the failure."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from timm.data import create_transform

from fedsweep.common.errors import UserError
from fedsweep.preparation import decode as module
from fedsweep.preparation.decode import CorruptImageError, Geometry, decode, geometry_of


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.integers(8, 64),
    st.sampled_from([1.0, 0.9, 0.875, 0.95, 0.965]),
    st.sampled_from(["center", "squash"]),
    st.sampled_from(["bicubic", "bilinear"]),
)
def test_pixels_are_those_of_timms_transform(width, height, size, crop_pct, crop_mode, interpolation):
    transform = create_transform(
        (3, size, size),
        is_training=False,
        use_prefetcher=True,
        interpolation=interpolation,
        crop_pct=crop_pct,
        crop_mode=crop_mode,
    )
    image = noise(width, height)
    ours = decode(encoded(image), Geometry(size, crop_pct, crop_mode, interpolation))
    assert ours.dtype == np.uint8
    assert ours.shape == (3, size, size)
    assert np.array_equal(ours, transform(image).numpy())


def test_the_geometry_of_a_backbone_is_timms():
    assert geometry_of("vit_base_patch16_224", 64) == Geometry(64, 0.9, "center", "bicubic")
    assert geometry_of("mixer_b16_224.goog_in21k_ft_in1k", 224) == Geometry(224, 0.875, "center", "bicubic")
    assert geometry_of("coat_lite_medium_384.in1k", 64).crop_mode == "squash"


@pytest.mark.parametrize(
    ("backbone", "words"),
    [
        ("vit_bas_patch16_224", "timm has no model `vit_bas_patch16_224`; did you mean"),
        ("vit_base_patch16_224.augreg_in1", "timm has no weights `augreg_in1` of vit_base_patch16_224; did you mean"),
        ("deepseek_vit_412m", "with the crop `border`"),
    ],
)
def test_a_backbone_that_does_not_fit_is_rejected(backbone, words):
    if backbone.startswith("deepseek"):
        import timm

        if not timm.is_model(backbone):
            pytest.skip("this version of timm does not have the model")
    with pytest.raises(UserError, match=r"^`--backbone`") as refusal:
        geometry_of(backbone, 224)
    assert words in str(refusal.value)


SQUARE = Geometry(16)


def test_grey_palette_and_cmyk_become_rgb():
    image = noise(16, 16)
    for mode, kind in (("L", "PNG"), ("1", "PNG"), ("P", "PNG"), ("LA", "PNG"), ("CMYK", "TIFF")):
        converted = image.convert(mode)
        expected = np.asarray(converted.convert("RGB")).transpose(2, 0, 1)
        assert np.array_equal(decode(encoded(converted, kind), SQUARE), expected), mode


def test_the_alpha_channel_is_dropped():
    image = noise(16, 16)
    rgba = image.copy()
    rgba.putalpha(0)
    assert np.array_equal(decode(encoded(rgba), SQUARE), decode(encoded(image), SQUARE))


def test_sixteen_bit_grey_keeps_its_high_byte():
    values = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    for kind in ("PNG", "TIFF"):
        pixels = decode(encoded(Image.fromarray(values), kind), SQUARE)
        assert np.array_equal(pixels, np.stack([values >> 8] * 3).astype(np.uint8))


def test_the_orientation_in_exif_data_is_ignored():
    image, exif = noise(16, 16), Image.Exif()
    exif[0x0112] = 6
    plain, turned = encoded(image, "JPEG"), encoded(image, "JPEG", exif=exif)
    assert np.array_equal(decode(turned, SQUARE), decode(plain, SQUARE))


JPEG = encoded(noise(64, 64), "JPEG")
PNG = encoded(noise(64, 64))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"not an image", "not an image, or in an unsupported format"),
        (JPEG[: len(JPEG) // 2], "truncated"),
        (JPEG[:20], ""),
        (PNG[: len(PNG) // 2], "truncated"),
        (PNG[:40] + bytes(20) + PNG[60:], "not an image"),
        (PNG[:2000] + bytes(20) + PNG[2020:], "broken"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "not an image"),
        (encoded(Image.fromarray(np.zeros((16, 16), np.float32)), "TIFF"), "floats"),
    ],
)
def test_an_image_that_cannot_be_decoded_has_a_reason(data, reason):
    with pytest.raises(CorruptImageError) as found:
        decode(data, SQUARE)
    assert reason in str(found.value)
    assert "0x" not in str(found.value)
    assert "\n" not in str(found.value)


def test_a_decompression_bomb_is_corrupt(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(CorruptImageError, match="decompression bomb"):
        decode(PNG, SQUARE)


def test_an_image_that_would_become_too_large_is_corrupt(monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 16 * 1000)
    assert decode(encoded(noise(1, 60)), SQUARE).shape == (3, 16, 16)
    with pytest.raises(CorruptImageError, match="too narrow: 1 x 70 pixels would become 16 x 1120"):
        decode(encoded(noise(1, 70)), SQUARE)


def test_a_worker_starts_without_heavy_libraries():
    """Reading cards and Arrow files does not import torch either."""
    modules = "fedsweep.preparation.decode, fedsweep.data.prepared.card, fedsweep.data.prepared.arrow_files"
    code = f"import sys, {modules}; print(*{{'torch', 'timm', 'pandas'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == ""
