"""What a trial is worth under each objective, and whether it may win."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal

from tuner.measurement import Measurement, Status, TrialResult

# Constraint values are logarithms of P99 / budget, so that a queue near saturation does not drown
# every other trial; a request that never came back counts as a hundred budgets.
WORST_LOG_RATIO = math.log(100.0)
# Keeps the sign of a constraint in line with the verdict where the P99 itself is on the other side.
LEAST_LOG_RATIO = 1e-3


class Objective(StrEnum):
    """`utilization`: useful utilization at capacity; `efficiency`: device seconds per request at
    the target rate; `gpu-util`: device busy at the target rate, which rewards waste."""

    UTILIZATION = "utilization"
    EFFICIENCY = "efficiency"
    GPU_UTIL = "gpu-util"

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        return "minimize" if self is Objective.EFFICIENCY else "maximize"

    @property
    def needs_headroom(self) -> bool:
        return self is Objective.UTILIZATION

    def better(self, a: float, b: float) -> bool:
        """Whether value a is better than value b; a number beats NaN."""
        if math.isnan(a) or math.isnan(b):
            return math.isnan(b) and not math.isnan(a)
        return a < b if self is Objective.EFFICIENCY else a > b

    def rank(self, result: TrialResult) -> tuple[float, float, float]:
        """Sort key, best first: the value, then fewer device seconds a request, then lower P99."""
        value = result.values.get(self, math.nan)
        sign = 1.0 if self is Objective.EFFICIENCY else -1.0
        target = result.phase("target")
        p99_ms = target.verdict.p99_ms if target else math.inf
        return (
            math.inf if math.isnan(value) else sign * value,
            result.values.get(Objective.EFFICIENCY, math.inf),
            p99_ms,
        )

    def told(self, result: TrialResult) -> float:
        """The finite number that the sampler is told: 0 or a second a request for no value."""
        value = result.values.get(self, math.nan)
        if math.isfinite(value):
            return value
        return 1.0 if self is Objective.EFFICIENCY else 0.0


def values_of(
    target: Measurement, at_capacity: Measurement | None, ceiling_rps: float
) -> dict[str, float]:
    """Every objective's value from one trial's measurements (NaN where it was not measured).

    Useful utilization counts a rate that met the budget: the capacity, or else the target rate; it
    is 0 where none did.
    """
    met = target if target.verdict.meets else None
    served = at_capacity or met
    busy = target.device.busy_share
    return {
        Objective.UTILIZATION: min(served.goodput_rps / ceiling_rps, 1.0) if served else 0.0,
        Objective.EFFICIENCY: target.device_s_per_request,
        Objective.GPU_UTIL: math.nan if busy is None else busy,
    }


def constraints_of(status: Status, decisive: Measurement | None) -> dict[str, float]:
    """Named constraints, feasible at or below 0; every trial has both, as samplers require.

    Args:
        decisive: the measurement whose verdict decides; None for a server that could not run.
    """
    if status is Status.CRASHED or decisive is None:
        return {"p99": WORST_LOG_RATIO, "startup": 1.0}
    ratio = decisive.verdict.p99_ms / decisive.verdict.budget_ms
    log_ratio = WORST_LOG_RATIO if not math.isfinite(ratio) else math.log(max(ratio, 1e-2))
    if decisive.verdict.meets:
        return {"p99": min(log_ratio, -LEAST_LOG_RATIO), "startup": -1.0}
    return {"p99": min(max(log_ratio, LEAST_LOG_RATIO), WORST_LOG_RATIO), "startup": -1.0}


def best_of(results: list[tuple[int, TrialResult]], objective: Objective) -> int | None:
    """The number of the best feasible trial, or None if no trial is feasible."""
    feasible = [(number, r) for number, r in results if r.feasible]
    if not feasible:
        return None
    return min(feasible, key=lambda pair: objective.rank(pair[1]))[0]
