"""Objectives: what is better, what is feasible, and that utilization is not rewarded for waste."""

from __future__ import annotations

import math

import pytest

from tests.tuner.examples import measurement, result
from tuner.measurement import Status
from tuner.objective import Objective, best_of, constraints_of, values_of


def test_useful_utilization_is_goodput_over_ceiling() -> None:
    """At capacity 200/s of a ceiling of 500/s: 0.4, whatever the device's busy share."""
    target, top = measurement(rate_rps=100), measurement(rate_rps=200, busy=1.0)
    assert values_of(target, top, 500.0)["utilization"] == pytest.approx(0.4, rel=0.01)


def test_efficiency_is_busy_seconds_per_request() -> None:
    """Half busy for ten seconds over a thousand requests: 5 ms each."""
    values = values_of(measurement(rate_rps=100, busy=0.5), None, 500.0)
    assert values["efficiency"] == pytest.approx(0.005)


def test_an_unknown_busy_share_is_not_a_number() -> None:
    """A device that cannot say leaves the value open instead of guessing."""
    values = values_of(measurement(busy=None), None, 500.0)
    assert math.isnan(values["gpu-util"])
    assert math.isnan(values["efficiency"])


@pytest.mark.parametrize(("meets", "p99_ms"), [(True, 120.0), (True, 80.0)])
def test_constraints_agree_with_a_verdict_that_meets(meets: bool, p99_ms: float) -> None:
    """Feasible whatever side of the budget the point estimate fell on."""
    values = constraints_of(Status.MEASURED, measurement(meets=meets, p99_ms=p99_ms))
    assert values["p99"] < 0


@pytest.mark.parametrize("p99_ms", [95.0, 120.0, math.inf])
def test_constraints_agree_with_a_verdict_that_does_not(p99_ms: float) -> None:
    """Infeasible, finite, never NaN."""
    values = constraints_of(Status.MEASURED, measurement(meets=False, p99_ms=p99_ms))
    assert 0 < values["p99"] < math.inf


def test_a_crash_is_infeasible_by_both_constraints() -> None:
    """Samplers learn the region from a COMPLETE trial with positive constraints."""
    assert all(v > 0 for v in constraints_of(Status.CRASHED, None).values())


def test_only_the_feasible_may_win() -> None:
    """The best value of an infeasible trial does not count."""
    results = [(0, result(utilization=0.9, feasible=False)), (1, result(utilization=0.5))]
    assert best_of(results, Objective.UTILIZATION) == 1
    assert best_of(results[:1], Objective.UTILIZATION) is None


def test_told_values_are_finite() -> None:
    """A sampler is never told NaN or infinity."""
    broken = result(utilization=math.nan)
    assert Objective.UTILIZATION.told(broken) == 0.0
    assert Objective.EFFICIENCY.told(result()) == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("objective", "better"), [(Objective.UTILIZATION, 2.0), (Objective.EFFICIENCY, 1.0)]
)
def test_better_knows_its_direction(objective: Objective, better: float) -> None:
    """More utilization, fewer device seconds; a number beats none."""
    worse = 3.0 - better
    assert objective.better(better, worse)
    assert not objective.better(worse, better)
    assert objective.better(worse, math.nan)
