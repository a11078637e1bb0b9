"""The headroom phase: brackets the capacity, never asks a rate twice, gives up in time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuner.examples import measurement
from tuner.headroom import Bracket, find_capacity
from tuner.measurement import Measurement
from tuner.verdict import NO_EVIDENCE, Evidence


class Queue:
    """A server that meets the budget up to a known capacity."""

    def __init__(self, capacity_rps: float) -> None:
        self.capacity_rps = capacity_rps
        self.asked: list[float] = []

    def __call__(self, rate: float, step: int = 0, earlier: Evidence = NO_EVIDENCE) -> Measurement:
        self.asked.append(rate)
        return measurement(rate_rps=rate, meets=rate <= self.capacity_rps)


@given(
    capacity=st.floats(60, 900),
    target=st.floats(50, 300),
    guess=st.floats(50, 900),
)
def test_brackets_the_capacity(capacity: float, target: float, guess: float) -> None:
    """Wherever the guess is, the bracket holds the capacity and each rate is asked once."""
    queue = Queue(capacity)
    bracket, steps = find_capacity(
        queue,
        Bracket().with_measurement(queue(target)),
        guess_rps=guess,
        resolution=0.06,
        most_steps=20,
    )
    assert bracket.low_rps <= capacity < bracket.high_rps
    assert len(set(queue.asked)) == len(queue.asked) == len(steps) + 1
    hopeless = bracket.low_rps == 0 and bracket.high_rps <= max(guess, target)
    assert hopeless or bracket.high_rps <= bracket.low_rps * 1.06


def test_a_good_guess_needs_few_steps() -> None:
    """With a guess within 5 % the bracket is narrow after at most five further rates."""
    queue = Queue(200)
    _, steps = find_capacity(queue, Bracket(), guess_rps=205, resolution=0.06, most_steps=20)
    assert len(steps) <= 5


def test_capacity_is_the_highest_rate_that_met() -> None:
    """The measurement kept for the report is the one at the bracket's lower end."""
    queue = Queue(200)
    bracket, _ = find_capacity(queue, Bracket(), guess_rps=190, resolution=0.06, most_steps=20)
    assert bracket.at_capacity is not None
    assert bracket.at_capacity.rate_rps == bracket.low_rps


def test_gives_up_on_the_hopeless() -> None:
    """A configuration that misses everything down to a quarter of the guess ends the search."""
    queue = Queue(1)
    bracket, steps = find_capacity(queue, Bracket(), guess_rps=200, resolution=0.06, most_steps=20)
    assert bracket.low_rps == 0
    assert len(steps) < 10


def test_a_void_step_ends_the_search() -> None:
    """What cannot be trusted moves no bound."""

    def void(rate: float, step: int, earlier: Evidence) -> Measurement:
        return measurement(rate_rps=rate, meets=False, fault="saturated")

    first = measurement(rate_rps=100, meets=True)
    start = Bracket().with_measurement(first)
    bracket, steps = find_capacity(void, start, guess_rps=150, resolution=0.06, most_steps=20)
    assert (bracket.low_rps, bracket.high_rps) == (100, math.inf)
    assert bracket.at_capacity is first
    assert len(steps) == 1


def test_bounds_only_narrow() -> None:
    """A noisy miss below a met rate does not lower the capacity that was found."""
    bracket = Bracket()
    for rate, meets in ((100.0, True), (150.0, False), (120.0, True)):
        bracket = bracket.with_measurement(measurement(rate_rps=rate, meets=meets))
    assert bracket.low_rps == pytest.approx(120)
    assert bracket.high_rps == pytest.approx(150)


def test_an_undecided_rate_helps_the_next_one_down() -> None:
    """Evidence for `meets` from a higher rate is carried, hedged; evidence from below is not."""
    undecided = measurement(rate_rps=150, meets=False, evidence=Evidence(2.0, -3.0))
    bracket = Bracket().with_measurement(undecided)
    below, above = bracket.evidence_for(120), bracket.evidence_for(180)
    assert 1.0 < below.meets < 2.0
    assert below.misses == 0.0
    assert above.meets == 0.0
    assert above.misses == pytest.approx(-math.log(2), abs=0.06)
