"""Counters of the whole server. Cumulative: readers take differences."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

# Intervals kept apart for late ones to merge with. Batches end almost in order: more than as many
# as there are instances are never needed.
KEPT_INTERVALS = 512
OUTCOMES = ("received", "answered", "rejected", "bad_request", "failed")


@dataclass
class BusyTime:
    """Total length of a union of intervals that come almost in order of their ends."""

    _settled_s: float = 0.0
    _intervals: list[tuple[float, float]] = field(default_factory=list)  # disjoint, ascending

    def add(self, start_s: float, end_s: float) -> None:
        """Include an interval; what overlaps others counts once."""
        first = last = bisect_left(self._intervals, start_s, key=lambda interval: interval[1])
        while last < len(self._intervals) and self._intervals[last][0] <= end_s:
            low, high = self._intervals[last]
            start_s, end_s = min(low, start_s), max(high, end_s)
            last += 1
        self._intervals[first:last] = [(start_s, end_s)]
        if len(self._intervals) > KEPT_INTERVALS:
            low, high = self._intervals.pop(0)
            self._settled_s += high - low

    def total_s(self) -> float:
        return self._settled_s + sum(high - low for low, high in self._intervals)


@dataclass
class Statistics:
    """What happened since the start; times in seconds, summed."""

    requests: Counter[str] = field(default_factory=Counter)
    batch_sizes: Counter[int] = field(default_factory=Counter)
    queue_s: float = 0.0
    preprocess_s: float = 0.0
    compute_s: float = 0.0
    busy: BusyTime = field(default_factory=BusyTime)
    by_instance: Counter[tuple[int, str]] = field(default_factory=Counter)
    compute_by_instance_s: dict[int, float] = field(default_factory=dict)

    def batch_done(self, instance: int, size: int, start_s: float, end_s: float) -> None:
        """A batch ran on an instance; the times are on the monotonic clock."""
        self.batch_sizes[size] += 1
        self.by_instance[instance, "batches"] += 1
        self.by_instance[instance, "requests"] += size
        took_s = end_s - start_s
        self.compute_s += took_s
        self.compute_by_instance_s[instance] = (
            self.compute_by_instance_s.get(instance, 0.0) + took_s
        )
        self.busy.add(start_s, end_s)

    def document(self) -> dict[str, Any]:
        """The counters, JSON-ready."""
        return {
            "requests": {name: self.requests[name] for name in OUTCOMES},
            "batches": self.batch_sizes.total(),
            "batch_sizes": {str(size): n for size, n in sorted(self.batch_sizes.items())},
            "queue_seconds": self.queue_s,
            "preprocess_seconds": self.preprocess_s,
            "compute_seconds": self.compute_s,
            "busy_seconds": self.busy.total_s(),
        }

    def instance_document(self, instance: int) -> dict[str, Any]:
        """The counters of one executor."""
        return {
            "batches": self.by_instance[instance, "batches"],
            "requests": self.by_instance[instance, "requests"],
            "compute_seconds": self.compute_by_instance_s.get(instance, 0.0),
        }
