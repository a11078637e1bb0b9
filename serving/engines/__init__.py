"""Engines: from a batch of pixels to logits. One call a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serving.errors import EngineFailure
from serving.pixels import Pixels
from serving.settings import Settings

Say = Callable[[str], None]


@dataclass(frozen=True)
class Output:
    """What one batch gave.

    Args:
        logits: shape (b, classes).
        busy_s: the device's time for it, copies included.
        ran: how many pictures the device computed, padding included.
    """

    logits: NDArray[np.float32]
    busy_s: float
    ran: int


class Uncaptured(EngineFailure):
    """A batch of a size for which no CUDA graph was captured."""


class Engine(Protocol):
    """Runs batches, one at a time. Several engines of one process may run at the same time."""

    def run(self, pixels: Pixels | Any, active: int) -> Output:
        """One batch.

        Args:
            pixels: shape (b, height, width, 3), uint8; an array or a tensor on the device.
            active: batches at work at this moment on all devices, this one included.

        Raises:
            Uncaptured: see there.
        """


def open_engines(settings: Settings, say: Say) -> list[Engine]:
    """The engines of one executor on one device: one on a CPU, `instances` on a GPU.

    Args:
        settings: settled ones, with one device.
        say: told what takes long, for people.

    Raises:
        StartError: this device or installation cannot run it.
    """
    if settings.engine == "synthetic":
        from serving.engines.synthetic import SyntheticEngine

        return [SyntheticEngine(settings.synthetic)]
    from serving.capabilities import check_supported

    check_supported(settings)
    if settings.engine == "onnxruntime":
        from serving.engines.onnx import open_onnx

        return open_onnx(settings, say)
    if settings.device == "cpu":
        from serving.engines.cpu import open_cpu

        return [open_cpu(settings, say)]
    from serving.engines.cuda import open_cuda

    return open_cuda(settings, say)
