"""Finalists: measured again with fresh seeds, because the best of many is partly luck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.configuration import Configuration
from tuner.measurement import Measurement
from tuner.objective import values_of
from tuner.phase import Rig
from tuner.trial import TrialPlan

# Seeds of finalists are this far from the study's, so that no finalist sees arrivals it won on.
FRESH_SEEDS = 1000
# A capacity that does not repeat is lowered in steps below the resolution of the search.
CAPACITY_STEP = 0.95
CAPACITY_TRIES = 5
TARGET_LIMIT_S = 12.0
CONFIDENCE = 0.99


@dataclass(frozen=True)
class Confirmation:
    """One finalist's second measurement.

    `capacity_rps` is 0 where no tried rate met the budget again, or none was asked for.
    """

    trial_number: int
    configuration: Configuration
    measurements: tuple[Measurement, ...]
    capacity_rps: float
    values: dict[str, float]

    @property
    def target(self) -> Measurement:
        """The measurement at the target rate."""
        return self.measurements[0]

    @property
    def at_capacity(self) -> Measurement | None:
        """The measurement at the confirmed capacity."""
        met = [m for m in self.measurements[1:] if m.verdict.meets]
        return met[-1] if met else None

    @property
    def meets(self) -> bool:
        return self.target.verdict.meets or self.capacity_rps > 0


def confirm(
    trial_number: int,
    configuration: Configuration,
    claimed_rps: float,
    *,
    rig: Rig,
    plan: TrialPlan,
    round_: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Confirmation:
    """Measure a finalist again: at the target rate, then at its claimed capacity or below.

    Args:
        claimed_rps: the capacity that its trial found.
        round_: different rounds use different seeds; finalists of one round share theirs.

    Raises:
        ServerError: the server did not survive it.
    """
    seed = plan.seed + FRESH_SEEDS * (1 + round_)
    say("starting the server")
    if rig.server.obtain(configuration):
        say("warming up")
        rig.warm_up(plan.target_rps, seed=seed)
    say(f"target {plan.target_rps:.0f}/s with fresh seeds")
    target = rig.measure(
        "confirm",
        plan.target_rps,
        seed=seed,
        limit_s=TARGET_LIMIT_S,
        confidence=CONFIDENCE,
    )
    measurements, capacity_rps, rate = [target], 0.0, claimed_rps
    for step in range(CAPACITY_TRIES if plan.objective.needs_headroom and rate > 0 else 0):
        say(f"capacity {rate:.0f}/s with fresh seeds")
        measurements.append(
            rig.measure("confirm-capacity", rate, seed=seed + 1 + step, limit_s=plan.target_limit_s)
        )
        if measurements[-1].verdict.meets:
            capacity_rps = rate
            break
        rate *= CAPACITY_STEP
    at_capacity = measurements[-1] if capacity_rps else None
    return Confirmation(
        trial_number=trial_number,
        configuration=configuration,
        measurements=tuple(measurements),
        capacity_rps=capacity_rps,
        values=values_of(target, at_capacity, plan.ceiling_rps),
    )
