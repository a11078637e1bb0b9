"""Counters: busy time is the union of intervals, whatever their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.statistics import KEPT_INTERVALS, BusyTime, Statistics


def union_length(intervals: list[tuple[float, float]]) -> float:
    """The plain definition."""
    total, reached = 0.0, float("-inf")
    for low, high in sorted(intervals):
        total += max(high - max(low, reached), 0)
        reached = max(reached, high)
    return total


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5)), max_size=50))
def test_busy_time_is_the_union(pairs: list[tuple[float, float]]) -> None:
    """Overlaps count once, gaps not at all, in any order."""
    intervals = [(start, start + length) for start, length in pairs]
    busy = BusyTime()
    for interval in intervals:
        busy.add(*interval)
    assert busy.total_s() == pytest.approx(union_length(intervals), abs=1e-9)


def test_a_long_run_is_folded() -> None:
    """Many more batches than are kept apart still add up."""
    busy = BusyTime()
    for i in range(3 * KEPT_INTERVALS):
        busy.add(i, i + 0.25)
    assert busy.total_s() == pytest.approx(3 * KEPT_INTERVALS * 0.25)


def test_a_batch_counts_everywhere() -> None:
    """Histogram, instance and sums agree."""
    statistics = Statistics()
    statistics.batch_done(1, "cpu", 4, 4, 10.0, 10.5)
    statistics.batch_done(0, "cpu", 2, 3, 10.25, 10.75)
    document = statistics.document()
    assert document["batch_sizes"] == {"2": 1, "4": 1}
    assert document["compute_seconds"] == pytest.approx(1.0)
    assert document["busy_seconds"] == pytest.approx(0.75)
    assert statistics.places[1].document()["requests"] == 4
    assert (document["padding"], document["exact_batches"]) == (1, 1)
