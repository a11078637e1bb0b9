"""The prior's best guesses: which configurations to try first."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping

from tuner.configuration import LIVE_PARAMETERS, Value
from tuner.objective import Objective
from tuner.prior import Prior
from tuner.search import Proposal
from tuner.settings import RunSettings
from tuner.space import Space

# The best few, each from another server start: neighbours of one start hardly differ in the
# closed form, and its error is larger than their difference.
GUESSES = 4
# Spaces larger than this, or continuous, are sampled.
SAMPLED_POINTS = 3000

Point = dict[str, Value]


def guesses(space: Space, prior: Prior, settings: RunSettings) -> list[Proposal]:
    """The best predicted points, best first, each with another restart key."""
    score = scorer(prior, settings)
    possible = [p for p in points(space) if prior.forbids(p, settings.qps) is None]
    best: dict[frozenset[tuple[str, Value]], Point] = {}
    for point in sorted(possible, key=score):
        best.setdefault(_start_of(point), point)
        if len(best) == GUESSES:
            break
    return [Proposal("prior", point) for point in best.values()]


def points(space: Space) -> Iterable[Point]:
    """Every point of a small finite space, else a fixed random sample."""
    size = space.size()
    if size is not None and size <= SAMPLED_POINTS:
        return space.grid()
    rng = random.Random(0)  # the same guesses every time
    return [space.sample(rng) for _ in range(SAMPLED_POINTS)]


def scorer(prior: Prior, settings: RunSettings) -> Callable[[Point], tuple[float, float]]:
    """Sort key of a point under the objective, best first; ties go to the lower P99."""

    def at_capacity(point: Point) -> tuple[float, float]:
        capacity = prior.capacity_rps(point)
        # Differences below 2 % are noise; among them the shorter window decides, then the larger
        # batch, which a backlog needs and nothing else is hurt by.
        coarse = -round(capacity / (0.02 * prior.calibration.ceiling_rps))
        window_ms, largest = (float(prior.full(point)[k]) for k in
                              ("batch_window_ms", "max_batch_size"))  # fmt: skip
        return coarse, window_ms - largest / 1000

    def at_target(point: Point) -> tuple[float, float]:
        rate = settings.qps or 0.5 * prior.calibration.ceiling_rps
        predicted = prior.predict(point, rate)
        late = predicted.p99_ms > prior.budget_ms
        sign = -1.0 if settings.objective is Objective.GPU_UTIL else 1.0
        return (
            1e9 if late else sign * predicted.device_s_per_request,
            predicted.p99_ms,
        )

    return at_capacity if settings.objective is Objective.UTILIZATION else at_target


def _start_of(point: Mapping[str, Value]) -> frozenset[tuple[str, Value]]:
    return frozenset((k, v) for k, v in point.items() if k not in LIVE_PARAMETERS)
