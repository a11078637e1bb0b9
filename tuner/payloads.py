"""The images that are sent: the user's own, or photo-like JPEGs made here."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tuner.errors import UsageError

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
# Sizes of the generated set, width and height: mostly VGA, what clients send who scale before they
# upload, with some smaller and larger ones.
SIZES = ((640, 480),) * 12 + ((480, 640),) * 4 + ((320, 240),) * 4 + ((800, 600),) * 4
MANIFEST = "manifest.json"
RECIPE = 1  # raise when the generator changes, so that old sets are not taken for new ones


@dataclass(frozen=True)
class PayloadSet:
    """Files to send.

    `sha256` is over all bytes in order: studies with different payloads are not comparable.
    """

    paths: tuple[Path, ...]
    source: str
    sha256: str
    mean_bytes: float


def load(directory: Path) -> PayloadSet:
    """Every image of a directory, in order of name; each one is decoded once to be sure.

    Raises:
        UsageError: no such directory, no images, or an image that does not decode.
    """
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise UsageError(f"--payloads: {directory} {what}.", hint="Give a directory of images.")
    paths = tuple(sorted(p for p in directory.iterdir() if p.suffix.lower() in ENDINGS))
    if not paths:
        raise UsageError(
            f"--payloads: {directory} holds no images.",
            hint=f"Accepted endings: {', '.join(ENDINGS)}.",
        )
    for path in paths:
        _check(path)
    return _set_of(paths, str(directory))


def generate(directory: Path, seed: int = 0) -> PayloadSet:
    """Photo-like JPEGs, the same for the same seed; a complete set already there is used again.

    Raises:
        UsageError: the directory cannot be written.
    """
    folder = directory / f"generated-{RECIPE}-{seed}"
    if not _is_complete(folder):
        try:
            _write_set(folder, seed)
        except OSError as error:
            raise UsageError(
                f"Generated images cannot be written to {folder}: {error.strerror}.",
                hint="Give images with --payloads, or set XDG_CACHE_HOME to a writable folder.",
            ) from error
    return _set_of(tuple(sorted(folder.glob("*.jpg"))), f"generated, seed {seed}")


def photo_like(width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """A picture with what matters to a decoder: near-1/f noise, smooth shading, edges."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    channels = [_pink(width, height, rng) for _ in range(3)]
    luma = _pink(width, height, rng)
    picture = np.stack([0.8 * luma + 0.3 * c for c in channels], axis=-1)
    for _ in range(8):  # discs in plain colours: the edges of a photograph
        cx, cy, radius = rng.uniform(0, width), rng.uniform(0, height), rng.uniform(0.03, 0.2)
        inside = (x - cx) ** 2 + (y - cy) ** 2 < (radius * width) ** 2
        picture[inside] += rng.normal(0, 0.8, 3)
    shade = (x / width * rng.normal() + y / height * rng.normal())[..., None]
    values = 127 + 55 * (picture + 0.5 * shade)
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def _pink(width: int, height: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Noise, amplitude a little steeper than 1/f, of unit variance, shape (height, width).

    1/f is the law of photographs; the rest stands for the lens and the camera's own smoothing, so
    that a VGA picture has the 50 to 120 kB of a real one.
    """
    spectrum = np.fft.rfft2(rng.standard_normal((height, width)))
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    frequency = np.hypot(fy, fx)
    frequency[0, 0] = 1.0
    spectrum /= frequency**1.3
    spectrum[0, 0] = 0
    noise = np.fft.irfft2(spectrum, s=(height, width))
    scaled: NDArray[np.float64] = noise / noise.std()
    return scaled


def _write_set(folder: Path, seed: int) -> None:
    """Write beside the folder and rename, so that a set is complete or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        fresh = Path(temporary) / "set"
        fresh.mkdir()
        names = []
        for i, (width, height) in enumerate(SIZES):
            name = f"{i:02}-{width}x{height}.jpg"
            picture = photo_like(width, height, rng)
            quality = int(rng.integers(82, 92))
            picture.save(fresh / name, quality=quality, subsampling="4:2:0")
            names.append(name)
        (fresh / MANIFEST).write_text(json.dumps(names))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(fresh, folder)


def _is_complete(folder: Path) -> bool:
    try:
        names = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return len(names) == len(SIZES) and all((folder / name).is_file() for name in names)


def _check(path: Path) -> None:
    try:
        with Image.open(path) as image:
            image.load()
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and its own
        raise UsageError(
            f"--payloads: {path} does not decode ({error}).",
            hint="Repair it or move it out of the directory.",
        ) from error


def _set_of(paths: tuple[Path, ...], source: str) -> PayloadSet:
    digest, size = hashlib.sha256(), 0
    for path in paths:
        data = path.read_bytes()
        digest.update(hashlib.sha256(data).digest())
        size += len(data)
    return PayloadSet(paths, source, digest.hexdigest(), size / len(paths))
