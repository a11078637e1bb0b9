"""Payloads: the user's images checked one by one, or the same generated ones every time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tuner import payloads
from tuner.errors import UsageError
from tuner.payloads import SIZES, photo_like


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, payloads.PayloadSet]:
    folder = tmp_path_factory.mktemp("payloads")
    return folder, payloads.generate(folder)


def image_in(folder: Path, name: str) -> Path:
    path = folder / name
    photo_like(64, 48, np.random.default_rng(0)).save(path)
    return path


def test_generated_images_are_photo_like(generated: tuple[Path, payloads.PayloadSet]) -> None:
    """The stated sizes, each a decodable JPEG of a photograph's weight."""
    _, made = generated
    sizes = []
    for path in made.paths:
        with Image.open(path) as image:
            sizes.append(image.size)
    assert sizes == list(SIZES)
    bits_per_pixel = [8 * p.stat().st_size / (w * h)
                      for p, (w, h) in zip(made.paths, SIZES, strict=True)]  # fmt: skip
    assert all(1.0 < bits < 5.0 for bits in bits_per_pixel)


def test_generation_is_deterministic(
    generated: tuple[Path, payloads.PayloadSet], tmp_path: Path
) -> None:
    """Another folder, the same bytes; another seed, other bytes."""
    _, made = generated
    assert payloads.generate(tmp_path).sha256 == made.sha256
    assert payloads.generate(tmp_path, seed=1).sha256 != made.sha256


def test_an_incomplete_set_is_made_again(tmp_path: Path) -> None:
    """A set with a file missing is not taken for a whole one."""
    made = payloads.generate(tmp_path)
    made.paths[0].unlink()
    assert payloads.generate(tmp_path).sha256 == made.sha256


def test_loads_a_directory_in_order(tmp_path: Path) -> None:
    """Every image by its ending, sorted; other files are none of its business."""
    names = ["b.JPG", "a.png", "c.webp"]
    for name in names:
        image_in(tmp_path, name)
    (tmp_path / "notes.txt").write_text("no image")
    loaded = payloads.load(tmp_path)
    assert [p.name for p in loaded.paths] == sorted(names)


def test_refuses_what_it_cannot_send(tmp_path: Path) -> None:
    """Missing, a file, empty, and a truncated image: each named with what to do."""
    with pytest.raises(UsageError, match="absent does not exist"):
        payloads.load(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"holds no images.*jpg"):
        payloads.load(tmp_path)
    path = image_in(tmp_path, "cut.jpg")
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(UsageError, match=r"cut.jpg does not decode.*Repair it"):
        payloads.load(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        payloads.load(path)
