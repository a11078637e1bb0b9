"""PyTorch on a CPU: operator by operator, or compiled ahead of time into one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from serving import models
from serving.engines import Engine, Output, Say
from serving.engines.compiled import open_compiled
from serving.engines.network import build_network
from serving.pixels import Pixels
from serving.settings import Settings


class CpuEngine:
    """Calls a network that lives in this process's memory."""

    def __init__(self, network: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._network = network

    def run(self, pixels: Pixels | Any, active: int) -> Output:
        began_s = time.perf_counter()
        with torch.inference_mode():
            logits = self._network(torch.as_tensor(pixels)).numpy()
        return Output(logits, time.perf_counter() - began_s, len(pixels))


def open_cpu(settings: Settings, say: Say) -> Engine:
    """The `eager` or the `compile` engine.

    Raises:
        StartError: the model does not load or does not compile.
    """
    torch.set_num_threads(settings.threads or 1)
    if settings.engine == "compile":
        return CpuEngine(open_compiled(settings, say))
    # Channels last is what oneDNN's convolutions compute in; without it they copy back and forth.
    return CpuEngine(build_network(models.load(settings), settings.precision, channels_last=True))
