"""Shipped fakes, held to the same contract tests as the real things."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tuner import arrivals
from tuner.load import Floats, LoadResult, LoadSpec, Observer, Samples
from tuner.loadgen.wire import PROGRESS_S, Fault


@dataclass
class FakeClock:
    """A monotonic clock that only moves when told."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass(frozen=True)
class SimulatedServer:
    """A batching server as an event simulation: timer from the first request, FIFO, no bound.

    Args:
        service_s: seconds of a batch by its size.
    """

    service_s: Callable[[int], float]
    window_s: float = 0.0
    max_batch: int = 1
    instances: int = 1

    def finish_times(self, arrived_s: Floats) -> tuple[Floats, list[int]]:
        """When each request is answered, and the batch sizes in order of their start."""
        free_s = [0.0] * self.instances
        done_s = np.empty(len(arrived_s))
        sizes, first = list[int](), 0
        while first < len(arrived_s):
            worker = min(range(self.instances), key=free_s.__getitem__)
            last = first + self.max_batch - 1
            full_s = arrived_s[last] if last < len(arrived_s) else math.inf
            ready_s = min(arrived_s[first] + self.window_s, full_s)
            start_s = max(free_s[worker], ready_s)
            waiting = int(np.searchsorted(arrived_s, start_s, side="right")) - first
            size = min(waiting, self.max_batch)
            free_s[worker] = start_s + self.service_s(size)
            done_s[first : first + size] = free_s[worker]
            sizes.append(size)
            first += size
        return done_s, sizes


class SimulatedLoad:
    """A load generator in virtual time against a simulated server; nothing is sent anywhere.

    Args:
        server_of: the server behind a URL; looked up for each phase, so that tests can change it.
    """

    def __init__(self, server_of: Callable[[str], SimulatedServer]) -> None:
        self._server_of = server_of
        self.batch_sizes: list[int] = []

    def run(self, spec: LoadSpec, observe: Observer | None = None) -> LoadResult:
        intended = arrivals.draw(spec.arrivals, spec.rate_rps, spec.seed, spec.duration_s)
        done, self.batch_sizes = self._server_of(spec.url).finish_times(intended)
        elapsed_s = spec.duration_s
        for tick in range(1, math.ceil(spec.duration_s / PROGRESS_S)):
            now_s = tick * PROGRESS_S
            if observe and observe(now_s, _seen(intended, done, now_s)):
                elapsed_s = now_s
                break
        sent = intended[intended <= elapsed_s]
        last_s = elapsed_s + spec.drain_s
        status = np.where(done[: len(sent)] <= last_s, 200, Fault.UNANSWERED).astype(np.int16)
        timed_out = done[: len(sent)] - sent > spec.timeout_s
        status[timed_out] = Fault.TIMEOUT
        samples = Samples(sent, sent.copy(), np.minimum(done[: len(sent)], last_s), status)
        return LoadResult(samples, elapsed_s, 0.0, 1, 1, "simulated", 0)

    def close(self) -> None:
        """Nothing to end."""


def _seen(intended: Floats, done: Floats, now_s: float) -> Samples:
    """The samples as of a virtual time: what is not answered yet is pending."""
    due = intended <= now_s
    intended, done = intended[due], done[due]
    answered = done <= now_s
    status = np.where(answered, 200, Fault.PENDING).astype(np.int16)
    return Samples(intended, intended.copy(), np.where(answered, done, np.nan), status)
