"""The verdict: right on known laws, honest about little data, quick about overload."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.verdict import (
    BETTER_SHARES,
    WORSE_SHARES,
    Floats,
    Outcome,
    Verdict,
    judge,
    log_evidence,
    order_quantile,
    quantile_interval,
)


def paced(count: int, rate_rps: float = 200.0) -> Floats:
    """Evenly spaced intended send times."""
    return np.arange(count) / rate_rps


def verdict(
    latency_ms: Floats, *, budget_ms: float = 100.0, confidence: float = 0.95, rate: float = 200.0
) -> Verdict:
    intended = paced(len(latency_ms), rate)
    end = float(intended[-1]) + 1.0 if len(intended) else 1.0
    return judge(intended, latency_ms, elapsed_s=end, budget_ms=budget_ms, confidence=confidence)


def scattered(count: int, late: int, seed: int = 0) -> Floats:
    """Independent latencies of which `late`, evenly scattered, are over 100 ms."""
    latency = np.random.default_rng(seed).uniform(20, 60, count)
    if late:
        latency[np.linspace(0, count - 1, late).astype(int)] = 150.0
    return latency


class TestOutcome:
    def test_no_requests_are_undecided(self) -> None:
        """Nothing seen, nothing said."""
        got = verdict(np.array([]))
        assert got.outcome is Outcome.UNDECIDED
        assert math.isnan(got.p99_ms)

    @pytest.mark.parametrize(("confidence", "least"), [(0.95, 299), (0.99, 459)])
    def test_never_meets_below_the_least_number(self, confidence: float, least: int) -> None:
        """Fewer clean requests than (1 - confidence) = 0.99^n allows never suffice."""
        latency = scattered(least - 1, 0)
        assert verdict(latency, confidence=confidence).outcome is Outcome.UNDECIDED

    def test_a_comfortable_run_meets(self) -> None:
        """Some hundreds of independent clean requests settle it."""
        assert verdict(scattered(1200, 0)).outcome is Outcome.MEETS

    def test_three_percent_late_misses(self) -> None:
        """A share well above 1 % is convicted."""
        assert verdict(scattered(600, 30)).outcome is Outcome.MISSES

    def test_one_percent_late_is_undecided(self) -> None:
        """A server on its budget is neither."""
        assert verdict(scattered(1000, 10)).outcome is Outcome.UNDECIDED

    def test_failures_count_as_late(self) -> None:
        """Fast refusals do not flatter the P99."""
        latency = scattered(600, 0)
        latency[::20] = np.inf
        got = verdict(latency)
        assert got.outcome is Outcome.MISSES
        assert got.violations == 30

    def test_an_overload_is_seen_within_three_seconds(self) -> None:
        """A queue that grows without bound misses although its late requests are one long spell."""
        intended = paced(600)
        latency = 50 + intended * 400  # served at 5/7 of the offered rate
        answered = intended + latency / 1000 <= 3.0
        got = judge(
            intended, np.where(answered, latency, np.nan),
            elapsed_s=3.0, budget_ms=100, confidence=0.95,
        )  # fmt: skip
        assert got.outcome is Outcome.MISSES

    def test_one_stall_does_not_convict_at_once(self) -> None:
        """Twenty batch-mates late in one 100 ms stall are one event, not twenty."""
        latency = scattered(1000, 0)
        latency[500:520] = 150.0
        assert verdict(latency).outcome is Outcome.UNDECIDED

    def test_bunched_slowness_needs_more_requests(self) -> None:
        """Requests that are slow together count for fewer than as many independent ones."""
        alone, bunched = scattered(500, 0), scattered(500, 0)
        bunched[100:125] = 90.0
        assert verdict(bunched).effective_requests < verdict(alone).effective_requests / 2


class TestPending:
    def test_an_overdue_request_is_a_violation(self) -> None:
        """Unanswered and older than the budget is already late."""
        got = judge(
            np.array([0.0, 0.1]), np.array([np.nan, 20.0]),
            elapsed_s=1.0, budget_ms=100, confidence=0.95,
        )  # fmt: skip
        assert (got.requests, got.violations) == (2, 1)

    def test_a_young_request_says_nothing_yet(self) -> None:
        """Unanswered within the budget is left out."""
        got = judge(
            np.array([0.0, 0.95]), np.array([20.0, np.nan]),
            elapsed_s=1.0, budget_ms=100, confidence=0.95,
        )  # fmt: skip
        assert (got.requests, got.violations) == (1, 0)


class TestEvidence:
    @pytest.mark.parametrize("bets", [BETTER_SHARES, WORSE_SHARES])
    def test_is_a_martingale_at_one_percent(self, bets: dict[float, float]) -> None:
        """Its expectation after n requests at exactly 1 % is 1, whatever n."""
        from scipy.stats import binom

        n = 400
        expectation = sum(
            math.exp(binom.logpmf(k, n, 0.01) + log_evidence(n, k, bets)) for k in range(n + 1)
        )
        assert expectation == pytest.approx(1.0, abs=1e-6)

    def test_rarely_wrong_although_looked_at_after_every_request(self) -> None:
        """Independent requests at exactly 1 %: each side errs in at most 5 % of runs."""
        rng = np.random.default_rng(7)
        threshold, wrong = math.log(20), {"better": 0, "worse": 0}
        for _ in range(300):
            late = np.cumsum(rng.random(1500) < 0.01)
            looks = [(n, int(late[n - 1])) for n in range(50, 1501, 50)]
            wrong["better"] += any(log_evidence(n, k, BETTER_SHARES) >= threshold for n, k in looks)
            wrong["worse"] += any(log_evidence(n, k, WORSE_SHARES) >= threshold for n, k in looks)
        # 15 of 300 in expectation at most; 25 is 2.6 standard deviations above it
        assert wrong["better"] <= 25
        assert wrong["worse"] <= 25


class TestInterval:
    def test_covers_the_true_quantile(self) -> None:
        """At 95 % it holds the true P99 of independent requests in about 95 % of runs."""
        rng = np.random.default_rng(3)
        true = -math.log(0.01)
        bounds = (quantile_interval(rng.exponential(size=2000), 2000, 0.95) for _ in range(200))
        covered = sum(low <= true <= high for low, high in bounds)
        assert covered >= 180  # 190 in expectation, 3 standard deviations are 9

    def test_small_samples_have_no_upper_bound(self) -> None:
        """A hundred requests cannot bound a P99 from above."""
        _, high = quantile_interval(np.arange(100.0), 100, 0.95)
        assert high == math.inf

    @given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
    def test_order_quantile_has_its_share_below(self, values: list[float]) -> None:
        """At least 99 % of the values are at or below it, and it is one of them."""
        array = np.array(values)
        quantile = order_quantile(array, 0.99)
        assert quantile in array
        assert np.mean(array <= quantile) >= 0.99
