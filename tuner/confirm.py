"""Finalists: measured again with fresh seeds, because the best of many is partly luck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.configuration import Configuration
from tuner.headroom import Bracket
from tuner.measurement import Measurement
from tuner.objective import values_of
from tuner.phase import Rig
from tuner.trial import TrialPlan, enough_s
from tuner.verdict import Outcome

# Seeds of finalists are this far from the study's, so that no finalist sees arrivals it won on.
FRESH_SEEDS = 1000
# The claim is the best of several noisy ones, so it is first tried a little lower, and lowered
# again while it does not repeat: 0.94, 0.83, 0.73, 0.64 of what was claimed.
CLAIM_SHARE = 0.94
CAPACITY_STEP = 0.88
CAPACITY_TRIES = 4
LIMIT_S = 12.0
# Of a verdict at a rate that the user asked for.
CONFIDENCE = 0.99


@dataclass(frozen=True)
class Confirmation:
    """One finalist's second measurement.

    Args:
        load: at the rate on which finalists are compared: the one asked for, or else the winner's
            capacity.
        at_capacity: at the highest tried rate that met the budget again; None where none did or
            the objective asks for none.
        holds: it met the budget again at some rate; where the rate is the user's, nothing
            contradicts that it does (a verdict at 99 % may be out of reach).
    """

    trial_number: int
    configuration: Configuration
    load: Measurement
    at_capacity: Measurement | None
    values: dict[str, float]
    holds: bool

    @property
    def capacity_rps(self) -> float:
        return self.at_capacity.rate_rps if self.at_capacity else 0.0


def confirm(
    trial_number: int,
    configuration: Configuration,
    claimed_rps: float,
    *,
    rig: Rig,
    plan: TrialPlan,
    beside: Measurement | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Confirmation:
    """Measure a finalist again, on the common load and at its claimed capacity or below.

    Args:
        claimed_rps: the capacity that its trial found.
        beside: the winner's measurement, whose rate and seed this one is given too.

    Raises:
        ServerError: the server did not survive it.
    """
    seed = plan.seed + FRESH_SEEDS
    common_rps = None if plan.finds_own_rate else plan.target_rps
    if beside is not None:
        common_rps = beside.rate_rps
    say("starting the server")
    if rig.server.obtain(configuration):
        say("warming up")
        rig.warm_up(plan.target_rps, seed=seed)
    load = None
    if common_rps is not None:
        say(f"{common_rps:.0f}/s with fresh seeds")
        load = rig.measure(
            "confirm",
            common_rps,
            seed=beside.seed if beside else seed,
            limit_s=enough_s(common_rps, LIMIT_S, CONFIDENCE),
            confidence=0.0 if plan.finds_own_rate else CONFIDENCE,
        )
    at_capacity = load if load and load.verdict.meets else None
    if plan.objective.needs_headroom and claimed_rps > (at_capacity.rate_rps if at_capacity else 0):
        bracket = _confirm_capacity(rig, plan, claimed_rps, seed + 1, say)
        at_capacity = bracket.at_capacity or at_capacity
        load = load or at_capacity or bracket.measured[-1]
    assert load is not None, "a finalist has a claimed capacity or a common load"
    return Confirmation(
        trial_number=trial_number,
        configuration=configuration,
        load=load,
        at_capacity=at_capacity,
        values=values_of(load, at_capacity, plan.ceiling_rps),
        holds=at_capacity is not None
        if plan.finds_own_rate
        else load.verdict.outcome is not Outcome.MISSES,
    )


def _confirm_capacity(
    rig: Rig, plan: TrialPlan, rate: float, seed: int, say: Callable[[str], None]
) -> Bracket:
    """Downwards from the claimed rate until one meets."""
    bracket, rate = Bracket(), CLAIM_SHARE * rate
    for step in range(CAPACITY_TRIES):
        say(f"capacity {rate:.0f}/s with fresh seeds")
        measurement = rig.measure(
            "confirm-capacity",
            rate,
            seed=seed + step,
            limit_s=enough_s(rate, LIMIT_S),
            earlier=bracket.evidence_for(rate),
        )
        bracket = bracket.with_measurement(measurement)
        if bracket.at_capacity is not None:
            break
        rate *= CAPACITY_STEP
    return bracket
