"""The `compile` engine: torch.export and AOTInductor, once, into a package on disk.

Ahead of time instead of `torch.compile` at every start: one package serves every batch size (the
batch is a symbol, so no size compiles again), loads in milliseconds, and cannot start to compile in
the middle of a measurement.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from serving import artifacts, models
from serving.capabilities import device_name
from serving.engines import Say
from serving.engines.network import build_network, dynamic_batch, example
from serving.errors import StartError
from serving.settings import Settings

Call = Callable[[torch.Tensor], torch.Tensor]


def open_compiled(settings: Settings, say: Say, *, channels_last: bool = True) -> Call:
    """The compiled network, from the cache or made now. Callable from several threads.

    Raises:
        StartError: torch.export cannot trace the model, or it does not compile.
    """
    key = {
        "model": models.identity(settings),
        "input": repr(settings.input),
        "precision": settings.precision,
        "device": device_name(settings.device),
        # The number of threads is compiled in.
        "threads": settings.threads,
        "torch": torch.__version__,
        "channels_last": channels_last,
    }

    def build(path: Path) -> None:
        _compile(settings, path, channels_last=channels_last)

    def opens(path: Path) -> Any:
        inductor: Any = importlib.import_module("torch._inductor")
        return inductor.aoti_load_package(str(path))

    try:
        loaded: Call = artifacts.obtain("compile.pt2", key, build, opens, say=say)
    except StartError:
        raise
    except Exception as error:  # export, inductor and the C++ compiler raise of their own kinds
        raise StartError(f"engine compile: {_first_line(error)}") from error
    return loaded


def _compile(settings: Settings, path: Path, *, channels_last: bool) -> None:
    model = models.load(settings)
    device = torch.device(settings.device)
    network = build_network(model, settings.precision, channels_last=channels_last).to(device)
    with torch.no_grad():
        exported = torch.export.export(
            network, (example(model.spec, settings.device),), dynamic_shapes=dynamic_batch()
        )
        inductor: Any = importlib.import_module("torch._inductor")
        # Freezing folds batch normalisation into convolutions and lays weights out once.
        inductor.aoti_compile_and_package(
            exported, package_path=str(path), inductor_configs={"freezing": True}
        )


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
