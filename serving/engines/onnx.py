"""The `onnxruntime` engine: exported once, kept on disk, run without PyTorch on a CPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from serving import artifacts, models
from serving.capabilities import version_of
from serving.engines import Engine, Output, Say
from serving.errors import StartError
from serving.pixels import Pixels
from serving.settings import Settings


class OnnxEngine:
    """An onnxruntime session on host memory. On a GPU it copies by itself, there and back."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def run(self, pixels: Pixels | Any, active: int) -> Output:
        began_s = time.perf_counter()
        if not hasattr(pixels, "__array_interface__"):  # a tensor on the device
            tensor: Any = pixels
            pixels = tensor.cpu().numpy()
        (logits,) = self._session.run(["logits"], {"pixels": pixels})
        return Output(logits, time.perf_counter() - began_s, len(pixels))


def open_onnx(settings: Settings, say: Say) -> list[Engine]:
    """One session; on a GPU one for each instance.

    Raises:
        StartError: the model cannot be exported, or no session can be made of it.
    """
    wanted = _providers(settings)

    def opens(path: Path) -> Any:
        return _session(path, settings, wanted)

    key = {
        "model": models.identity(settings),
        "input": repr(settings.input),
        "precision": settings.precision,
        "torch": version_of("torch"),
        "onnxscript": version_of("onnxscript"),
    }
    count = 1 if settings.device == "cpu" else settings.instances
    try:
        return [
            OnnxEngine(artifacts.obtain("onnx.onnx", key, _exporter(settings), opens, say=say))
            for _ in range(count)
        ]
    except StartError:
        raise
    except Exception as error:  # export, protobuf and onnxruntime raise of their own kinds
        text = str(error).strip().splitlines()
        raise StartError(
            f"engine onnxruntime: {type(error).__name__}: {text[0] if text else ''}"
        ) from error


def _exporter(settings: Settings) -> Any:
    def export(path: Path) -> None:
        from serving.engines.network import build_network, write_onnx

        model = models.load(settings)
        write_onnx(build_network(model, settings.precision, channels_last=False), model.spec, path)

    return export


def _session(path: Path, settings: Settings, providers: list[Any]) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings.threads or 1
    # A waiting thread must not burn the core that decodes the next pictures.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if settings.device != "cpu":  # parts of a graph on the CPU would be slow without a word
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return onnxruntime.InferenceSession(str(path), options, providers=providers)


def _providers(settings: Settings) -> list[Any]:
    """TensorRT before CUDA where this build of onnxruntime has it."""
    if settings.device == "cpu":
        return ["CPUExecutionProvider"]
    import onnxruntime

    index = int(settings.device.partition(":")[2] or 0)
    cuda = ("CUDAExecutionProvider", {
        "device_id": index, "use_tf32": int(settings.precision == "tf32")})  # fmt: skip
    if "TensorrtExecutionProvider" not in onnxruntime.get_available_providers():
        return [cuda]
    cache = artifacts.cache_folder() / "onnxruntime-tensorrt"
    return [("TensorrtExecutionProvider", {
        "device_id": index, "trt_engine_cache_enable": True,
        "trt_engine_cache_path": str(cache)}), cuda]  # fmt: skip
