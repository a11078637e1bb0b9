"""The engine that only takes time: for tests, demonstrations and benchmarks of the search."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from serving.engines import Output
from serving.pixels import Pixels
from serving.settings import Synthetic

CLASSES = 10


class SyntheticEngine:
    """Sleeps by a given S(b) and answers class 0; its device's speed is the first of `speeds`."""

    def __init__(self, timing: Synthetic) -> None:
        self._timing = timing
        self._speed = timing.speeds[0] if timing.speeds else 1.0
        self._random = random.Random(0)

    def run(self, pixels: Pixels | Any, active: int) -> Output:
        began_s = time.perf_counter()
        size, timing = len(pixels), self._timing
        slowed = (1 + timing.contention * (active - 1)) / self._speed
        jitter = 1 + timing.jitter * self._random.random()
        seconds = (timing.base_ms + timing.per_item_ms * size) / 1000 * slowed * jitter
        time.sleep(max(began_s + seconds - time.perf_counter(), 0))
        logits = np.zeros((size, CLASSES), dtype=np.float32)
        return Output(logits, time.perf_counter() - began_s, size)
