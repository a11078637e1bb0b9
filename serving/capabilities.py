"""What this device and installation can do, and why not for the rest."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, get_args

import psutil

from serving import __version__
from serving.errors import SettingsError, StartError
from serving.settings import LIVE, EngineName, Precision, PreprocessingName, Settings, resolved

ENGINES: tuple[str, ...] = get_args(EngineName)
PRECISIONS: tuple[str, ...] = get_args(Precision)
PREPROCESSING: tuple[str, ...] = get_args(PreprocessingName)
# Compute capability from which on a GPU has bf16 and tf32.
AMPERE = (8, 0)


@dataclass(frozen=True)
class Facts:
    """What decides whether an engine can run: of one device, and of the installation.

    Args:
        compute: (major, minor) of an NVIDIA GPU; None for a CPU.
        has: importable modules and programs on the path, of those that matter.
        providers: execution providers of the installed onnxruntime.
    """

    compute: tuple[int, int] | None
    has: frozenset[str]
    providers: frozenset[str] = frozenset()


def engine_obstacle(engine: str, facts: Facts) -> str | None:
    """Why this engine cannot run there in any precision; None: it can."""
    gpu = facts.compute is not None
    if engine == "cudagraph":
        return None if gpu else "needs an NVIDIA GPU"
    if engine == "tensorrt":
        if not gpu:
            return "needs an NVIDIA GPU"
        return (
            None
            if "tensorrt" in facts.has
            else "needs the extra: pip install 'p99-tuner[tensorrt]'"
        )
    if engine == "compile" and not gpu:
        return None if "c++" in facts.has else "needs a C++ compiler on the path: g++ or clang++"
    if engine == "onnxruntime":
        if not {"onnxruntime", "onnx", "onnxscript"} <= facts.has:
            return "needs the extra: pip install 'p99-tuner[onnx]'"
        if gpu and "CUDAExecutionProvider" not in facts.providers:
            return "needs onnxruntime-gpu: the installed onnxruntime has no CUDAExecutionProvider"
    return None


def precision_obstacle(precision: str, facts: Facts) -> str | None:
    """Why this device cannot compute in this precision with any engine."""
    if facts.compute is None:
        return {
            "tf32": "needs an NVIDIA GPU",
            "fp16": "needs a GPU: on this CPU it is emulated",
        }.get(precision)
    if precision in ("tf32", "bf16") and facts.compute < AMPERE:
        return "needs an NVIDIA GPU of compute capability 8.0 or newer"
    return None


def obstacle(engine: str, precision: str, facts: Facts) -> str | None:
    """Why an engine cannot run in a precision on a device; None: it can."""
    if engine == "synthetic":  # computes nothing, in any precision
        return None
    found = engine_obstacle(engine, facts) or precision_obstacle(precision, facts)
    if found is None and engine == "onnxruntime" and facts.compute is None and precision != "fp32":
        return f"onnxruntime has no {precision} convolutions on a CPU"
    return found


def preprocessing_obstacle(kind: str, facts: Facts) -> str | None:
    """Why pictures cannot be prepared in this way."""
    if kind == "dali" and "nvidia.dali" not in facts.has:
        return "needs the extra: pip install 'p99-tuner[dali]'"
    return None


def check_supported(settings: Settings) -> None:
    """Raise StartError if a settled device cannot do what it is asked for."""
    facts = take_facts(settings.device)
    if (reason := engine_obstacle(settings.engine, facts)) is not None:
        raise StartError(f"engine {settings.engine} on {settings.device}: {reason}")
    if (reason := obstacle(settings.engine, settings.precision, facts)) is not None:
        raise StartError(f"precision {settings.precision} on {settings.device}: {reason}")


@cache
def take_facts(device: str) -> Facts:
    """The facts of a device that exists."""
    modules = ("onnxruntime", "onnx", "onnxscript", "tensorrt", "nvidia.dali")
    has = {name for name in modules if _importable(name)}
    # What inductor looks for, in its order.
    if any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name):
        has.add("c++")
    compute = None
    if device.startswith("cuda"):
        import torch

        compute = torch.cuda.get_device_capability(device)
    return Facts(compute, frozenset(has), _providers() if "onnxruntime" in has else frozenset())


def _importable(name: str) -> bool:
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _providers() -> frozenset[str]:
    import onnxruntime

    return frozenset(onnxruntime.get_available_providers())


def version_of(package: str) -> str | None:
    """The installed version of a distribution; None: it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_device(device: str) -> None:
    """Raise SettingsError if there is no such device."""
    if not device.startswith("cuda"):
        return
    import torch

    if not torch.cuda.is_available():
        raise SettingsError(
            f"device: {device} was asked for, but no usable NVIDIA GPU was found. Use device cpu, "
            "or check the driver with nvidia-smi."
        )
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise SettingsError(
            f"device: {device} was asked for, but there are only {torch.cuda.device_count()} GPUs "
            "(cuda:0 and up)."
        )


def settle(settings: Settings) -> Settings:
    """The settings resolved for this machine. A synthetic server is never on a GPU.

    Raises:
        SettingsError: the device or the model does not exist here.
    """
    if settings.engine == "synthetic":
        count = len(settings.devices)
        return resolved(
            settings.model_copy(update={"device": ",".join(["cpu"] * count)}), has_cuda=False
        )
    from serving import models

    has_cuda = False
    if settings.device == "auto":
        import torch

        has_cuda = torch.cuda.is_available()
    settled = resolved(settings, has_cuda=has_cuda)
    for device in settled.devices:
        check_device(device)
    models.check(settled)
    # Executors read it from here, so that one with a cached engine need not ask the model.
    return settled.model_copy(update={"input": models.pixel_spec(settled)})


def describe(settings: Settings) -> dict[str, Any]:
    """The whole answer of `--describe`, JSON-ready.

    Raises:
        StartError: the device, the model or its weights cannot be had.
    """
    import torch
    import torchvision

    from serving import models

    settled = settle(settings)
    model = models.load(settled)
    facts = take_facts(settled.devices[0])
    return {
        "server": {"name": "serving", "version": __version__},
        "defaults": settled.model_dump(mode="json"),
        "live": list(LIVE),
        "devices": devices(),
        "precisions": {p: precision_obstacle(p, facts) for p in PRECISIONS},
        "engines": {e: engine_obstacle(e, facts) for e in ENGINES},
        "combinations": {e: {p: obstacle(e, p, facts) for p in PRECISIONS} for e in ENGINES},
        "preprocessing": {
            kind: preprocessing_obstacle(kind, facts)
            for kind in PREPROCESSING
            if kind != "model" or model.preprocess is not None
        },
        "model": {
            "name": settled.model,
            "sha256": model.sha256,
            "parameters": sum(p.numel() for p in model.module.parameters()),
        },
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "cuda": torch.version.cuda if torch.cuda.is_available() else None,
            "onnxruntime": version_of("onnxruntime") or version_of("onnxruntime-gpu"),
            "tensorrt": version_of("tensorrt"),
            "dali": version_of("nvidia-dali-cuda130"),
        },
    }


def devices() -> list[dict[str, Any]]:
    """The CPU and every GPU."""
    import torch

    found: list[dict[str, Any]] = [
        {"id": "cpu", "name": device_name("cpu"),
         "memory_bytes": psutil.virtual_memory().available}
    ]  # fmt: skip
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "id": f"cuda:{index}",
                "name": properties.name,
                "memory_bytes": properties.total_memory,
            }
        )
    return found


def device_name(device: str) -> str:
    """What the hardware calls itself; engines are built for it."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
