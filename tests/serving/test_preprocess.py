"""Preprocessing: both kinds give the same pixels, and bad input is the client's fault."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from serving.errors import BadImage, TooLarge
from serving.pixels import PixelSpec
from serving.preprocess import check_size, with_pil, with_torchvision
from tests.serving.conftest import encoded, photo

SPEC = PixelSpec()
# Decoders may round a colour conversion differently and resizers a weight: the mean difference is
# a small fraction of one of 255 steps, single pixels differ by a few.
MEAN_TOLERANCE, WORST_TOLERANCE = 0.25, 8


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # Orientation: rotate 90 degrees clockwise to view
    return encoded(photo(), exif=exif)


CASES = {
    "jpeg": encoded(photo()),
    "odd sizes": encoded(photo(333, 517)),
    "progressive": encoded(photo(), progressive=True),
    "grayscale": encoded(photo().convert("L")),
    "exif rotated": rotated(),
    "png": encoded(photo(), "PNG"),
    "palette": encoded(photo().convert("P"), "PNG"),
    "webp": encoded(photo(), "WEBP", lossless=True),
    "bmp": encoded(photo(), "BMP"),
    "small": encoded(photo(17, 9), "PNG"),
}


@pytest.mark.parametrize("name", CASES)
def test_both_kinds_agree(name: str) -> None:
    """The same picture, size and type, within the stated tolerance."""
    ours, baseline = with_torchvision(CASES[name], SPEC), with_pil(CASES[name], SPEC)
    assert ours.shape == baseline.shape == (224, 224, 3)
    assert ours.dtype == baseline.dtype == np.uint8
    difference = np.abs(ours.astype(int) - baseline.astype(int))
    assert difference.mean() < MEAN_TOLERANCE
    assert difference.max() <= WORST_TOLERANCE


@pytest.mark.parametrize("preprocess", [with_torchvision, with_pil])
def test_cmyk_is_accepted(preprocess: object) -> None:
    """Print colours become some RGB of the right shape (decoders convert them differently)."""
    pixels = with_pil(encoded(photo().convert("CMYK")), SPEC)
    assert pixels.shape == (224, 224, 3)
    assert callable(preprocess)
    assert preprocess(encoded(photo().convert("CMYK")), SPEC).shape == (224, 224, 3)


@pytest.mark.parametrize("preprocess", [with_torchvision, with_pil])
def test_damage_is_a_bad_image(preprocess: object) -> None:
    """A truncated file is refused, whatever decodes it."""
    assert callable(preprocess)
    with pytest.raises(BadImage):
        preprocess(encoded(photo())[:2000], SPEC)


def test_the_header_tells_what_is_no_image() -> None:
    """Nothing is decoded to find out."""
    with pytest.raises(BadImage):
        check_size(b"hello", 1000)
    with pytest.raises(BadImage):
        check_size(b"", 1000)


def test_a_decompression_bomb_is_refused_by_its_header() -> None:
    """Few bytes, many pixels: refused before decoding, with both numbers in the message."""
    buffer = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(buffer, "PNG")
    assert len(buffer.getvalue()) < 100_000
    with pytest.raises(TooLarge, match="20000 x 20000 pixels; at most 50000000"):
        check_size(buffer.getvalue(), 50_000_000)
