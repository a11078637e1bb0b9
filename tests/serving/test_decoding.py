"""DALI's CPU pipeline: the pixels of the other decoders within a stated tolerance, and every
picture on its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from serving.decoding import DaliDecoder
from serving.pixels import PixelSpec
from serving.preprocess import with_pil
from tests.serving.conftest import RunningServer, encoded, photo, run_server
from tests.serving.test_preprocess import CASES

pytestmark = pytest.mark.slow
pytest.importorskip("nvidia.dali")

SPEC = PixelSpec()
# Another JPEG decoder (its own colour conversion) and another resizer (fixed-point weights): the
# mean difference stays below one of 255 steps, single pixels differ by more where edges are sharp.
MEAN_TOLERANCE, WORST_TOLERANCE = 1.0, 24
FORMATS = {**CASES, "1 pixel": encoded(photo(1, 1), "PNG"),
           "1 pixel JPEG": encoded(photo(1, 1))}  # fmt: skip


@pytest.fixture(scope="module")
def decoder() -> DaliDecoder:
    return DaliDecoder(SPEC, device_index=None, threads=2, max_batch=16)


def raw(data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("name", FORMATS)
def test_agrees_with_pillow(decoder: DaliDecoder, name: str) -> None:
    """The same size and, within the tolerance, the same pixels."""
    pixels, bad = decoder.decode([raw(FORMATS[name])])
    assert bad == {}
    assert pixels.shape == (1, 224, 224, 3)
    assert pixels.dtype == np.uint8
    difference = np.abs(pixels[0].astype(int) - with_pil(FORMATS[name], SPEC).astype(int))
    assert difference.mean() < MEAN_TOLERANCE
    assert difference.max() <= WORST_TOLERANCE


def test_cmyk_is_accepted(decoder: DaliDecoder) -> None:
    """Print colours become some RGB of the right shape (decoders convert them differently)."""
    pixels, bad = decoder.decode([raw(encoded(photo().convert("CMYK")))])
    assert (pixels.shape, bad) == ((1, 224, 224, 3), {})


def test_batches_come_in_any_size_and_mixture(decoder: DaliDecoder) -> None:
    """Each picture gets the pixels that it gets alone."""
    names = ["jpeg", "png", "odd sizes", "webp", "grayscale"]
    together, _ = decoder.decode([raw(FORMATS[name]) for name in names])
    for row, name in zip(together, names, strict=True):
        np.testing.assert_array_equal(row, decoder.decode([raw(FORMATS[name])])[0][0])


def test_a_damaged_picture_harms_no_other(decoder: DaliDecoder) -> None:
    """It is named by its place; the rest is decoded, now and in the next batch."""
    bodies = [CASES["jpeg"], b"no picture", CASES["png"], CASES["jpeg"][:700]]
    pixels, bad = decoder.decode([raw(body) for body in bodies])
    assert 1 in bad
    assert {0, 2}.isdisjoint(bad)
    np.testing.assert_array_equal(pixels[0], decoder.decode([raw(CASES["jpeg"])])[0][0])


class TestServer:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
        settings = {"device": "cpu", "preprocessing": "dali", "workers": 2, "max_batch_size": 8,
                    "batch_window_ms": 5.0}  # fmt: skip
        with run_server(tmp_path_factory.mktemp("dali"), settings) as it:
            yield it

    def test_answers_as_with_torchvision(
        self, server: RunningServer, jpeg: bytes, tmp_path: Path
    ) -> None:
        """The best class of a photograph does not depend on the decoder."""
        best = server.json("POST", "/predict", jpeg)[1]["classes"][0]
        with run_server(tmp_path, {"device": "cpu"}) as other:
            assert other.json("POST", "/predict", jpeg)[1]["classes"][0] == best
        assert server.stats()["preprocess_seconds"] > 0

    def test_a_bad_image_is_its_senders_fault(self, server: RunningServer, jpeg: bytes) -> None:
        """400 for it, answers for its batch-mates, 413 for a bomb."""
        from concurrent.futures import ThreadPoolExecutor

        bodies = [jpeg, jpeg[:300], jpeg, b"garbage", jpeg]
        with ThreadPoolExecutor(5) as pool:
            statuses = [s for s, _ in pool.map(
                lambda body: server.json("POST", "/predict", body), bodies)]  # fmt: skip
        assert statuses == [200, 400, 200, 400, 200]
        bomb = encoded(photo(8, 8).convert("1").resize((20_000, 20_000)), "PNG")
        assert server.json("POST", "/predict", bomb)[0] == 413

    def test_pixels_are_refused_with_a_reason(self, server: RunningServer) -> None:
        """Its executors decode: tensors have no way in."""
        import json

        body = {"inputs": [{"name": "pixels", "shape": [1, 224, 224, 3], "datatype": "UINT8",
                            "data": [0] * (224 * 224 * 3)}]}  # fmt: skip
        path = "/v2/models/mobilenet_v3_small/infer"
        status, answer = server.json("POST", path, json.dumps(body).encode())
        assert (status, "send images" in answer["error"]) == (400, True)
