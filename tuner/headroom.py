"""The headroom phase: how far the rate can rise before the budget breaks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tuner.measurement import Measurement

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

    def with_measurement(self, measurement: Measurement) -> Bracket:
        """The bracket after one more verdict."""
        rate = measurement.rate_rps
        if measurement.verdict.meets:
            return replace(self, low_rps=max(rate, self.low_rps), at_capacity=measurement)
        return replace(self, high_rps=min(rate, self.high_rps))

    def next_rate_rps(self, guess_rps: float, resolution: float) -> float | None:
        """The next rate to try, or None when the bracket is narrow enough (or hopeless).

        Args:
            guess_rps: where the capacity is believed to be; tried once it is inside the bracket.
            resolution: the bracket is narrow enough when high / low is at most 1 + this.
        """
        if self.high_rps == math.inf:
            beyond = self.low_rps * STEP
            return max(beyond, guess_rps) if guess_rps < 2 * beyond else 2 * beyond
        if self.low_rps == 0:
            return self.high_rps / STEP if self.high_rps > GIVE_UP_SHARE * guess_rps else None
        if self.high_rps <= self.low_rps * (1 + resolution):
            return None
        return math.sqrt(self.low_rps * self.high_rps)


def find_capacity(
    measure: Callable[[float], Measurement],
    first: Measurement,
    *,
    guess_rps: float,
    resolution: float,
    most_steps: int,
) -> tuple[Bracket, list[Measurement]]:
    """Raise or lower the rate until the bracket around the capacity is narrow enough.

    Args:
        measure: one phase at a given rate, ending at its verdict.
        first: the measurement to start from, at the target rate.
        most_steps: further measurements at most.

    Returns:
        The bracket, and the measurements made. A void measurement ends the search early.
    """
    bracket, steps = Bracket().with_measurement(first), list[Measurement]()
    while len(steps) < most_steps:
        rate = bracket.next_rate_rps(guess_rps, resolution)
        if rate is None:
            break
        steps.append(measure(rate))
        if steps[-1].certificate.fault is not None:
            break
        bracket = bracket.with_measurement(steps[-1])
    return bracket, steps
