"""How often is the verdict wrong, and how soon does it come? Simulated queues, nothing is measured.

Servers whose true P99 is known from a long simulation are judged in virtual time, five times a
second, against budgets below and above it, as a real phase would be:

    python benchmarks/verdict.py --runs 100

`wrong` counts `meets` where the true P99 is over the budget, and `misses` where it is under it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tuner import arrivals
from tuner.loadgen.wire import PROGRESS_S
from tuner.testing import SimulatedServer
from tuner.verdict import Floats, Outcome, Verdict, judge

BUDGET_FACTORS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
CONFIDENCE = 0.95
# Discarded, so that a run does not begin with an empty queue.
WARM_S = 1.0


@dataclass(frozen=True)
class Queue:
    """A named queue at one rate."""

    name: str
    rate_rps: float
    server: SimulatedServer

    def latencies_ms(self, seed: int, duration_s: float) -> tuple[Floats, Floats]:
        """Send times from 0 on, and response times in ms."""
        arrived = arrivals.draw("poisson", self.rate_rps, seed, duration_s + WARM_S)
        latency = (self.server.finish_times(arrived)[0] - arrived) * 1000
        steady = arrived >= WARM_S
        return arrived[steady] - WARM_S, latency[steady]


def batch_s(size: int) -> float:
    return 0.004 + 0.002 * size


def one_s(_: int) -> float:
    return 0.004


BATCHING = SimulatedServer(batch_s, window_s=0.005, max_batch=16)
QUEUES = (
    Queue("M/D/1, load 0.5", 125, SimulatedServer(one_s)),
    Queue("M/D/1, load 0.8", 200, SimulatedServer(one_s)),
    Queue("batching", 200, BATCHING),
    Queue("batching, busy", 350, BATCHING),
)


def main() -> None:
    """Print a row for each queue and budget, and one machine-readable line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--limit-s", type=float, default=6.0, help="length of a phase")
    options = parser.parse_args()
    rows = [row(q, f, options.runs, options.limit_s) for q in QUEUES for f in BUDGET_FACTORS]
    print(f"{'queue':<16} {'budget/P99':>10} {'meets':>6} {'misses':>6} {'wrong':>6} "
          f"{'requests':>8} {'covered':>8}")  # fmt: skip
    for r in rows:
        print(f"{r['queue']:<16} {r['factor']:>10} {r['meets']:>6.0%} {r['misses']:>6.0%} "
              f"{r['wrong']:>6.0%} {r['requests']:>8.0f} {r['covered']:>8.0%}")  # fmt: skip
    print(json.dumps({"benchmark": "verdict", "limit_s": options.limit_s, "runs": options.runs,
                      "rows": rows}))  # fmt: skip


def row(queue: Queue, factor: float, runs: int, limit_s: float) -> dict[str, str | float]:
    """Shares of outcomes, mean requests to the end, and how often the interval held the P99."""
    _, long_run = queue.latencies_ms(seed=10**6, duration_s=2000)
    true_ms = float(np.quantile(long_run, 0.99))
    verdicts = [phase(queue, seed, factor * true_ms, limit_s) for seed in range(runs)]
    counts = Counter(v.outcome for v in verdicts)
    wrong = counts[Outcome.MEETS] if factor < 1 else counts[Outcome.MISSES]
    covered = sum(v.p99_low_ms <= true_ms <= v.p99_high_ms for v in verdicts)
    return {
        "queue": queue.name, "factor": factor, "meets": counts[Outcome.MEETS] / runs,
        "misses": counts[Outcome.MISSES] / runs, "wrong": wrong / runs,
        "requests": sum(v.requests for v in verdicts) / runs, "covered": covered / runs,
    }  # fmt: skip


def phase(queue: Queue, seed: int, budget_ms: float, limit_s: float) -> Verdict:
    """One phase in virtual time, to its verdict or its limit."""
    intended, latency = queue.latencies_ms(seed, limit_s)
    for tick in range(1, math.ceil(limit_s / PROGRESS_S) + 1):
        now_s = tick * PROGRESS_S
        due = intended <= now_s
        sent, took = intended[due], latency[due]
        seen = np.where(sent + took / 1000 <= now_s, took, np.nan)
        verdict = judge(sent, seen, elapsed_s=now_s, budget_ms=budget_ms, confidence=CONFIDENCE)
        if verdict.outcome is not Outcome.UNDECIDED:
            break
    return verdict


if __name__ == "__main__":
    main()
