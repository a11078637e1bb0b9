"""The prior's first layer: closed forms for batch size, P99, cost and capacity.

Notation: rate L (requests/s), window W, batch time S(b), maximum batch B, k instances.

- The origin's rule is E[b] = L W. With a timer that starts at the first request of a batch it is
  1 + L W, cut at B; and a busy executor batches by itself: the fixed point m = L S(m) / k.
  Together E[b] = min(B, max(1 + L W, m)).
- P99 = max(wait, S+) + S+ with S+ = S(b+) and b+ = E[b] + 1.6 sd(b): a late request waits for the
  window or for the batch before it, then for its own. The budget test this implies for a backlog
  is 2 S <= budget (Shen et al., "Nexus", SOSP 2019).
- No request of the first place of a batch is answered before wait + S(E[b]): the floor.

Near saturation both are too optimistic: they order candidates and never judge one. Every report
shows them beside what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.calibration import Calibration, ServiceTime, service_key
from tuner.configuration import Configuration, Value
from tuner.measurement import Prediction

# Share of the cores that decoding, front end and models may fill before queues grow: the load
# generator and the kernel need the rest when they share the machine.
CORE_SHARE = 0.9
# Lone calibration requests find a cold cache and a slow clock: loaded servers were seen to take up
# to a fifth less. Only what is out of reach by more than that is forbidden.
CALIBRATION_MARGIN = 1.25


@dataclass(frozen=True)
class Prior:
    """Predictions for one machine, model and budget.

    Args:
        calibration: measured batch and preprocessing times.
        budget_ms: the P99 budget.
        defaults: the server's settings that a configuration does not name.
        shared_cores: cores that models and preprocessing share, on a CPU device; None where the
            model runs on a device of its own.
    """

    calibration: Calibration
    budget_ms: float
    defaults: Mapping[str, Value]
    shared_cores: int | None

    def full(self, configuration: Mapping[str, Value]) -> Configuration:
        """The configuration with the server's defaults filled in."""
        return Configuration.of({**self.defaults, **configuration})

    def can_run(self, configuration: Mapping[str, Value]) -> bool:
        """Whether its engine and precision were calibrated; if not there is nothing to predict."""
        return service_key(self.full(configuration)) in self.calibration.service

    def predict(self, configuration: Mapping[str, Value], rate_rps: float) -> Prediction:
        """What to expect of this configuration at this rate."""
        full = self.full(configuration)
        case = _Case.of(self, full, rate_rps)
        return Prediction(
            rate_rps=rate_rps,
            mean_batch=case.mean_batch,
            rate_times_window=rate_rps * case.window_s,
            floor_ms=1000 * case.floor_s,
            p99_ms=1000 * case.p99_s,
            capacity_rps=self.capacity_rps(full),
            device_s_per_request=case.device_s_per_request,
        )

    def capacity_rps(self, configuration: Mapping[str, Value]) -> float:
        """The highest rate at which the predicted P99 is inside the budget; 0 if there is none."""
        full = self.full(configuration)
        low, high = 0.0, self.calibration.ceiling_rps * 1.2
        for _ in range(12):  # to one part in four thousand
            middle = (low + high) / 2
            met = 1000 * _Case.of(self, full, middle).p99_s <= self.budget_ms
            low, high = (middle, high) if met else (low, middle)
        return low

    def forbids(self, configuration: Mapping[str, Value], rate_rps: float | None) -> str | None:
        """Why this configuration cannot run or cannot meet the budget; None if it might.

        Args:
            rate_rps: the rate that must be sustained; None where any rate will do, so that only
                the floor of a lone request counts.
        """
        full = self.full(configuration)
        if (reason := self.calibration.refused.get(service_key(full))) is not None:
            return reason
        case = _Case.of(self, full, rate_rps or 1.0)
        if rate_rps is not None and rate_rps >= CALIBRATION_MARGIN * case.stability_rps:
            return (
                f"{rate_rps:.0f}/s is far above the {case.stability_rps:.0f}/s at which its queue "
                f"grows without bound"
            )
        if 1000 * case.floor_s > self.budget_ms:
            return (
                f"its floor, wait {1000 * case.wait_s:.0f} ms + batch "
                f"{1000 * case.service.of(case.mean_batch):.0f} ms + preprocessing "
                f"{1000 * case.preprocess_s:.0f} ms, is above {self.budget_ms:g} ms"
            )
        return None


@dataclass(frozen=True)
class _Case:
    """One full configuration at one rate: the quantities that the formulas share."""

    rate_rps: float
    window_s: float
    max_batch: int
    instances: int
    workers: int
    threads: int
    service: ServiceTime
    preprocess_s: float
    overhead_s: float
    shared_cores: int | None

    @classmethod
    def of(cls, prior: Prior, full: Configuration, rate_rps: float) -> _Case:
        instances = int(full.number("instances", 1))
        return cls(
            rate_rps=rate_rps,
            window_s=full.number("batch_window_ms", 0) / 1000,
            max_batch=int(full.number("max_batch_size", 1)),
            instances=instances,
            workers=int(full.number("workers", 1)),
            threads=int(full.number("threads", 1)),
            service=prior.calibration.service_time(full, instances),
            preprocess_s=prior.calibration.preprocessing_s(full),
            overhead_s=prior.calibration.overhead_s,
            shared_cores=prior.shared_cores,
        )

    @property
    def timer_batch(self) -> float:
        """1 + L W, cut at B: 1 + the sum over j < B of P(Poisson(L W) >= j)."""
        mean = self.rate_rps * self.window_s
        if mean > 4 * self.max_batch:  # the sum is B to many digits, and exp(-mean) may underflow
            return float(self.max_batch)
        expected, tail, term = 1.0, 1.0, math.exp(-mean)
        for j in range(1, self.max_batch):
            tail -= term
            expected += max(tail, 0.0)
            term *= mean / j
        return expected

    @property
    def natural_batch(self) -> float:
        """The fixed point m = L S(m) / k of executors that are never idle, cut at B."""
        batch = 1.0
        for _ in range(40):
            following = self.rate_rps * self.service.of(batch) / self.instances
            following = min(max(following, 1.0), float(self.max_batch))
            if abs(following - batch) < 0.01:
                break
            batch = following
        return batch

    @property
    def mean_batch(self) -> float:
        return min(float(self.max_batch), max(self.timer_batch, self.natural_batch))

    @property
    def wait_s(self) -> float:
        """How long the first request of a batch waits: the window, or until the batch is full."""
        return min(self.window_s, (self.max_batch - 1) / self.rate_rps)

    @property
    def floor_s(self) -> float:
        return self.wait_s + self.service.of(self.mean_batch) + self.preprocess_s

    @property
    def stability_rps(self) -> float:
        """The rate at which the first of executors, workers and cores is full."""
        batch = float(self.max_batch)
        batch_s = self.service.of(batch)
        limits = [self.instances * batch / batch_s, self.workers / self.preprocess_s]
        if self.shared_cores is not None:
            core_s = self.preprocess_s + self.threads * batch_s / batch + self.overhead_s
            limits.append(CORE_SHARE * self.shared_cores / core_s)
        return min(limits)

    @property
    def p99_s(self) -> float:
        if self.rate_rps >= self.stability_rps:
            return math.inf
        large_s = self.service.of(min(self.mean_batch + 1.6 * self._batch_sd, self.max_batch))
        queue_s = max(self.wait_s, large_s)
        return self._preprocess_p99_s + queue_s + large_s + self.overhead_s

    @property
    def _batch_sd(self) -> float:
        """sqrt(L W) where the timer makes the batch, sqrt(m / (1 - load^2)) where backlog does."""
        if self.timer_batch >= self.natural_batch:
            return math.sqrt(self.rate_rps * self.window_s)
        load = self.rate_rps / self.stability_rps
        return math.sqrt(self.natural_batch / (1 - load**2))

    @property
    def _preprocess_p99_s(self) -> float:
        """One image, and the tail of the workers' queue: 4.6 times the M/D/1 mean wait."""
        load = self.rate_rps * self.preprocess_s / self.workers
        return self.preprocess_s * (1 + 2.3 * load / (1 - load) / self.workers)

    @property
    def device_s_per_request(self) -> float:
        """Busy seconds of the device for one request, the instances' overlap counted once."""
        overlap = min(self.instances, max(self.rate_rps / self._one_instance_rps, 1.0))
        return self.service.of(self.mean_batch) / self.mean_batch / overlap

    @property
    def _one_instance_rps(self) -> float:
        return self.mean_batch / self.service.of(self.mean_batch)
