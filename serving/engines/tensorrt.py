"""TensorRT engines: built once from ONNX, kept on disk, run on a GPU.

The builder drives both modules that NVIDIA ships, `tensorrt` and `tensorrt_rtx`; the latter builds
on a host without a GPU, which is how the builder is tested. Not yet run on a GPU by the
project. The API is that of https://docs.nvidia.com/deeplearning/tensorrt/latest/.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving import artifacts, models
from serving.capabilities import device_name, version_of
from serving.engines import Say
from serving.errors import StartError
from serving.pixels import PixelSpec
from serving.settings import Settings

if TYPE_CHECKING:
    import torch

    from serving.engines.cuda import Buffers, Launch

MODULES = ("tensorrt", "tensorrt_rtx")
INPUT, OUTPUT = "pixels", "logits"
# The profile is tuned for this share of the largest batch: full batches are what capacity needs.
OPT_SHARE = 1.0


def load_module(name: str | None = None) -> Any:
    """`tensorrt`, else `tensorrt_rtx`.

    Raises:
        StartError: neither is installed.
    """
    for candidate in (name,) if name else MODULES:
        try:
            return importlib.import_module(candidate)
        except ImportError:
            continue
    raise StartError("engine tensorrt: needs the extra: pip install 'p99-tuner[tensorrt]'")


def build_plan(trt: Any, onnx: Path, max_batch: int, side: int, *, tf32: bool) -> bytes:
    """Compile an ONNX file with a dynamic batch from 1 to `max_batch`.

    Types are those of the ONNX file: the network is strongly typed, the only kind that TensorRT 11
    still has, so that precision is decided by the export.

    Args:
        side: height and width of the pictures.
        tf32: allow TF32 in fp32 layers; TensorRT's own default is yes.

    Raises:
        StartError: TensorRT cannot parse or build it; the message is its own.
    """
    logger = _logger(trt)
    builder = trt.Builder(logger)
    flags = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(1 << int(flags) if flags is not None else 0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx)):
        problem = parser.get_error(0).desc() if parser.num_errors else "no reason given"
        raise StartError(f"engine tensorrt: the model cannot be parsed: {problem}")
    config = builder.create_builder_config()
    if hasattr(trt.BuilderFlag, "TF32"):
        (config.set_flag if tf32 else config.clear_flag)(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    best = max(round(OPT_SHARE * max_batch), 1)
    profile.set_shape(INPUT, *((batch, side, side, 3) for batch in (1, best, max_batch)))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise StartError("engine tensorrt: the build failed; its log is above")
    return bytes(plan)


def plan_key(trt: Any, settings: Settings) -> dict[str, Any]:
    """Everything that a plan depends on: one that differs in any of it is another plan."""
    return {
        "model": models.identity(settings),
        "input": repr(settings.input),
        "precision": settings.precision,
        "max_batch": settings.max_batch_size,
        "device": device_name(settings.device),
        "module": trt.__name__,
        "version": trt.__version__,
        "torch": version_of("torch"),
    }


def obtain_plan(
    trt: Any, settings: Settings, opens: Callable[[Path], Any], say: Say, folder: Path | None = None
) -> Any:
    """What `opens` makes of the plan's file, built first where there is none.

    Raises:
        StartError: the model cannot be exported, parsed or built.
    """

    def build(path: Path) -> None:
        from serving.engines.network import build_network, write_onnx

        model = models.load(settings)
        with tempfile.TemporaryDirectory() as scratch:
            onnx = Path(scratch) / "model.onnx"
            network = build_network(model, settings.precision, channels_last=False)
            write_onnx(network, model.spec, onnx)
            tf32 = settings.precision == "tf32"
            path.write_bytes(
                build_plan(trt, onnx, settings.max_batch_size, model.spec.crop, tf32=tf32)
            )

    key = plan_key(trt, settings)
    return artifacts.obtain("tensorrt.plan", key, build, opens, folder=folder, say=say)


class Program:
    """A deserialised engine; each lane gets an execution context of its own."""

    def __init__(self, trt: Any, engine: Any, device: torch.device) -> None:
        self._trt, self._engine, self._device = trt, engine, device
        self.classes = int(engine.get_tensor_shape(OUTPUT)[1])

    def lane(self) -> Launch:
        """Launches batches on the current stream."""
        import torch

        context = self._engine.create_execution_context()
        if context is None:
            raise StartError("engine tensorrt: no memory for another execution context")
        ready = [False]

        def launch(buffers: Buffers, size: int) -> int:
            stream = torch.cuda.current_stream(self._device).cuda_stream
            if not ready[0]:  # needs a stream: once, not on every batch
                context.set_optimization_profile_async(0, stream)
                context.set_tensor_address(INPUT, buffers.pixels.data_ptr())
                context.set_tensor_address(OUTPUT, buffers.logits.data_ptr())
                ready[0] = True
            context.set_input_shape(INPUT, (size, *buffers.pixels.shape[1:]))
            if not context.execute_async_v3(stream):
                raise RuntimeError("TensorRT could not launch the batch")
            return size

        return launch


def open_program(
    settings: Settings, device: torch.device, say: Say
) -> tuple[Program, PixelSpec, int]:
    """The engine with its pictures' specification and number of classes.

    Raises:
        StartError: it cannot be built, or not be loaded on this device.
    """
    trt = load_module()

    def opens(path: Path) -> Any:
        runtime = trt.Runtime(_logger(trt))
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:  # another version or device, or no usable GPU
            raise StartError(f"engine tensorrt: {path.name} cannot be loaded on {device}")
        return runtime, engine

    _, engine = obtain_plan(trt, settings, opens, say)
    program = Program(trt, engine, device)
    return program, settings.input or PixelSpec(), program.classes


def _logger(trt: Any) -> Any:
    """Warnings and worse, on standard error, by name."""
    return trt.Logger(trt.Logger.WARNING)
