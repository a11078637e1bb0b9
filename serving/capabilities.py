"""What this device and installation can do, and why not for the rest."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

from serving import __version__
from serving.errors import SettingsError
from serving.settings import LIVE, Settings, resolved

ENGINES: dict[str, str | None] = {"eager": None, "synthetic": None}


def precisions(device: str) -> dict[str, str | None]:
    """Each precision with None, or the reason why the device cannot do it."""
    if not device.startswith("cuda"):
        return {
            "fp32": None,
            "bf16": None,
            "tf32": "needs an NVIDIA GPU",
            "fp16": "needs a GPU: on this CPU it is emulated",
        }
    import torch

    major, _ = torch.cuda.get_device_capability(device)
    ampere = None if major >= 8 else "needs an NVIDIA GPU of compute capability 8.0 or newer"
    return {"fp32": None, "fp16": None, "tf32": ampere, "bf16": ampere}


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
        return resolved(settings.model_copy(update={"device": "cpu"}), has_cuda=False)
    from serving.models import check_name

    has_cuda = False
    if settings.device != "cpu":
        import torch

        has_cuda = torch.cuda.is_available()
    check_device(settings.device)
    settled = resolved(settings, has_cuda=has_cuda)
    check_name(str(settled.model))
    return settled


def describe(settings: Settings) -> dict[str, Any]:
    """The whole answer of `--describe`, JSON-ready.

    Raises:
        StartError: the device, the model or its weights cannot be had.
    """
    import torch
    import torchvision

    from serving.models import load_model, weights_sha256
    from serving.preprocess import KINDS

    settled = settle(settings)
    model = load_model(str(settled.model), settled.weights)
    return {
        "server": {"name": "serving", "version": __version__},
        "defaults": settled.model_dump(mode="json"),
        "live": list(LIVE),
        "devices": devices(),
        "precisions": precisions(settled.device),
        "engines": dict(ENGINES),
        "preprocessing": dict.fromkeys(KINDS),
        "model": {
            "name": settled.model,
            "sha256": weights_sha256(model),
            "parameters": sum(p.numel() for p in model.parameters()),
        },
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        },
    }


def devices() -> list[dict[str, Any]]:
    """The CPU and every GPU."""
    import torch

    found: list[dict[str, Any]] = [
        {"id": "cpu", "name": _cpu_name(), "memory_bytes": psutil.virtual_memory().available}
    ]
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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
