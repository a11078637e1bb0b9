"""The headroom phase: how far the rate can rise before the budget breaks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tuner.measurement import Measurement
from tuner.verdict import Evidence

# The first step from a rate that meets; wide enough to leave a bad guess in a few steps.
STEP = 1.25
# Below a quarter of the first rate the configuration is hopeless and the time better spent.
GIVE_UP_SHARE = 0.25


@dataclass(frozen=True)
class Bracket:
    """The capacity lies between `low_rps`, the highest rate that met the budget, and `high_rps`,
    the lowest that did not. Each rate is asked once, so the bracket only ever narrows."""

    low_rps: float = 0.0
    high_rps: float = math.inf
    at_capacity: Measurement | None = None
    measured: tuple[Measurement, ...] = ()

    def with_measurement(self, measurement: Measurement) -> Bracket:
        """The bracket after one more verdict; undecided within its time counts as not met."""
        rate, measured = measurement.rate_rps, (*self.measured, measurement)
        if not measurement.verdict.meets:
            return replace(self, high_rps=min(rate, self.high_rps), measured=measured)
        if rate <= self.low_rps:
            return replace(self, measured=measured)
        return replace(self, low_rps=rate, at_capacity=measurement, measured=measured)

    def evidence_for(self, rate_rps: float) -> Evidence:
        """What the nearest undecided rates bring to a verdict at this one.

        A rate above it that was not over the budget speaks for `meets` here, a rate below it that
        was not under it for `misses`. Each of them carries what it was brought itself.
        """
        above = [m for m in self.measured if m.rate_rps > rate_rps]
        below = [m for m in self.measured if m.rate_rps < rate_rps]
        nearest_above = min(above, key=lambda m: m.rate_rps, default=None)
        nearest_below = max(below, key=lambda m: m.rate_rps, default=None)
        return Evidence(
            nearest_above.verdict.evidence.head_start().meets if nearest_above else 0.0,
            nearest_below.verdict.evidence.head_start().misses if nearest_below else 0.0,
        )

    def next_rate_rps(self, guess_rps: float, resolution: float) -> float | None:
        """The next rate to try, or None when the bracket is narrow enough (or hopeless).

        Args:
            guess_rps: where the capacity is believed to be; tried once it is inside the bracket.
            resolution: the bracket is narrow enough when high / low is at most 1 + this.
        """
        if self.low_rps < guess_rps < self.high_rps:
            return guess_rps
        if self.high_rps == math.inf:
            return self.low_rps * STEP
        if self.low_rps == 0:
            return self.high_rps / STEP if self.high_rps > GIVE_UP_SHARE * guess_rps else None
        if self.high_rps <= self.low_rps * (1 + resolution):
            return None
        return math.sqrt(self.low_rps * self.high_rps)


def find_capacity(
    measure: Callable[[float, int, Evidence], Measurement],
    start: Bracket,
    *,
    guess_rps: float,
    resolution: float,
    most_steps: int,
) -> tuple[Bracket, list[Measurement]]:
    """Raise or lower the rate until the bracket around the capacity is narrow enough.

    Args:
        measure: one phase, ending at its verdict: its rate, its place in the sequence (phases that
            share evidence must not share a seed) and the evidence that it starts with.
        start: what is known already.
        most_steps: measurements at most.

    Returns:
        The bracket, and the measurements made. A void measurement ends the search early.
    """
    bracket, steps = start, list[Measurement]()
    while len(steps) < most_steps:
        rate = bracket.next_rate_rps(guess_rps, resolution)
        if rate is None:
            break
        steps.append(measure(rate, len(steps), bracket.evidence_for(rate)))
        if steps[-1].certificate.fault is not None:
            break
        bracket = bracket.with_measurement(steps[-1])
    return bracket, steps
