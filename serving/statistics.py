"""Counters of the whole server. Cumulative: readers take differences."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Intervals kept apart for late ones to merge with. Batches end almost in order: more than as many
# as there are instances are never needed.
KEPT_INTERVALS = 512
OUTCOMES = ("received", "answered", "rejected", "expired", "cancelled", "bad_request", "failed")


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
class Place:
    """What one place of a device did."""

    batches: int = 0
    pictures: int = 0
    compute_s: float = 0.0

    def document(self) -> dict[str, Any]:
        return {"batches": self.batches, "requests": self.pictures,
                "compute_seconds": self.compute_s}  # fmt: skip


@dataclass
class Statistics:
    """What happened since the start; times in seconds, summed."""

    requests: Counter[str] = field(default_factory=Counter)
    batch_sizes: Counter[int] = field(default_factory=Counter)
    compute_by_size_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    queue_s: float = 0.0
    preprocess_s: float = 0.0
    compute_s: float = 0.0
    answer_s: float = 0.0  # from receipt to answer, of answered requests
    padding: int = 0  # pictures computed for nobody
    exact: int = 0  # batches that ran at their own size
    uncaptured: int = 0  # batches refused because no CUDA graph has their size
    busy: BusyTime = field(default_factory=BusyTime)
    places: dict[int, Place] = field(default_factory=lambda: defaultdict(Place))
    device_busy: dict[str, BusyTime] = field(default_factory=lambda: defaultdict(BusyTime))

    def batch_done(
        self, number: int, device: str, size: int, ran: int, start_s: float, end_s: float
    ) -> None:
        """A batch ran at a place of a device; the times are on the monotonic clock."""
        took_s = end_s - start_s
        self.batch_sizes[size] += 1
        self.compute_by_size_s[size] += took_s
        self.padding += ran - size
        self.exact += ran == size
        self.compute_s += took_s
        place = self.places[number]
        place.batches += 1
        place.pictures += size
        place.compute_s += took_s
        self.busy.add(start_s, end_s)
        self.device_busy[device].add(start_s, end_s)

    def document(self) -> dict[str, Any]:
        """The counters, JSON-ready."""
        pictures = sum(size * n for size, n in self.batch_sizes.items())
        return {
            "requests": {name: self.requests[name] for name in OUTCOMES},
            "batches": self.batch_sizes.total(),
            "batch_sizes": {str(size): n for size, n in sorted(self.batch_sizes.items())},
            "queue_seconds": self.queue_s,
            "preprocess_seconds": self.preprocess_s,
            "compute_seconds": self.compute_s,
            "compute_seconds_by_size": {
                str(size): s for size, s in sorted(self.compute_by_size_s.items())
            },
            "answer_seconds": self.answer_s,
            "busy_seconds": self.busy.total_s(),
            "pictures": pictures,
            "padding": self.padding,
            "exact_batches": self.exact,
            "uncaptured_batches": self.uncaptured,
        }


def imbalance(busy_s: Mapping[str, float]) -> float:
    """(most - mean) / mean of the devices' busy seconds: 0 is even, as a lone one is."""
    mean = sum(busy_s.values()) / max(len(busy_s), 1)
    return max(busy_s.values()) / mean - 1 if mean else 0.0
