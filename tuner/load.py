"""Open-loop load on a URL, and the raw samples it leaves. Locust runs in a child process."""

from __future__ import annotations

import json
import math
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tuner import arrivals
from tuner.errors import MeasurementError
from tuner.loadgen.wire import Fault, Phase, Rows, stop_line, unpack
from tuner.process import Child

Floats = NDArray[np.float64]

# The generator reports five times a second, while it drains too; silence this long is a hang.
SILENCE_S = 10.0
START_WITHIN_S = 60.0


@dataclass(frozen=True)
class LoadSpec:
    """One phase of load.

    Args:
        timeout_s: of a whole request, from its intended send time.
        drain_s: how long answers are waited for after the last arrival.
        in_flight_cap: the most open requests; arrivals beyond it are not sent and count as late.
    """

    url: str
    rate_rps: float
    arrivals: str
    seed: int
    duration_s: float
    payloads: tuple[Path, ...]
    timeout_s: float = 10.0
    drain_s: float = 5.0
    in_flight_cap: int = 2000


@dataclass(frozen=True)
class Samples:
    """One row for each arrival due so far, in schedule order; times in s since the phase began.

    `sent_s` and `done_s` are NaN where that has not happened. `status` is the HTTP status or a
    `Fault`; `Fault.PENDING` where the request is still open.
    """

    intended_s: Floats
    sent_s: Floats
    done_s: Floats
    status: NDArray[np.int16]

    @property
    def latency_s(self) -> Floats:
        """Response times from the intended send: infinite for failures, NaN while pending."""
        late = np.where(self.status == 200, self.done_s - self.intended_s, np.inf)
        return np.where(self.status == Fault.PENDING, np.nan, late)

    @property
    def offered(self) -> int:
        return len(self.status)

    @property
    def sent(self) -> int:
        return int(np.count_nonzero(self.status != Fault.NOT_SENT))

    @property
    def answered(self) -> int:
        """Requests with an HTTP answer, whatever its status."""
        return int(np.count_nonzero(self.status > 0))

    @property
    def send_lag_p99_ms(self) -> float:
        """P99 of actual minus intended send time; NaN when nothing was sent."""
        lag = (self.sent_s - self.intended_s)[self.status != Fault.NOT_SENT]
        lag = lag[~np.isnan(lag)]
        return float(np.quantile(lag, 0.99) * 1000) if len(lag) else math.nan

    def errors(self) -> dict[str, int]:
        """How many requests failed, by HTTP status or kind of fault."""
        failed = self.status[(self.status != 200) & (self.status != Fault.PENDING)]
        return {_kind(status): n for status, n in sorted(Counter(failed.tolist()).items())}


@dataclass(frozen=True)
class LoadResult:
    """The finished phase.

    `elapsed_s` is the time in which arrivals were due: the drain does not count. `cpu_share` is
    the generator's use of one core in that time.
    """

    samples: Samples
    elapsed_s: float
    cpu_share: float
    connections: int
    in_flight_peak: int
    pacer: str
    nice: int


Observer = Callable[[float, Samples], bool]


class LoadGenerator(Protocol):
    """Sends phases of load, one at a time."""

    def run(self, spec: LoadSpec, observe: Observer | None = None) -> LoadResult:
        """Send one phase.

        Args:
            observe: called several times a second with the elapsed time and the samples so far;
                when it returns True nothing more is sent, and what is in flight is drained.

        Raises:
            MeasurementError: the generator itself failed.
        """

    def close(self) -> None: ...


class LocustLoad:
    """The real generator: one Locust process that serves phase after phase.

    Args:
        scratch: a folder for its log.
        silence_s: without a word for so long, it hangs.
    """

    def __init__(self, scratch: Path, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._log_path = scratch / "loadgen.log"
        self._child: Child | None = None
        self._hello: dict[str, Any] = {}
        self._phases = 0

    def run(self, spec: LoadSpec, observe: Observer | None = None) -> LoadResult:
        self._phases += 1
        phase = _phase_of(spec, self._phases)
        try:
            self._ensure_started()
            self._write(phase.to_line())
            return self._follow(spec, phase, observe)
        except BaseException:
            # Whatever was in flight belongs to this phase; the next one gets a fresh process.
            self.close()
            raise

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.terminate(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self, spec: LoadSpec, phase: Phase, observe: Observer | None) -> LoadResult:
        ledger, stopped = Ledger(spec), False
        for event in self._events(self._silence_s):
            if event.get("phase") != phase.id or event["event"] == "started":
                continue
            ledger.add(unpack(event["rows"]), int(event["due"]))
            if event["event"] == "result":
                return self._result(event, ledger.samples())
            elapsed_s = min(float(event["elapsed_s"]), spec.duration_s)
            if observe and not stopped and observe(elapsed_s, ledger.samples()):
                stopped = True
                self._write(stop_line(phase.id))
        raise AssertionError("events end with an exception")

    def _result(self, event: dict[str, Any], samples: Samples) -> LoadResult:
        return LoadResult(
            samples=samples,
            elapsed_s=float(event["elapsed_s"]),
            cpu_share=float(event["cpu_share"]),
            connections=int(event["connections"]),
            in_flight_peak=int(event["in_flight_peak"]),
            pacer=str(self._hello["pacer"]),
            nice=int(self._hello["nice"]),
        )

    def _ensure_started(self) -> None:
        if self._child is not None and self._child.poll() is None:
            return
        pipe = subprocess.PIPE
        self._child = Child.start(
            [sys.executable, "-m", "tuner.loadgen"],
            log_path=self._log_path,
            stdin=pipe,
            stdout=pipe,
        )
        self._hello = next(e for e in self._events(START_WITHIN_S) if e["event"] == "hello")

    def _write(self, line: bytes) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(line)
            self._child.stdin.flush()
        except OSError as error:
            raise self._failure("ended") from error

    def _events(self, silence_s: float) -> Iterator[dict[str, Any]]:
        """Events as they come.

        Raises:
            MeasurementError: the process ended, or said nothing for too long.
        """
        assert self._child is not None
        assert self._child.stdout is not None
        stream = self._child.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            rest, heard_s = b"", time.monotonic()
            while selector.select(max(heard_s + silence_s - time.monotonic(), 0)):
                chunk = stream.read1(1 << 16)  # type: ignore[attr-defined]
                if not chunk:
                    raise self._failure("ended")
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield json.loads(line)
                heard_s = time.monotonic()
        raise self._failure(f"said nothing for {silence_s:.0f} s")

    def _failure(self, what: str) -> MeasurementError:
        tail = self._child.log_tail() if self._child else ""
        return MeasurementError(
            f"The load generator {what}.", hint=f"Last lines of its log:\n{tail}" if tail else None
        )


class Ledger:
    """Rows as they arrive, against the schedule that both sides drew.

    The schedule is drawn here a second time rather than sent: it is a function of the spec.
    """

    def __init__(self, spec: LoadSpec) -> None:
        self._intended = arrivals.draw(spec.arrivals, spec.rate_rps, spec.seed, spec.duration_s)
        n = len(self._intended)
        self._sent, self._done = np.full(n, np.nan), np.full(n, np.nan)
        self._status = np.full(n, Fault.PENDING, dtype=np.int16)
        self._due = 0

    def add(self, rows: Rows, due: int) -> None:
        """Enter finished requests, and how many arrivals were due by now."""
        index = rows["index"]
        self._sent[index], self._done[index] = rows["sent"] / 1e9, rows["done"] / 1e9
        self._status[index] = rows["status"]
        self._due = due

    def samples(self) -> Samples:
        """A copy of the rows due so far."""
        due = self._due
        return Samples(
            self._intended[:due].copy(),
            self._sent[:due].copy(),
            self._done[:due].copy(),
            self._status[:due].copy(),
        )


def _phase_of(spec: LoadSpec, number: int) -> Phase:
    return Phase(
        id=number,
        url=spec.url,
        rate_rps=spec.rate_rps,
        arrivals=spec.arrivals,
        seed=spec.seed,
        duration_s=spec.duration_s,
        timeout_s=spec.timeout_s,
        drain_s=spec.drain_s,
        in_flight_cap=spec.in_flight_cap,
        payloads=tuple(str(p) for p in spec.payloads),
    )


def _kind(status: int) -> str:
    return str(status) if status > 0 else Fault(status).name.lower()
