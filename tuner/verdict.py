"""Does this configuration meet the P99 budget at this rate? A sequential, two-sided answer.

The question is put to the share of requests over the budget: P99 <= budget means a share of at
most 1 %. Two test martingales (e-processes) are kept, one against "the share is at least 1 %" and
one against "at most 1 %"; by Ville's inequality either may be looked at as often as one likes, and
the first to reach 1 / (1 - confidence) decides.

Requests of one batch, and of one busy spell, share their fate. The evidence is therefore counted
in clusters: the exponent of each martingale is multiplied by the extremal index, the number of
separate spells divided by the number of requests in them (runs declustering: Smith and Weissman,
"Estimating the extremal index", J. R. Stat. Soc. B 56, 1994).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

QUANTILE = 0.99
ALLOWED_SHARE = 1 - QUANTILE

# Shares that the martingales bet on, with their weights. Most of the bet on "meets" goes to a share
# of zero, because a comfortable configuration shows no violation at all: it then needs
# ln(1.25 / alpha) / -ln(0.99) clean requests, 321 at 95 %, instead of 299 for that bet alone.
BETTER_SHARES = {0.0: 0.8, 0.0025: 0.1, 0.005: 0.1}
WORSE_SHARES = {0.0133: 1 / 6, 0.02: 1 / 6, 0.04: 1 / 6, 0.1: 1 / 6, 0.3: 1 / 6, 0.8: 1 / 6}

# Requests faster than this share of the budget say nothing about how violations would be bunched. A
# larger share decides sooner and errs more often: benchmarks/verdict.py prints both.
NEAR_SHARE = 0.5

# One stall at the start of a phase fills every block seen so far; a second of traffic is the least
# that tells a stall from an overload.
LEAST_TIME_S = 1.0


class Outcome(StrEnum):
    """The three answers."""

    MEETS = "meets"
    MISSES = "misses"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Evidence:
    """Logarithms of the two e-values, for `meets` and for `misses`."""

    meets: float = 0.0
    misses: float = 0.0

    def head_start(self) -> Evidence:
        """What may be carried over to another phase, should it turn out to help.

        Half of the next phase's bet goes on the product and half on the new data alone, which is
        an e-value whatever was seen before; old evidence against costs ln 2 at most.
        """
        return Evidence(_hedged(self.meets), _hedged(self.misses))


NO_EVIDENCE = Evidence()


def _hedged(log_value: float) -> float:
    return float(np.logaddexp(0.0, log_value)) - math.log(2)


@dataclass(frozen=True)
class Verdict:
    """The answer, and the interval and counts that support it.

    `p99_low_ms` and `p99_high_ms` bound the P99 at `confidence` (order statistics, with the
    effective number of requests); they are infinite where too few or failed requests say so.
    `evidence` includes what earlier phases brought along.
    """

    outcome: Outcome
    budget_ms: float
    confidence: float
    requests: int
    violations: int
    effective_requests: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p99_low_ms: float
    p99_high_ms: float
    evidence: Evidence = NO_EVIDENCE

    @property
    def meets(self) -> bool:
        return self.outcome is Outcome.MEETS


def judge(
    intended_s: Floats,
    latency_ms: Floats,
    *,
    elapsed_s: float,
    budget_ms: float,
    confidence: float,
    earlier: Evidence = NO_EVIDENCE,
) -> Verdict:
    """The verdict on all arrivals so far.

    Args:
        intended_s: intended send times since the start of the phase, ascending, shape (n,).
        latency_ms: response times from the intended send, shape (n,); infinite for a request that
            failed, NaN for one still unanswered. An unanswered request already older than the
            budget is a violation; a younger one says nothing yet and is left out.
        elapsed_s: time since the start of the phase.
        budget_ms: the upper bound on the P99.
        confidence: of each side's answer, and of the P99 interval.
        earlier: head starts from phases with other seeds that bear on this one: for `meets` those
            at higher rates, for `misses` those at lower ones, because response times only grow
            with the rate.
    """
    latency_ms = settled(intended_s, latency_ms, elapsed_s=elapsed_s, budget_ms=budget_ms)
    known = ~np.isnan(latency_ms)
    intended_s, latency_ms = intended_s[known], latency_ms[known]
    violations = int(np.count_nonzero(latency_ms > budget_ms))
    careful = _spell_index(intended_s, latency_ms, budget_ms)
    evidence = Evidence(
        log_evidence(len(latency_ms), violations, BETTER_SHARES, careful) + earlier.meets,
        log_evidence(
            len(latency_ms),
            violations,
            WORSE_SHARES,
            _block_index(intended_s, latency_ms, budget_ms),
        )
        + earlier.misses,
    )
    outcome = _outcome(evidence, elapsed_s=elapsed_s, alpha=1 - confidence)
    low, high = quantile_interval(latency_ms, len(latency_ms) * careful, confidence)
    p50, p95, p99 = (order_quantile(latency_ms, q) for q in (0.5, 0.95, QUANTILE))
    return Verdict(
        outcome=outcome,
        budget_ms=budget_ms,
        confidence=confidence,
        requests=len(latency_ms),
        violations=violations,
        effective_requests=len(latency_ms) * careful,
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        p99_low_ms=low,
        p99_high_ms=high,
        evidence=evidence,
    )


def is_futile(verdict: Verdict, earlier: Evidence, *, elapsed_s: float, limit_s: float) -> bool:
    """Whether a phase will end undecided if it goes on like this.

    Asked in the second half of its time only. Stopping early for want of evidence never makes a
    wrong decision likelier: it decides nothing.
    """
    if elapsed_s < limit_s / 2:
        return False
    growth, threshold = limit_s / elapsed_s, -math.log(1 - verdict.confidence)
    gained = verdict.evidence
    meets = earlier.meets + growth * (gained.meets - earlier.meets)
    misses = earlier.misses + growth * (gained.misses - earlier.misses)
    return max(meets, misses) < threshold


def clean_requests(confidence: float) -> float:
    """How many independent requests without a violation it takes to answer `meets`."""
    return math.log((1 - confidence) * BETTER_SHARES[0.0]) / math.log(QUANTILE)


def settled(
    intended_s: Floats, latency_ms: Floats, *, elapsed_s: float, budget_ms: float
) -> Floats:
    """Latencies in which an unanswered request older than the budget counts as infinitely late."""
    overdue = np.isnan(latency_ms) & ((elapsed_s - intended_s) * 1000 > budget_ms)
    return np.where(overdue, np.inf, latency_ms)


def order_quantile(values: Floats, q: float) -> float:
    """The smallest value with at least the share q at or below it; NaN for no values."""
    if not len(values):
        return math.nan
    rank = max(math.ceil(q * len(values)), 1)
    return float(np.partition(values, rank - 1)[rank - 1])


def quantile_interval(
    values: Floats, effective: float, confidence: float, q: float = QUANTILE
) -> tuple[float, float]:
    """Bounds on the q-quantile from order statistics, for `effective` independent requests.

    Ranks from the binomial distribution (David and Nagaraja, "Order Statistics", section 7.1). The
    upper bound is infinite while the sample is too small to hold it: below 368 effective requests
    for a two-sided 95 % interval of the P99.
    """
    if not len(values):
        return math.nan, math.nan
    from scipy.stats import binom  # late: importing scipy.stats costs most of a second

    tail = (1 - confidence) / 2
    size = max(round(effective), 1)
    low_rank = int(binom.ppf(tail, size, q))
    high_rank = int(binom.ppf(1 - tail, size, q)) + 1
    ordered = np.sort(values)
    scale = len(values) / size
    low = ordered[min(max(math.ceil(low_rank * scale) - 1, 0), len(values) - 1)]
    if high_rank > size:
        return float(low), math.inf
    return float(low), float(ordered[min(math.ceil(high_rank * scale) - 1, len(values) - 1)])


def _outcome(evidence: Evidence, *, elapsed_s: float, alpha: float) -> Outcome:
    threshold = -math.log(alpha)
    if evidence.meets >= threshold:
        return Outcome.MEETS
    if evidence.misses >= threshold and elapsed_s >= LEAST_TIME_S:
        return Outcome.MISSES
    return Outcome.UNDECIDED


def log_evidence(
    requests: int, violations: int, bets: dict[float, float], index: float = 1.0
) -> float:
    """Logarithm of the mixture martingale that bets on these shares against 1 %.

    Each term is a likelihood ratio, at most 1 in expectation for every true share on the other
    side of 1 %, so the mixture is an e-process (Wald 1945; Robbins 1970). `index` in (0, 1] is the
    extremal index by which the counts are reduced.
    """
    terms = [
        math.log(weight) + index * _log_ratio(requests, violations, share)
        for share, weight in bets.items()
    ]
    top = max(terms)
    if top == -math.inf:
        return top
    return top + math.log(sum(math.exp(term - top) for term in terms))


def _log_ratio(requests: int, violations: int, share: float) -> float:
    late = -math.inf if share == 0 else math.log(share / ALLOWED_SHARE)
    in_time = math.log((1 - share) / (1 - ALLOWED_SHARE))
    return (violations * late if violations else 0.0) + (requests - violations) * in_time


def _spell_index(intended_s: Floats, latency_ms: Floats, budget_ms: float) -> float:
    """Spells per slow request, for the answer `meets`.

    Slow means above the run's own P95 and above half of the budget, but not more than the budget:
    a run without violations still shows by the requests that came nearest to one how far they come
    in bunches. Two slow requests share a spell when the second came before the first could have
    been answered.
    """
    if not len(latency_ms):
        return 1.0
    slow_ms = min(max(order_quantile(latency_ms, 0.95), NEAR_SHARE * budget_ms), budget_ms)
    slow = np.flatnonzero(latency_ms > slow_ms)
    if not len(slow):
        return 1.0
    gaps_ms = np.diff(intended_s[slow]) * 1000
    return float((1 + np.count_nonzero(gaps_ms > slow_ms)) / len(slow))


def _block_index(intended_s: Floats, latency_ms: Floats, budget_ms: float) -> float:
    """Slow blocks of time per late request, for the answer `misses`.

    A queue that grows without bound is one endless spell; counted in blocks of twice the budget
    (at least 50 ms, a usual scheduling hiccup) it convicts itself.
    """
    late = latency_ms > budget_ms
    if not late.any():
        return 1.0
    block_s = max(2 * budget_ms / 1000, 0.05)
    blocks = np.unique(np.floor(intended_s[late] / block_s))
    return float(len(blocks) / np.count_nonzero(late))
