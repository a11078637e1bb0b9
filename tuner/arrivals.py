"""Arrival times, drawn before anything is sent: an open loop never waits for answers."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Kind = Literal["poisson", "constant"]
KINDS: tuple[str, ...] = get_args(Kind)

# Gaps are drawn in chunks of this many, so that a longer phase extends a shorter one's schedule.
CHUNK = 4096


def draw(kind: str, rate_rps: float, seed: int, duration_s: float) -> NDArray[np.float64]:
    """Intended send times in seconds from the start of a phase, ascending, all below its duration.

    Gaps have mean 1 and are divided by the rate: phases with one seed at different rates see one
    pattern, stretched (common random numbers). Poisson arrivals have exponential gaps.
    """
    if kind not in KINDS:
        raise ValueError(f"arrivals: {kind!r} is not a kind of arrivals; use {' or '.join(KINDS)}")
    rng = np.random.default_rng(seed)
    chunks, reached = list[NDArray[np.float64]](), 0.0
    while reached < duration_s * rate_rps:
        gaps = rng.exponential(size=CHUNK) if kind == "poisson" else np.ones(CHUNK)
        chunks.append(reached + np.cumsum(gaps))
        reached = float(chunks[-1][-1])
    if not chunks:
        return np.empty(0)
    times: NDArray[np.float64] = np.concatenate(chunks) / rate_rps
    return times[times < duration_s]
