"""TensorRT's builder, for real: through `tensorrt_rtx`, which builds on a host without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving.capabilities import settle
from serving.engines.tensorrt import load_module, obtain_plan, plan_key
from serving.settings import Settings

pytestmark = pytest.mark.slow

trt = pytest.importorskip("tensorrt_rtx")


def settings(**changes: object) -> Settings:
    given = {"device": "cpu", "model": "mobilenet_v3_small", "max_batch_size": 8, **changes}
    return settle(Settings.model_validate(given))


def opened(path: Path) -> bytes:
    return path.read_bytes()


def obtained(folder: Path, said: list[str], **changes: object) -> bytes:
    plan: bytes = obtain_plan(trt, settings(**changes), opened, said.append, folder)
    return plan


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_builds_once_and_again_when_damaged(tmp_path: Path, precision: str) -> None:
    """A plan for each precision; kept on disk; rebuilt when its bytes have changed."""
    said = list[str]()
    first = obtained(tmp_path, said, precision=precision)
    assert len(first) > 1_000_000
    assert obtained(tmp_path, said, precision=precision) == first
    assert len(said) == 1
    (path,) = tmp_path.glob("tensorrt-*.plan")
    path.write_bytes(first[:1000])
    assert len(obtained(tmp_path, said, precision=precision)) > 1_000_000
    assert len(said) == 2


def test_half_precision_halves_the_weights(tmp_path: Path) -> None:
    """The precision of the export is the precision of the plan."""
    fp32, fp16 = (obtained(tmp_path, [], precision=p) for p in ("fp32", "fp16"))
    assert len(fp16) < 0.75 * len(fp32)


@pytest.mark.parametrize(
    "change", [{"model": "resnet18"}, {"precision": "fp16"}, {"max_batch_size": 4}]
)
def test_what_changes_a_plan_changes_its_key(change: dict[str, Any]) -> None:
    """Model, precision and largest batch; versions and device are in it as well."""
    key = plan_key(trt, settings())
    assert plan_key(trt, settings(**change)) != key
    assert {"device", "version", "module", "torch"} <= set(key)


def test_either_module_drives_the_builder() -> None:
    """`tensorrt` where it is installed, else `tensorrt_rtx`."""
    assert load_module().__name__ in ("tensorrt", "tensorrt_rtx")
    assert load_module("tensorrt_rtx").__name__ == "tensorrt_rtx"
