"""One phase under load: send a schedule, judge it as it runs, certify what was sent."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tuner.load import LoadGenerator, LoadResult, LoadSpec, Samples
from tuner.measurement import Certificate, Measurement
from tuner.probe import DeviceProbe
from tuner.server import Server
from tuner.verdict import NO_EVIDENCE, Evidence, Outcome, Verdict, is_futile, judge

# A void phase says something about this host at this moment, so it is worth two more tries.
VOID_REPEATS = 2
# Latency is counted from the intended send, so a late send makes the server look worse than it is:
# tolerated up to one twentieth of the budget, and never held against a generator below 2 ms, which
# is what an unprivileged process on a shared core reaches.
LAG_SHARE_OF_BUDGET = 0.05
LAG_FLOOR_MS = 2.0
# Queueing inside the generator (one core, Python) bends the arrivals long before it is saturated.
GENERATOR_CPU_LIMIT = 0.8
# Warm-up: the medians of the last two windows agree to a quarter, or the time is up.
WARM_WINDOW_S = 0.5
WARM_LIMIT_S = 3.0
WARM_AGREEMENT = 0.25


@dataclass(frozen=True)
class Load:
    """What is sent at every rate: payloads, arrival process, budget, confidence.

    Args:
        timeout_s: after which an unanswered request is given up (it was late long before).
    """

    payloads: tuple[Path, ...]
    arrivals: str
    budget_ms: float
    confidence: float
    timeout_s: float = 10.0


@dataclass(frozen=True)
class Rig:
    """The instruments of one measurement: a generator, a server under test, a device probe."""

    generator: LoadGenerator
    server: Server
    probe: DeviceProbe
    load: Load

    def measure(
        self,
        phase: str,
        rate_rps: float,
        *,
        seed: int,
        limit_s: float,
        confidence: float = 0.0,
        earlier: Evidence = NO_EVIDENCE,
    ) -> Measurement:
        """Measure one phase, again if it was void; the last one may still be void.

        Args:
            limit_s: the phase ends at its verdict, and undecided after this many seconds, or as
                soon as it will clearly be.
            confidence: instead of the load's own, for a verdict that must weigh more.
            earlier: evidence that earlier phases bring to the verdict.

        Raises:
            ServerError: the server died or no longer answers.
        """
        load = replace(self.load, confidence=confidence or self.load.confidence)
        for _ in range(1 + VOID_REPEATS):
            measurement = self._once(load, phase, rate_rps, seed, limit_s, earlier)
            if measurement.certificate.fault is None:
                break
        return measurement

    def warm_up(self, rate_rps: float, *, seed: int) -> float:
        """Send traffic until the response time is steady; the seconds it took."""
        steady = _Steady()
        result = self.generator.run(self._spec(rate_rps, seed, WARM_LIMIT_S), steady.observe)
        self.server.check_alive()
        return result.elapsed_s

    def _once(
        self,
        load: Load,
        phase: str,
        rate_rps: float,
        seed: int,
        limit_s: float,
        earlier: Evidence,
    ) -> Measurement:
        spec = self._spec(rate_rps, seed, limit_s)
        before = self.server.snapshot()
        self.probe.begin()

        def decided(elapsed_s: float, samples: Samples) -> bool:
            verdict = verdict_of(samples, elapsed_s, load, earlier)
            return verdict.outcome is not Outcome.UNDECIDED or is_futile(
                verdict, earlier, elapsed_s=elapsed_s, limit_s=limit_s
            )

        result = self.generator.run(spec, decided)
        self.server.check_alive()
        work = self.server.work_since(before)
        verdict = verdict_of(result.samples, result.elapsed_s, load, earlier)
        good = np.count_nonzero(result.samples.latency_s * 1000 <= load.budget_ms)
        return Measurement(
            phase=phase,
            rate_rps=rate_rps,
            seed=seed,
            arrivals=load.arrivals,
            duration_s=result.elapsed_s,
            verdict=verdict,
            goodput_rps=float(good) / result.elapsed_s,
            errors=result.samples.errors(),
            certificate=certify(result, verdict),
            work=work,
            device=self.probe.end(work),
            latencies_ms=(result.samples.latency_s * 1000).astype(np.float32),
        )

    def _spec(self, rate_rps: float, seed: int, duration_s: float) -> LoadSpec:
        return LoadSpec(
            url=f"{self.server.url}/predict",
            rate_rps=rate_rps,
            arrivals=self.load.arrivals,
            seed=seed,
            duration_s=duration_s,
            timeout_s=self.load.timeout_s,
            payloads=self.load.payloads,
        )


def verdict_of(samples: Samples, elapsed_s: float, load: Load, earlier: Evidence) -> Verdict:
    """The verdict on samples so far."""
    return judge(
        samples.intended_s,
        samples.latency_s * 1000,
        elapsed_s=elapsed_s,
        budget_ms=load.budget_ms,
        confidence=load.confidence,
        earlier=earlier,
    )


def certify(result: LoadResult, verdict: Verdict) -> Certificate:
    """What was offered and sent, and whether that is the load that was asked for.

    Late sends void no miss that would be one without them: an overloaded server on the same host
    is what delays them.
    """
    samples = result.samples
    lag_ms = samples.send_lag_p99_ms
    lag_limit_ms = max(LAG_FLOOR_MS, LAG_SHARE_OF_BUDGET * verdict.budget_ms)
    clear_miss = verdict.outcome is Outcome.MISSES and verdict.p99_ms - lag_ms > verdict.budget_ms
    fault = None
    if result.cpu_share > GENERATOR_CPU_LIMIT:
        fault = f"the load generator used {result.cpu_share:.0%} of a core: it was saturated"
    elif lag_ms > lag_limit_ms and not clear_miss:
        fault = (
            f"one request in a hundred was sent {lag_ms:.1f} ms late or more "
            f"(tolerated {lag_limit_ms:.1f} ms): the host was too busy to send on time"
        )
    elif samples.sent < samples.offered:
        fault = f"only {samples.sent} of {samples.offered} requests were sent"
    return Certificate(
        offered=samples.offered,
        sent=samples.sent,
        answered=samples.answered,
        offered_rps=samples.offered / result.elapsed_s if result.elapsed_s else math.nan,
        send_lag_p99_ms=lag_ms,
        generator_cpu_share=result.cpu_share,
        pacer=result.pacer,
        fault=fault,
    )


class _Steady:
    """Watches a warm-up: steady once the last two windows' median latencies agree."""

    def __init__(self) -> None:
        self._medians: deque[float] = deque(maxlen=2)
        self._next_s = WARM_WINDOW_S

    def observe(self, elapsed_s: float, samples: Samples) -> bool:
        if elapsed_s < self._next_s:
            return False
        recent = samples.latency_s[samples.intended_s > self._next_s - WARM_WINDOW_S]
        self._next_s += WARM_WINDOW_S
        answered = recent[np.isfinite(recent)]
        self._medians.append(float(np.median(answered)) if len(answered) else math.inf)
        return self._agree()

    def _agree(self) -> bool:
        if len(self._medians) < 2 or math.inf in self._medians:
            return False
        low, high = sorted(self._medians)
        return high <= low * (1 + WARM_AGREEMENT)
