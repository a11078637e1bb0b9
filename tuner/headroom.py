"""The headroom phase: how far the rate can rise before the budget breaks.

First scouts: a few seconds at a rate tell by the P99 seen whether the budget breaks near it, and an
overload is a verdict by itself. Then the highest promising rate gets the time that a verdict needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tuner.measurement import Measurement
from tuner.verdict import Evidence, Outcome

# Between scouts; half of it is still more than the run-to-run spread of a short P99.
SCOUT_STEP = 1.25
# A scout's P99 below this share of the budget makes its rate promising: near the budget a verdict
# takes longer than it is worth.
PROMISING_SHARE = 0.85
# Down from a rate that stayed undecided, and up from one that met at once.
CAREFUL_STEP = 1.12
# Below a quarter of the guess a configuration is hopeless and the time better spent.
GIVE_UP_SHARE = 0.25


@dataclass(frozen=True)
class Bracket:
    """The capacity lies between `low_rps`, the highest rate that met the budget, and `high_rps`,
    the lowest that missed it or stayed undecided with all its time."""

    low_rps: float = 0.0
    high_rps: float = math.inf
    at_capacity: Measurement | None = None
    measured: tuple[Measurement, ...] = ()

    def with_measurement(self, measurement: Measurement, *, scouting: bool = False) -> Bracket:
        """The bracket after one more measurement; a scout's indecision is no bound."""
        rate, measured = measurement.rate_rps, (*self.measured, measurement)
        if measurement.verdict.meets:
            if rate <= self.low_rps:
                return replace(self, measured=measured)
            return replace(self, low_rps=rate, at_capacity=measurement, measured=measured)
        if scouting and measurement.verdict.outcome is Outcome.UNDECIDED:
            return replace(self, measured=measured)
        return replace(self, high_rps=min(rate, self.high_rps), measured=measured)

    def evidence_for(self, rate_rps: float) -> Evidence:
        """What the nearest rates bring to a verdict at this one.

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


@dataclass(frozen=True)
class Effort:
    """How much one headroom phase may do: limits in seconds at ordinary rates, and counts."""

    scout_s: float = 2.5
    certify_s: float = 14.0
    scouts: int = 4
    tries: int = 3


DEFAULT_EFFORT = Effort()


@dataclass(frozen=True)
class Step:
    """What to measure next. Phases that share evidence must not share a seed: `number` is its."""

    rate_rps: float
    number: int
    limit_s: float
    earlier: Evidence


@dataclass
class Headroom:
    """One search for a capacity.

    Args:
        measure: one phase, ending at its verdict or its limit.
        effort: how much it may do.
    """

    measure: Callable[[Step], Measurement]
    effort: Effort
    bracket: Bracket = Bracket()
    steps: list[Measurement] = field(default_factory=list)

    def start_from(self, known: Measurement) -> None:
        """Use what another phase decided; the indecision of a short one is no bound."""
        if known.verdict.outcome is not Outcome.UNDECIDED:
            self.bracket = self.bracket.with_measurement(known)

    def find(self, guess_rps: float) -> Bracket:
        """Scout from a guess, then certify; a void measurement ends it early."""
        rate = self._scout(guess_rps)
        for _ in range(self.effort.tries):
            if rate is None or self._void():
                break
            rate = self._certify(rate)
        return self.bracket

    def _scout(self, guess_rps: float) -> float | None:
        """The highest promising rate; None if all down to a quarter of the guess are hopeless."""
        promising, broken = 0.0, self.bracket.high_rps
        rate = min(guess_rps, broken / SCOUT_STEP)
        for _ in range(self.effort.scouts):
            verdict = self._take(rate, self.effort.scout_s, scouting=True).verdict
            if verdict.meets or verdict.p99_ms <= PROMISING_SHARE * verdict.budget_ms:
                promising = rate
            else:
                broken = rate
            rate = rate / SCOUT_STEP if rate == broken else rate * SCOUT_STEP
            if self._void() or (promising and rate * CAREFUL_STEP > broken):
                break
        if promising:
            return promising
        return rate if rate > GIVE_UP_SHARE * guess_rps else None

    def _certify(self, rate: float) -> float | None:
        """Measure until a verdict; the next rate worth certifying, if there is one."""
        measurement = self._take(rate, self.effort.certify_s)
        if not measurement.verdict.meets:
            return rate / CAREFUL_STEP if self.bracket.low_rps == 0 else None
        quick = measurement.duration_s < self.effort.certify_s / 2
        higher = rate * CAREFUL_STEP
        return higher if quick and higher < self.bracket.high_rps else None

    def _take(self, rate: float, limit_s: float, *, scouting: bool = False) -> Measurement:
        step = Step(rate, len(self.steps), limit_s, self.bracket.evidence_for(rate))
        self.steps.append(self.measure(step))
        if not self._void():
            self.bracket = self.bracket.with_measurement(self.steps[-1], scouting=scouting)
        return self.steps[-1]

    def _void(self) -> bool:
        return self.steps[-1].certificate.fault is not None
