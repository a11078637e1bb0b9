"""Example measurements and results for tests, built like the real ones."""

from __future__ import annotations

import numpy as np

from tuner.calibration import Calibration, ServiceTime
from tuner.configuration import Configuration, Value
from tuner.measurement import (
    Certificate,
    DeviceUsage,
    Measurement,
    ServerWork,
    Status,
    TrialResult,
)
from tuner.objective import Objective
from tuner.prior import Prior
from tuner.verdict import NO_EVIDENCE, Evidence, Outcome, Verdict

DEFAULTS: dict[str, Value] = {
    "batch_window_ms": 5.0,
    "max_batch_size": 8,
    "workers": 1,
    "instances": 1,
    "precision": "fp32",
    "preprocessing": "torchvision",
    "engine": "eager",
    "queue_capacity": 256,
}


def configuration(**changed: Value) -> Configuration:
    """The server's defaults with some settings changed."""
    return Configuration.of({**DEFAULTS, **changed})


def prior(
    *, base_ms: float = 4.0, per_item_ms: float = 0.5, budget_ms: float = 100.0,
    shared_cores: int | None = None,
) -> Prior:  # fmt: skip
    """A prior whose calibration is exactly linear: S(b) = base + per_item b."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    seconds = tuple((base_ms + per_item_ms * b) / 1000 for b in sizes)
    service = {
        Configuration.of({"engine": "eager", "precision": "fp32"}): (
            ServiceTime(1, sizes, seconds),
            ServiceTime(2, sizes, tuple(1.5 * s for s in seconds)),
        )
    }
    calibration = Calibration(service, {"torchvision": 0.002}, overhead_s=0.001)
    return Prior(calibration, budget_ms, DEFAULTS, shared_cores)


def verdict(
    *, meets: bool = True, p99_ms: float = 80.0, budget_ms: float = 100.0,
    evidence: Evidence = NO_EVIDENCE,
    undecided: bool = False,
) -> Verdict:  # fmt: skip
    """A verdict with a plausible interval."""
    outcome = Outcome.MEETS if meets else Outcome.MISSES
    outcome = Outcome.UNDECIDED if undecided else outcome
    return Verdict(
        outcome, budget_ms, 0.95, 1000, 3 if meets else 50, 800.0, 30.0, 60.0, p99_ms,
        0.9 * p99_ms, 1.1 * p99_ms, evidence,
    )  # fmt: skip


def measurement(
    *, phase: str = "target", rate_rps: float = 100.0, meets: bool = True, p99_ms: float = 80.0,
    busy: float | None = 0.5, fault: str | None = None, evidence: Evidence = NO_EVIDENCE,
    undecided: bool = False,
) -> Measurement:  # fmt: skip
    """One measurement of ten seconds in which everything was answered, in batches of four."""
    answered = int(rate_rps * 10)
    work = ServerWork(
        answered, 0, 0, answered // 4, {4: answered // 4}, 1.0, 2.0, 5.0, 5.0, 10.0, 1 << 29
    )
    return Measurement(
        phase=phase,
        rate_rps=rate_rps,
        seed=0,
        arrivals="poisson",
        duration_s=10.0,
        verdict=verdict(meets=meets, p99_ms=p99_ms, evidence=evidence, undecided=undecided),
        goodput_rps=rate_rps * 0.995,
        errors={},
        certificate=Certificate(answered, answered, answered, rate_rps, 0.3, 0.1, "timerfd", fault),
        work=work,
        device=DeviceUsage("executor", busy),
        latencies_ms=np.full(answered, 50.0, dtype=np.float32),
    )


def result(
    *, utilization: float = 0.5, capacity_rps: float = 200.0, feasible: bool = True,
    origin: str = "sampler", **changed: Value,
) -> TrialResult:  # fmt: skip
    """A measured trial."""
    constraint = -0.2 if feasible else 0.3
    return TrialResult(
        configuration(**changed),
        origin,
        Status.MEASURED,
        measurements=(measurement(meets=feasible),),
        capacity_rps=capacity_rps,
        capacity_bound_rps=capacity_rps * 1.05,
        values={Objective.UTILIZATION: utilization, Objective.EFFICIENCY: 0.005,
                Objective.GPU_UTIL: 0.5},
        constraints={"p99": constraint, "startup": -1.0},
    )  # fmt: skip
