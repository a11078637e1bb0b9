"""One trial: from a configuration to everything that was found out about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tuner.configuration import Configuration
from tuner.headroom import Bracket, find_capacity
from tuner.measurement import Measurement, Status, TrialResult
from tuner.objective import Objective, constraints_of, values_of
from tuner.phase import Rig
from tuner.prior import Prior
from tuner.server import ServerError


@dataclass(frozen=True)
class TrialPlan:
    """How every trial of a study is measured.

    Args:
        target_rps: the rate of the target phase.
        must_hold_target: the user asked for this rate, so a miss there is final; otherwise the
            headroom phase may still find a lower rate that meets.
        ceiling_rps: the device's known best, see `Calibration.ceiling_rps`.
        seed: all configurations are sent the same arrivals (common random numbers).
    """

    objective: Objective
    target_rps: float
    must_hold_target: bool
    ceiling_rps: float
    seed: int
    target_limit_s: float = 8.0
    step_limit_s: float = 5.0
    most_steps: int = 7
    resolution: float = 0.06


def run_trial(
    configuration: Configuration,
    origin: str,
    *,
    rig: Rig,
    plan: TrialPlan,
    prior: Prior,
    clock: Callable[[], float],
    say: Callable[[str], None] = lambda _: None,
) -> TrialResult:
    """Measure one configuration. Never raises for what the configuration did to the server.

    Args:
        configuration: a full configuration (every searched setting named).
        origin: who proposed it: `defaults`, `prior`, `sampler`, ...
        clock: seconds, monotonic.
        say: told what is going on, for people.
    """
    stopwatch = _Stopwatch(clock)
    prediction = prior.predict(configuration, plan.target_rps)
    blank = TrialResult(configuration, origin, Status.CRASHED, prediction=prediction)
    try:
        with stopwatch.lap("start"):
            say("starting the server")
            restarted = rig.server.obtain(configuration)
        if restarted:
            with stopwatch.lap("warm-up"):
                say("warming up")
                rig.warm_up(plan.target_rps, seed=plan.seed)
        with stopwatch.lap("target"):
            say(f"target {plan.target_rps:.0f}/s")
            target = rig.measure(
                "target", plan.target_rps, seed=plan.seed, limit_s=plan.target_limit_s
            )
        if target.certificate.fault is not None:
            return _void(blank, target, stopwatch)
        bracket, steps = Bracket().with_measurement(target), list[Measurement]()
        if plan.objective.needs_headroom and (target.verdict.meets or not plan.must_hold_target):
            with stopwatch.lap("headroom"):
                bracket, steps = find_capacity(
                    lambda rate: _step(rig, plan, rate, say),
                    target,
                    guess_rps=prediction.capacity_rps,
                    resolution=plan.resolution,
                    most_steps=plan.most_steps,
                )
    except ServerError as failure:
        return replace(
            blank,
            reason=failure.reason,
            constraints=constraints_of(Status.CRASHED, None),
            timings_s=stopwatch.laps_s,
            log_tail=failure.log_tail,
        )
    decisive = target if plan.must_hold_target else (bracket.at_capacity or target)
    return replace(
        blank,
        status=Status.MEASURED,
        reason=_sentence(target, decisive),
        measurements=(target, *steps),
        capacity_rps=bracket.low_rps,
        capacity_bound_rps=bracket.high_rps,
        values=values_of(target, bracket.at_capacity, plan.ceiling_rps),
        constraints=constraints_of(Status.MEASURED, decisive),
        timings_s=stopwatch.laps_s,
        log_tail=rig.server.log_tail(),
    )


def _step(rig: Rig, plan: TrialPlan, rate: float, say: Callable[[str], None]) -> Measurement:
    say(f"headroom {rate:.0f}/s")
    return rig.measure("headroom", rate, seed=plan.seed + 1, limit_s=plan.step_limit_s)


def _void(blank: TrialResult, target: Measurement, stopwatch: _Stopwatch) -> TrialResult:
    return replace(
        blank,
        status=Status.VOID,
        reason=target.certificate.fault or "",
        measurements=(target,),
        timings_s=stopwatch.laps_s,
    )


def _sentence(target: Measurement, decisive: Measurement) -> str:
    verdict = decisive.verdict
    return (
        f"{verdict.outcome} {verdict.budget_ms:g} ms at {decisive.rate_rps:.0f}/s: "
        f"{verdict.violations} of {verdict.requests} requests over it"
        + ("" if decisive is target else f" (target {target.rate_rps:.0f}/s "
           f"{target.verdict.outcome})")
    )  # fmt: skip


class _Stopwatch:
    """Seconds of each named part of a trial."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.laps_s: dict[str, float] = {}

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self.laps_s[name] = self._clock() - began
