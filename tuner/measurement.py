"""What one trial leaves behind: measurements under load, device figures, predictions, outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tuner.configuration import Configuration
from tuner.verdict import Verdict


@dataclass(frozen=True)
class DeviceUsage:
    """How the device was used during one measurement. None: this device cannot say.

    `busy_share` is in [0, 1]: on a GPU the share of time with at least one kernel running, on a
    CPU the share in which at least one executor was inside the model; `source` names which
    (`nvml` or `executor`). `busy_samples` holds the readings it is made of, if there are any.
    """

    source: str
    busy_share: float | None
    busy_samples: tuple[float, ...] = ()
    memory_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    foreign_pids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """What the prior expects of a configuration at one rate. Infinite: the queue would grow."""

    rate_rps: float
    mean_batch: float
    rate_times_window: float
    floor_ms: float
    p99_ms: float
    capacity_rps: float
    device_s_per_request: float


@dataclass(frozen=True)
class ServerWork:
    """The server's own counters over one measurement (differences of two snapshots)."""

    answered: int
    rejected: int
    failed: int
    batches: int
    batch_sizes: dict[int, int]
    queue_s: float
    preprocess_s: float
    compute_s: float
    busy_s: float
    elapsed_s: float
    memory_bytes: int

    @property
    def mean_batch(self) -> float:
        """Requests per batch; NaN when none ran."""
        return self.answered_in_batches / self.batches if self.batches else math.nan

    @property
    def answered_in_batches(self) -> int:
        return sum(size * count for size, count in self.batch_sizes.items())

    def per_request_ms(self, seconds: float) -> float:
        """A summed time as milliseconds for each request; NaN when none was answered."""
        return 1000 * seconds / self.answered if self.answered else math.nan


@dataclass(frozen=True)
class Certificate:
    """Whether the load was what it claims to be. `fault` is None when it was."""

    offered: int
    sent: int
    answered: int
    offered_rps: float
    send_lag_p99_ms: float
    generator_cpu_share: float
    pacer: str
    fault: str | None = None


@dataclass(frozen=True)
class Measurement:
    """One configuration under one rate for some seconds."""

    phase: str
    rate_rps: float
    seed: int
    arrivals: str
    duration_s: float
    verdict: Verdict
    goodput_rps: float
    errors: dict[str, int]
    certificate: Certificate
    work: ServerWork
    device: DeviceUsage
    latencies_ms: NDArray[np.float32] = field(repr=False, compare=False)

    @property
    def device_s_per_request(self) -> float:
        """Busy seconds per answered request: the cost of one. NaN when it cannot be known."""
        if self.device.busy_share is None or not self.work.answered:
            return math.nan
        return self.device.busy_share * self.work.elapsed_s / self.work.answered


class Status(StrEnum):
    """How a trial ended."""

    MEASURED = "measured"
    SKIPPED = "skipped"  # the prior forbade it: not measured
    CRASHED = "crashed"  # the server died, failed to start or ran out of memory
    VOID = "void"  # our own fault: the load or the host was not what it should be


@dataclass(frozen=True)
class TrialResult:
    """Everything one trial found out."""

    configuration: Configuration
    origin: str
    status: Status
    reason: str = ""
    measurements: tuple[Measurement, ...] = ()
    capacity_rps: float = 0.0
    capacity_bound_rps: float = math.inf
    values: dict[str, float] = field(default_factory=dict)
    constraints: dict[str, float] = field(default_factory=dict)
    prediction: Prediction | None = None
    timings_s: dict[str, float] = field(default_factory=dict)
    log_tail: str = ""

    @property
    def feasible(self) -> bool:
        return self.status is Status.MEASURED and all(v <= 0 for v in self.constraints.values())

    def phase(self, name: str) -> Measurement | None:
        """The last measurement of this phase, if there was one."""
        return next((m for m in reversed(self.measurements) if m.phase == name), None)
