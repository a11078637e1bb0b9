"""Finalists: measured again with fresh seeds, because the best of many is partly luck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tuner.configuration import Configuration
from tuner.headroom import Headroom, Step
from tuner.measurement import Measurement
from tuner.objective import values_of
from tuner.phase import Rig
from tuner.trial import TrialPlan, enough_s
from tuner.verdict import Outcome

# Seeds of finalists are this far from the study's, so that no finalist sees arrivals it won on.
FRESH_SEEDS = 1000
# The claim is the best of several noisy ones: the search for it starts a little lower.
CLAIM_SHARE = 0.94
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
    load, at_capacity = None, None
    if common_rps is not None:
        say(f"{common_rps:.0f}/s with fresh seeds")
        load = _common_load(rig, plan, common_rps, beside.seed if beside else seed)
    if plan.objective.needs_headroom:
        headroom = Headroom(partial(_step, rig, plan, seed + 1, say), plan.effort)
        if load is not None:
            headroom.start_from(load)
        headroom.find(CLAIM_SHARE * claimed_rps or plan.target_rps)
        at_capacity = headroom.bracket.at_capacity
        load = load or at_capacity or headroom.steps[-1]
    assert load is not None, "one of the two was measured"
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


def _common_load(rig: Rig, plan: TrialPlan, rate_rps: float, seed: int) -> Measurement:
    """At a rate that the user asked for the verdict must weigh more than in the search."""
    confidence = rig.load.confidence if plan.finds_own_rate else CONFIDENCE
    limit_s = enough_s(rate_rps, LIMIT_S, confidence)
    return rig.measure("confirm", rate_rps, seed=seed, limit_s=limit_s, confidence=confidence)


def _step(
    rig: Rig, plan: TrialPlan, seed: int, say: Callable[[str], None], step: Step
) -> Measurement:
    say(f"capacity {step.rate_rps:.0f}/s with fresh seeds")
    return rig.measure(
        "confirm-capacity",
        step.rate_rps,
        seed=seed + step.number,
        limit_s=enough_s(step.rate_rps, step.limit_s),
        earlier=step.earlier,
    )
