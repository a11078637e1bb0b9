"""The headroom phase: finds the capacity from any guess, gives up in time, wastes nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuner.examples import measurement
from tuner.headroom import Bracket, Effort, Headroom, Step
from tuner.measurement import Measurement
from tuner.verdict import Evidence

EFFORT = Effort(scouts=8, tries=6)


class Queue:
    """A server whose P99 rises with the rate and reaches the budget of 100 ms at its capacity;
    verdicts take time: only phases longer than a scout's are decided, unless it is overloaded."""

    def __init__(self, capacity_rps: float, fault: str | None = None) -> None:
        self.capacity_rps, self.fault = capacity_rps, fault
        self.asked: list[Step] = []

    def __call__(self, step: Step) -> Measurement:
        self.asked.append(step)
        load = step.rate_rps / self.capacity_rps
        long = step.limit_s > EFFORT.scout_s
        p99_ms = 100 * load**3
        return measurement(
            rate_rps=step.rate_rps,
            meets=long and load <= 1,
            undecided=not long and load <= 1.2,
            p99_ms=p99_ms,
            fault=self.fault,
        )


@given(capacity=st.floats(60, 900), off=st.floats(0.3, 2.5))
def test_finds_the_capacity_from_any_guess(capacity: float, off: float) -> None:
    """Within a quarter below it, however wrong the guess; never above it."""
    headroom = Headroom(Queue(capacity), EFFORT)
    bracket = headroom.find(off * capacity)
    assert 0.75 * capacity <= bracket.low_rps <= capacity
    assert bracket.low_rps < bracket.high_rps


def test_a_good_guess_needs_few_phases() -> None:
    """Two or three scouts and a certificate or two."""
    queue = Queue(200)
    Headroom(queue, Effort()).find(180)
    assert len(queue.asked) <= 5


def test_every_phase_has_its_own_seed() -> None:
    """Evidence may be shared only between phases with different arrivals."""
    queue = Queue(300)
    Headroom(queue, EFFORT).find(100)
    numbers = [step.number for step in queue.asked]
    assert numbers == list(range(len(numbers)))


def test_capacity_is_the_highest_rate_that_met() -> None:
    """The measurement kept for the report is the one at the bracket's lower end."""
    bracket = Headroom(Queue(200), EFFORT).find(140)
    assert bracket.at_capacity is not None
    assert bracket.at_capacity.rate_rps == bracket.low_rps
    assert bracket.at_capacity.verdict.meets


def test_gives_up_on_the_hopeless() -> None:
    """A configuration that breaks the budget down to a quarter of the guess ends the search."""
    queue = Queue(1)
    bracket = Headroom(queue, EFFORT).find(200)
    assert bracket.low_rps == 0
    assert len(queue.asked) == EFFORT.scouts


def test_a_void_phase_ends_the_search() -> None:
    """What cannot be trusted moves no bound."""
    queue = Queue(200, fault="saturated")
    bracket = Headroom(queue, EFFORT).find(150)
    assert (bracket.low_rps, bracket.high_rps) == (0, math.inf)
    assert len(queue.asked) == 1


def test_bounds_only_narrow() -> None:
    """A noisy miss below a met rate does not lower the capacity that was found."""
    bracket = Bracket()
    for rate, meets in ((100.0, True), (150.0, False), (120.0, True)):
        bracket = bracket.with_measurement(measurement(rate_rps=rate, meets=meets))
    assert bracket.low_rps == pytest.approx(120)
    assert bracket.high_rps == pytest.approx(150)


def test_a_scouts_indecision_is_no_bound() -> None:
    """Two seconds without a verdict say nothing against a rate."""
    undecided = measurement(rate_rps=150, undecided=True)
    assert Bracket().with_measurement(undecided, scouting=True).high_rps == math.inf
    assert Bracket().with_measurement(undecided).high_rps == 150


def test_an_undecided_rate_helps_the_next_one_down() -> None:
    """Evidence for `meets` from a higher rate is carried, hedged; evidence from below is not."""
    undecided = measurement(rate_rps=150, undecided=True, evidence=Evidence(2.0, -3.0))
    bracket = Bracket().with_measurement(undecided)
    below, above = bracket.evidence_for(120), bracket.evidence_for(180)
    assert 1.0 < below.meets < 2.0
    assert below.misses == 0.0
    assert above.meets == 0.0
    assert above.misses == pytest.approx(-math.log(2), abs=0.06)
