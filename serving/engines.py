"""Engines: from a batch of pixels to the five best classes of each. One call a batch."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serving.errors import StartError
from serving.settings import Settings, Synthetic
from serving.slots import Pixels

if TYPE_CHECKING:
    import torch

TOP = 5


@dataclass(frozen=True)
class Answer:
    """The best classes of each picture, shape (b, 5), best first, and the device's busy time."""

    classes: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    busy_s: float


class Engine(Protocol):
    """Runs batches, one at a time."""

    def run(self, pixels: Pixels, active: int) -> Answer:
        """One batch.

        Args:
            pixels: shape (b, height, width, 3), uint8.
            active: executors at work at this moment, this one included.
        """


class SyntheticEngine:
    """Sleeps by a given S(b) and answers class 0. For tests, demonstrations and benchmarks."""

    def __init__(self, timing: Synthetic) -> None:
        self._timing = timing
        self._random = random.Random(0)

    def run(self, pixels: Pixels, active: int) -> Answer:
        began_s = time.perf_counter()
        size, timing = len(pixels), self._timing
        slowed = 1 + timing.contention * (active - 1)
        jitter = 1 + timing.jitter * self._random.random()
        seconds = (timing.base_ms + timing.per_item_ms * size) / 1000 * slowed * jitter
        time.sleep(max(began_s + seconds - time.perf_counter(), 0))
        classes = np.zeros((size, TOP), dtype=np.int64)
        probabilities = np.zeros((size, TOP), dtype=np.float32)
        return Answer(classes, probabilities, time.perf_counter() - began_s)


class EagerEngine:
    """PyTorch, operator by operator, channels last; normalisation on the device.

    Raises:
        StartError: the device or its memory cannot hold the model.
    """

    def __init__(self, settings: Settings) -> None:
        import torch

        from serving.models import load_model, pixel_spec

        assert settings.model is not None
        self._device = torch.device(settings.device)
        self._cuda = self._device.type == "cuda"
        _set_precision(settings.precision, settings.threads)
        self._dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(
            settings.precision, torch.float32
        )
        spec = pixel_spec(settings.model)
        model = load_model(settings.model, settings.weights)
        try:
            model = model.to(device=self._device, dtype=self._dtype)
            self._model = model.to(memory_format=torch.channels_last)
            # x / 255 normalised is x * scale + shift, one pass over the batch.
            std = torch.tensor(spec.std, device=self._device).view(1, 3, 1, 1)
            mean = torch.tensor(spec.mean, device=self._device).view(1, 3, 1, 1)
            self._scale, self._shift = 1 / (255 * std), -mean / std
            self._staging = self._new_staging(settings.max_batch_size, spec.crop)
        except (RuntimeError, AssertionError) as error:
            raise StartError(f"device {settings.device}: {error}") from error

    def run(self, pixels: Pixels, active: int) -> Answer:
        import torch

        with torch.inference_mode():
            return self._run_cuda(pixels) if self._cuda else self._run_cpu(pixels)

    def _run_cpu(self, pixels: Pixels) -> Answer:
        import torch

        began_s = time.perf_counter()
        probabilities, classes = self._forward(torch.from_numpy(pixels))
        return Answer(classes.numpy(), probabilities.numpy(), time.perf_counter() - began_s)

    def _run_cuda(self, pixels: Pixels) -> Answer:
        """Pinned staging, everything asynchronous, one wait: for the result's event."""
        import torch

        if len(pixels) > len(self._staging):
            self._staging = self._new_staging(len(pixels), pixels.shape[1])
        staged = self._staging[: len(pixels)]
        staged.numpy()[:] = pixels
        event: Any = torch.cuda.Event  # untyped in torch
        began, ended = event(enable_timing=True), event(enable_timing=True)
        began.record()
        probabilities, classes = self._forward(staged.to(self._device, non_blocking=True))
        results = [t.to("cpu", non_blocking=True) for t in (probabilities, classes)]
        ended.record()
        ended.synchronize()
        busy_s = began.elapsed_time(ended) / 1000
        return Answer(results[1].numpy(), results[0].numpy(), busy_s)

    def _forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(b, h, w, 3) uint8 -> best probabilities and classes, both (b, 5)."""
        # Bytes in HWC order seen as CHW are channels last already: no copy.
        x = pixels.permute(0, 3, 1, 2).float().mul_(self._scale).add_(self._shift)
        logits = self._model(x.to(self._dtype)).float()
        probabilities, classes = logits.softmax(1).topk(TOP, dim=1)
        return probabilities, classes

    def _new_staging(self, size: int, crop: int) -> Any:
        import torch

        if not self._cuda:
            return torch.empty(0)
        return torch.empty((size, crop, crop, 3), dtype=torch.uint8, pin_memory=True)


def open_engine(settings: Settings) -> Engine:
    """The engine that resolved settings ask for.

    Raises:
        StartError: this device or installation cannot run it.
    """
    from serving.capabilities import precisions

    if settings.engine == "synthetic":
        return SyntheticEngine(settings.synthetic)
    reason = precisions(settings.device).get(settings.precision)
    if reason is not None:
        raise StartError(f"precision {settings.precision} on {settings.device}: {reason}")
    return EagerEngine(settings)


def _set_precision(precision: str, threads: int | None) -> None:
    """Process-wide: each executor is a process of its own."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    if torch.cuda.is_available():
        mode = "tf32" if precision == "tf32" else "ieee"
        backends: Any = torch.backends  # attributes that its annotations lack
        backends.cuda.matmul.fp32_precision = mode
        backends.cudnn.conv.fp32_precision = mode
