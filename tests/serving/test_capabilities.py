"""What can run where, decided from facts: no GPU is needed to test a GPU's answers."""

from __future__ import annotations

import pytest

from serving.capabilities import Facts, obstacle, preprocessing_obstacle

EVERYTHING = frozenset({"onnxruntime", "onnx", "onnxscript", "tensorrt", "c++", "nvidia.dali"})
HOPPER = Facts((9, 0), EVERYTHING, frozenset({"CUDAExecutionProvider"}))
TURING = Facts((7, 5), EVERYTHING, frozenset({"CUDAExecutionProvider"}))
CPU = Facts(None, EVERYTHING, frozenset({"CPUExecutionProvider"}))
BARE_CPU = Facts(None, frozenset())


@pytest.mark.parametrize("engine", ["eager", "compile", "cudagraph", "tensorrt", "onnxruntime"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_a_new_gpu_does_everything(engine: str, precision: str) -> None:
    """With everything installed nothing is in the way."""
    assert obstacle(engine, precision, HOPPER) is None


@pytest.mark.parametrize(
    ("engine", "precision", "facts", "words"),
    [
        ("eager", "bf16", TURING, "compute capability 8.0"),
        ("tensorrt", "tf32", TURING, "compute capability 8.0"),
        ("cudagraph", "fp32", CPU, "needs an NVIDIA GPU"),
        ("tensorrt", "fp16", CPU, "needs an NVIDIA GPU"),
        ("eager", "tf32", CPU, "needs an NVIDIA GPU"),
        ("eager", "fp16", CPU, "emulated"),
        ("onnxruntime", "bf16", CPU, "no bf16 convolutions"),
        ("compile", "fp32", BARE_CPU, "C\\+\\+ compiler"),
        ("onnxruntime", "fp32", BARE_CPU, r"p99-tuner\[onnx\]"),
        ("onnxruntime", "fp32", Facts((9, 0), EVERYTHING), "onnxruntime-gpu"),
        ("tensorrt", "fp16", Facts((9, 0), frozenset()), r"p99-tuner\[tensorrt\]"),
    ],
)
def test_the_reason_names_what_is_missing(
    engine: str, precision: str, facts: Facts, words: str
) -> None:
    """Hardware, library or extra."""
    import re

    reason = obstacle(engine, precision, facts)
    assert reason is not None
    assert re.search(words, reason)


def test_eager_and_synthetic_run_anywhere() -> None:
    """They need nothing beyond the installation."""
    assert obstacle("eager", "fp32", BARE_CPU) is None
    assert obstacle("synthetic", "fp32", BARE_CPU) is None


def test_dali_is_an_extra() -> None:
    """Named with how to get it."""
    assert preprocessing_obstacle("dali", CPU) is None
    assert "p99-tuner[dali]" in str(preprocessing_obstacle("dali", BARE_CPU))
