"""The accuracy guard: a faster engine may not win by answering differently.

The configured preprocessing and engine are compared, when the engine loads, with Pillow and the
fp32 eager model on the same sample of pictures. The reference's logits are kept on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving import artifacts, models
from serving.decoding import Decoder
from serving.engines import Engine
from serving.errors import RequestError, SettingsError, StartError
from serving.pixels import Pixels, PixelSpec
from serving.settings import Settings

# Enough to see one answer in a hundred differ, and a second of a slow CPU.
MOST_SAMPLES = 128
ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
Logits = NDArray[np.float32]


def check_accuracy(
    settings: Settings, spec: PixelSpec, engine: Engine, decoder: Decoder | None
) -> dict[str, Any] | None:
    """The comparison, JSON-ready; None where there are no samples.

    Raises:
        StartError: the agreement is below the bound; the message has both.
        SettingsError: the samples cannot be read.
    """
    folder = settings.guard.samples
    if folder is None or settings.engine == "synthetic":
        return None
    pictures = _read(folder)
    found = _answers(settings, spec, engine, decoder, pictures)
    report = compare(found, _reference(settings, spec, pictures))
    if report["agreement"] < settings.guard.min_agreement:
        raise StartError(
            f"accuracy guard: {settings.engine} {settings.precision} with {settings.preprocessing} "
            f"agrees with the fp32 eager reference on {report['agreement']:.1%} of "
            f"{report['samples']} samples (relative output error {report['relative_error']:.2g}); "
            f"at least {settings.guard.min_agreement:.1%} are asked for"
        )
    return report


def compare(found: Logits, reference: Logits) -> dict[str, Any]:
    """Share of pictures with the same best class, and ||found - reference|| / ||reference||.

    Args:
        found, reference: shape (samples, classes). Numbers that are not finite never agree.
    """
    same = (found.argmax(axis=1) == reference.argmax(axis=1)) & np.isfinite(found).all(axis=1)
    error = np.linalg.norm(found.astype(float) - reference) / np.linalg.norm(reference)
    return {
        "samples": len(reference),
        "agreement": float(same.mean()),
        "relative_error": float(np.nan_to_num(error, nan=float("1e9"), posinf=1e9)),
    }


def _read(folder: Path) -> list[bytes]:
    if not folder.is_dir():
        raise SettingsError(f"guard.samples: {folder} is not a folder. Give one with images.")
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)
    if not files:
        raise SettingsError(
            f"guard.samples: {folder} holds no images. Endings taken: {', '.join(ENDINGS)}."
        )
    return [path.read_bytes() for path in files[:MOST_SAMPLES]]


def _answers(
    settings: Settings, spec: PixelSpec, engine: Engine, decoder: Decoder | None,
    pictures: Sequence[bytes],
) -> Logits:  # fmt: skip
    if decoder is None:
        from serving.preprocess import preprocess_of

        prepare = preprocess_of(settings)
        pixels: Any = np.stack([_prepared(prepare, data, spec) for data in pictures])
    else:
        pixels, bad = decoder.decode([np.frombuffer(data, np.uint8) for data in pictures])
        if bad:
            raise SettingsError(f"guard.samples: sample {min(bad) + 1}: {bad[min(bad)]}.")
    size = settings.max_batch_size
    parts = [engine.run(pixels[i : i + size], 1).logits for i in range(0, len(pictures), size)]
    return np.concatenate(parts)


def _prepared(prepare: Any, data: bytes, spec: PixelSpec) -> Pixels:
    try:
        pixels: Pixels = prepare(data, spec)
    except RequestError as error:
        raise SettingsError(f"guard.samples: a file among the samples: {error}.") from error
    return pixels


def _reference(settings: Settings, spec: PixelSpec, pictures: Sequence[bytes]) -> Logits:
    """Logits of the fp32 eager model on Pillow's pixels (the model's own where it has its own)."""
    import torch

    digest = hashlib.sha256()
    for data in pictures:
        digest.update(hashlib.sha256(data).digest())
    key = {"model": models.identity(settings), "input": repr(spec), "torch": torch.__version__,
           "samples": digest.hexdigest(), "own": settings.preprocessing == "model"}  # fmt: skip

    def build(path: Path) -> None:
        from serving.engines.network import build_network
        from serving.preprocess import preprocess_of

        kind = "model" if settings.preprocessing == "model" else "pil"
        prepare = preprocess_of(settings.model_copy(update={"preprocessing": kind}))
        network = build_network(models.load(settings), "fp32", channels_last=True)
        with torch.inference_mode():
            rows = [
                network(torch.as_tensor(np.array(_prepared(prepare, data, spec)))[None]).numpy()
                for data in pictures
            ]
        with path.open("wb") as file:
            np.save(file, np.concatenate(rows), allow_pickle=False)

    def opens(path: Path) -> Logits:
        logits: Logits = np.load(path, allow_pickle=False)
        return logits

    return artifacts.obtain("reference.npy", key, build, opens)
