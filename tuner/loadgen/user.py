"""The Locust user that owns the schedule: one greenlet an arrival, never waiting for answers."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import gevent
import numpy as np
from gevent.queue import Queue
from locust import User, task

from tuner import arrivals
from tuner.loadgen.client import Client
from tuner.loadgen.pacer import Pacer
from tuner.loadgen.wire import PROGRESS_S, Fault, Phase, pack

Row = tuple[int, int, int, int]


class PhaseRun:
    """One phase in progress: its schedule, what is in flight, what has been answered."""

    def __init__(self, phase: Phase, bodies: list[bytes], environment: Any, pacer: Pacer) -> None:
        self.phase = phase
        self.due = 0
        self.in_flight_peak = 0
        self._environment = environment
        self._pacer = pacer
        self._offsets = (
            arrivals.draw(phase.arrivals, phase.rate_rps, phase.seed, phase.duration_s) * 1e9
        ).astype(np.int64)
        # Payload choice has its own stream, so that it does not change with the arrival process.
        choice = np.random.default_rng((phase.seed, 1)).integers(len(bodies), size=self.offered)
        self._bodies = [bodies[i] for i in choice]
        self._client = Client(phase.url, phase.timeout_s)
        self._open: dict[int, Any] = {}
        self._rows: list[Row] = []
        self._base_ns = 0
        self._end_ns = round(phase.duration_s * 1e9)
        self._cpu_s = 0.0
        self._cpu_share = 0.0

    @property
    def offered(self) -> int:
        return len(self._offsets)

    def start(self) -> int:
        """Set the time from which offsets count, a moment ahead; returns it."""
        self._cpu_s = _cpu_s()
        self._base_ns = time.monotonic_ns() + 20_000_000  # 20 ms: the first greenlets are ready
        return self._base_ns

    def send_all(self) -> None:
        """Spawn every arrival at its time, then wait for the answers, at most the drain."""
        for index, offset in enumerate(self._offsets.tolist()):
            self._pacer.sleep_until(self._base_ns + offset)
            if offset > self._end_ns:
                break
            self.due = index + 1
            if len(self._open) >= self.phase.in_flight_cap:
                self._enter(index, offset, offset, Fault.NOT_SENT)
                continue
            self._open[index] = gevent.spawn(self._one, index, offset)
            self.in_flight_peak = max(self.in_flight_peak, len(self._open))
        self._pacer.sleep_until(self._base_ns + self._end_ns)
        # Before the drain, whose idle time would hide a generator too busy to send on time.
        self._cpu_share = (_cpu_s() - self._cpu_s) / max(self.elapsed_s(), 1e-9)
        self._drain()

    def stop(self) -> None:
        """Send nothing that is due after this moment."""
        self._end_ns = min(self._end_ns, max(time.monotonic_ns() - self._base_ns, 0))
        self._pacer.wake()

    def take_rows(self) -> str:
        """The rows finished since the last call, packed."""
        rows, self._rows = self._rows, []
        return pack(rows)

    def elapsed_s(self) -> float:
        return max((time.monotonic_ns() - self._base_ns) / 1e9, 0.0)

    def totals(self) -> dict[str, Any]:
        """What the result says beside the rows; Locust's own counts must agree with them."""
        return {
            "elapsed_s": self._end_ns / 1e9,
            "cpu_share": self._cpu_share,
            "locust_requests": self._environment.stats.total.num_requests,
            "locust_failures": self._environment.stats.total.num_failures,
            "connections": self._client.pool.opened,
            "in_flight_peak": self.in_flight_peak,
        }

    def close(self) -> None:
        self._client.close()

    def _one(self, index: int, offset: int) -> None:
        intended_ns = self._base_ns + offset
        deadline_ns = intended_ns + round(self.phase.timeout_s * 1e9)
        status, length = self._client.post(self._bodies[index], deadline_ns)
        done = time.monotonic_ns() - self._base_ns
        sent = gevent.getcurrent().sent_ns - self._base_ns
        del self._open[index]
        self._enter(index, sent, done, status, length)

    def _enter(self, index: int, sent: int, done: int, status: int, length: int = 0) -> None:
        """A finished request, for the tuner and for Locust's own statistics."""
        self._rows.append((index, sent, done, status))
        latency_ms = (done - int(self._offsets[index])) / 1e6
        self._environment.events.request.fire(
            request_type="POST",
            name=self.phase.url,
            response_time=None if status == Fault.NOT_SENT else latency_ms,
            response_length=length,
            exception=None if status == 200 else RuntimeError(f"status {status}"),
            context={},
        )

    def _drain(self) -> None:
        """Wait for the open requests; what is not answered in time is recorded, not dropped."""
        gevent.joinall(list(self._open.values()), timeout=self.phase.drain_s)
        gevent.killall(list(self._open.values()))
        now = time.monotonic_ns()
        for index, greenlet in self._open.items():
            sent_ns = getattr(greenlet, "sent_ns", now)
            self._enter(index, sent_ns - self._base_ns, now - self._base_ns, Fault.UNANSWERED)
        self._open.clear()


class OpenLoopUser(User):
    """Runs the phases put into `phases`, one after the other, reporting through `emit`.

    Both are set on the class before the runner starts it: Locust constructs users itself.
    """

    phases: Queue
    emit: Any
    current: PhaseRun | None = None
    _bodies: dict[tuple[str, ...], list[bytes]] = {}  # noqa: RUF012 - one user, one cache

    @task
    def run_phases(self) -> None:
        pacer = Pacer()
        type(self).emit("hello", pacer=pacer.kind, self_test_lag_ms=pacer.self_test_lag_ms())
        while True:
            self._run(self.phases.get(), pacer)

    def _run(self, phase: Phase, pacer: Pacer) -> None:
        if phase.payloads not in self._bodies:
            self._bodies[phase.payloads] = [Path(p).read_bytes() for p in phase.payloads]
        self.environment.stats.clear_all()
        run = PhaseRun(phase, self._bodies[phase.payloads], self.environment, pacer)
        emit, kind = type(self).emit, type(self)
        emit("started", phase=phase.id, base_ns=run.start())
        kind.current = run
        reporter = gevent.spawn(_report, run, emit)
        try:
            run.send_all()
        finally:
            reporter.kill()
            kind.current = None
            run.close()
        emit("result", phase=phase.id, due=run.due, rows=run.take_rows(), **run.totals())


def _report(run: PhaseRun, emit: Any) -> None:
    while True:
        gevent.sleep(PROGRESS_S)
        emit("progress", phase=run.phase.id, elapsed_s=run.elapsed_s(), due=run.due,
             rows=run.take_rows())  # fmt: skip


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
