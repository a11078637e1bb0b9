"""Every engine that runs without a GPU keeps the contract, with real models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from serving.capabilities import settle
from serving.engines import Engine, open_engines
from serving.errors import StartError
from serving.settings import Settings
from tests.serving.engine_contract import EngineContract, Logits, pictures

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of these tests' own, so that engines are really built."""
    patch = pytest.MonkeyPatch()
    made = tmp_path_factory.mktemp("cache")
    patch.setenv("SERVING_CACHE", str(made))
    yield made
    patch.undo()


def opened(**changes: object) -> Engine:
    settings = settle(Settings.model_validate({"device": "cpu", "threads": 1, **changes}))
    return open_engines(settings, lambda _: None)[0]


@cache
def shared(**changes: str) -> Engine:
    """Opened once for all of a class's tests."""
    return opened(**changes)


@pytest.fixture(scope="module")
def fp32_logits(folder: Path) -> Logits:
    return opened(engine="eager").run(pictures(6), 1).logits


class ModelEngine(EngineContract):
    @pytest.fixture
    def reference(self, fp32_logits: Logits) -> Logits | None:
        return fp32_logits


class TestEager(ModelEngine):
    @pytest.fixture
    def engine(self, folder: Path) -> Engine:
        return shared(engine="eager")


class TestEagerBf16(ModelEngine):
    tolerance = 0.05  # eight bits of mantissa through 50 layers

    @pytest.fixture
    def engine(self, folder: Path) -> Engine:
        return shared(engine="eager", precision="bf16")


class TestOnnxruntime(ModelEngine):
    @pytest.fixture
    def engine(self, folder: Path) -> Engine:
        return shared(engine="onnxruntime")

    def test_is_exported_once(self, engine: Engine, folder: Path) -> None:
        """A second engine opens the file of the first."""
        (path,) = folder.glob("onnx-*.onnx")
        before = path.stat().st_mtime_ns
        opened(engine="onnxruntime")
        assert path.stat().st_mtime_ns == before

    def test_a_damaged_file_is_exported_again(self, engine: Engine, folder: Path) -> None:
        """Half of the bytes are no model."""
        (path,) = folder.glob("onnx-*.onnx")
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        again = opened(engine="onnxruntime").run(pictures(1), 1).logits
        np.testing.assert_allclose(again, engine.run(pictures(1), 1).logits, rtol=1e-4, atol=1e-4)
        assert path.stat().st_size > len(whole) // 2


class TestCompile(ModelEngine):
    @pytest.fixture
    def engine(self, folder: Path) -> Engine:
        return shared(engine="compile")

    def test_no_size_compiles_again(self, engine: Engine, folder: Path) -> None:
        """One package, whatever sizes it has seen."""
        for size in (3, 7, 16):
            engine.run(pictures(size), 1)
        assert len(list(folder.glob("compile-*.pt2"))) == 1


class TestSynthetic(EngineContract):
    @pytest.fixture
    def engine(self) -> Engine:
        settings = Settings.model_validate(
            {"engine": "synthetic", "synthetic": {"base_ms": 1.0, "per_item_ms": 0.1}}
        )
        return open_engines(settle(settings), lambda _: None)[0]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "cudagraph"}, "engine cudagraph on cpu: needs an NVIDIA GPU"),
        ({"engine": "tensorrt"}, "engine tensorrt on cpu: needs an NVIDIA GPU"),
        ({"engine": "onnxruntime", "precision": "bf16"}, "precision bf16 on cpu: onnxruntime has"),
        ({"precision": "fp16"}, "precision fp16 on cpu: needs a GPU"),
    ],
)
def test_what_cannot_run_here_says_why(changes: dict[str, object], message: str) -> None:
    """Refused before anything is loaded."""
    with pytest.raises(StartError, match=message):
        opened(**changes)
