"""One trial: from a configuration to everything that was found out about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from tuner.configuration import Configuration
from tuner.headroom import DEFAULT_EFFORT, Effort, Headroom, Step
from tuner.measurement import Measurement, Status, TrialResult
from tuner.objective import Objective, constraints_of, values_of
from tuner.phase import Rig
from tuner.prior import Prior
from tuner.server import ServerError
from tuner.verdict import clean_requests

Say = Callable[[str], None]

LONGEST_PHASE_S = 60.0
# Twice the 321 clean requests that 95 % takes fit into a usual phase of 12 s at about this rate.
SLOW_RATE_RPS = 50.0
# Before anything was measured: a verdict within seconds needs room, so rates near the predicted
# capacity stay undecided.
FIRST_TRUST = 0.7


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
    effort: Effort = DEFAULT_EFFORT

    @property
    def finds_own_rate(self) -> bool:
        """Whether finalists are compared at a rate that the search found, not one asked for."""
        return self.objective.needs_headroom and not self.must_hold_target

    @property
    def target_limit_s(self) -> float:
        """A rate that must be held deserves a verdict; one that only serves comparison does not."""
        return 3.0 if self.finds_own_rate else enough_s(self.target_rps, 12.0)


def enough_s(rate_rps: float, usual_s: float, confidence: float = 0.95) -> float:
    """How long a phase may take: below 50 requests/s in proportion longer than usual, because it
    is requests that a verdict needs; a minute is all that any rate gets."""
    few = clean_requests(confidence) / clean_requests(0.95) * SLOW_RATE_RPS / rate_rps
    return min(usual_s * max(1.0, few), LONGEST_PHASE_S)


def run_trial(
    configuration: Configuration,
    origin: str,
    *,
    rig: Rig,
    plan: TrialPlan,
    prior: Prior,
    clock: Callable[[], float],
    trust: float = FIRST_TRUST,
    say: Say = lambda _: None,
) -> TrialResult:
    """Measure one configuration. Never raises for what the configuration did to the server.

    Args:
        configuration: a full configuration (every searched setting named).
        origin: who proposed it: `defaults`, `prior`, `sampler`, ...
        clock: seconds, monotonic.
        trust: measured over predicted capacity in earlier trials; scales the first guess.
        say: told what is going on, for people.
    """
    laps = _Stopwatch(clock)
    prediction = prior.predict(configuration, plan.target_rps)
    blank = TrialResult(configuration, origin, Status.CRASHED, prediction=prediction)
    headroom = Headroom(partial(_step, rig, plan, say), plan.effort)
    try:
        with laps.lap("start"):
            say("starting the server")
            restarted = rig.server.obtain(configuration)
        if restarted:
            with laps.lap("warm-up"):
                say("warming up")
                rig.warm_up(plan.target_rps, seed=plan.seed)
        with laps.lap("target"):
            say(f"target {plan.target_rps:.0f}/s")
            target = rig.measure(
                "target", plan.target_rps, seed=plan.seed, limit_s=plan.target_limit_s
            )
        if target.certificate.fault is not None:
            return _void(blank, target, laps)
        headroom.start_from(target)
        if plan.objective.needs_headroom and (target.verdict.meets or not plan.must_hold_target):
            with laps.lap("headroom"):
                headroom.find(max(trust * prediction.capacity_rps, 1.0))
    except ServerError as failure:
        rig.server.stop()  # whatever is left of it must not be the next trial's
        return _crashed(blank, failure, laps)
    return _measured(blank, target, headroom, plan, laps, rig.server.log_tail())


def _measured(
    blank: TrialResult,
    target: Measurement,
    headroom: Headroom,
    plan: TrialPlan,
    laps: _Stopwatch,
    log_tail: str,
) -> TrialResult:
    bracket = headroom.bracket
    decisive = target if plan.must_hold_target else (bracket.at_capacity or target)
    return replace(
        blank,
        status=Status.MEASURED,
        reason=_sentence(target, decisive),
        measurements=(target, *headroom.steps),
        capacity_rps=bracket.low_rps,
        capacity_bound_rps=bracket.high_rps,
        values=values_of(target, bracket.at_capacity, plan.ceiling_rps),
        constraints=constraints_of(Status.MEASURED, decisive),
        timings_s=laps.laps_s,
        log_tail=log_tail,
    )


def _crashed(blank: TrialResult, failure: ServerError, laps: _Stopwatch) -> TrialResult:
    return replace(
        blank,
        reason=failure.reason,
        constraints=constraints_of(Status.CRASHED, None),
        timings_s=laps.laps_s,
        log_tail=failure.log_tail,
    )


def _step(rig: Rig, plan: TrialPlan, say: Say, step: Step) -> Measurement:
    say(f"headroom {step.rate_rps:.0f}/s")
    return rig.measure(
        "headroom",
        step.rate_rps,
        seed=plan.seed + 1 + step.number,
        limit_s=enough_s(step.rate_rps, step.limit_s),
        earlier=step.earlier,
    )


def _void(blank: TrialResult, target: Measurement, laps: _Stopwatch) -> TrialResult:
    return replace(
        blank,
        status=Status.VOID,
        reason=target.certificate.fault or "",
        measurements=(target,),
        timings_s=laps.laps_s,
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
