"""A shipped fake of NVML, held to the same contract tests as the real one."""
# ruff: noqa: N802 - the names are NVML's

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, TypeVar

import pynvml

REAL: Any = pynvml  # it has no type hints
# The driver's ring buffer has a sample every sixth of a second.
RING_STEP_US = 166_667

P = ParamSpec("P")
T = TypeVar("T")


def _refusable(
    function: Callable[Concatenate[FakeNvml, P], T],
) -> Callable[Concatenate[FakeNvml, P], T]:
    """Raise NVML's own error where the fake device is told not to support the function."""

    @wraps(function)
    def wrapper(self: FakeNvml, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if function.__name__ in self.refused:
            raise REAL.NVMLError(REAL.NVML_ERROR_NOT_SUPPORTED)
        return function(self, *args, **kwargs)

    return wrapper


@dataclass
class FakeNvml:
    """Stands in for the `pynvml` module, with pynvml's own exceptions and constants.

    Args:
        busy: utilization readings in [0, 1], one each time; the last one stays.
        ring: utilization that the ring buffer gains with each look at it; None without a buffer.
        pids: compute processes on the device.
        throttle: bit mask of clock event reasons.
        energy_mj: readings of the energy counter, one each time; the last one stays.
        refused: names of functions that this device does not support.
        opened: how often NVML is initialised at the moment.
    """

    busy: Sequence[float] = (0.5,)
    ring: Sequence[float] | None = None
    pids: Sequence[int] = ()
    power_w: float = 300.0
    clock_mhz: int = 1500
    memory_bytes: int = 1 << 30
    throttle: int = 0
    energy_mj: Sequence[int] = ()
    devices: int = 1
    refused: frozenset[str] = frozenset()
    opened: int = 0
    _asked: dict[str, int] = field(default_factory=dict, init=False)

    def __getattr__(self, name: str) -> Any:
        if callable(found := getattr(REAL, name)) and not isinstance(found, type):
            raise AttributeError(f"FakeNvml has no {name}.")
        return found

    @_refusable
    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    @_refusable
    def nvmlSystemGetDriverVersion(self) -> str:
        return "999.1"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= self.devices:
            raise REAL.NVMLError(REAL.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        known = [f"GPU-{index}" for index in range(self.devices)]
        if uuid not in known:
            raise REAL.NVMLError(REAL.NVML_ERROR_NOT_FOUND)
        return known.index(uuid)

    @_refusable
    def nvmlDeviceGetName(self, device: int) -> str:
        return f"Fake GPU {device}"

    @_refusable
    def nvmlDeviceGetUUID(self, device: int) -> str:
        return f"GPU-{device}"

    @_refusable
    def nvmlDeviceGetUtilizationRates(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=round(100 * self._next("busy", self.busy)), memory=0)

    @_refusable
    def nvmlDeviceGetSamples(
        self, device: int, kind: int, last_seen_us: int
    ) -> tuple[int, list[SimpleNamespace]]:
        if self.ring is None:
            raise REAL.NVMLError(REAL.NVML_ERROR_NOT_SUPPORTED)
        return REAL.NVML_VALUE_TYPE_UNSIGNED_INT, [
            SimpleNamespace(
                timeStamp=last_seen_us + RING_STEP_US * (number + 1),
                sampleValue=SimpleNamespace(uiVal=round(100 * share)),
            )
            for number, share in enumerate(self.ring)
        ]

    @_refusable
    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        return round(1000 * self.power_w)

    @_refusable
    def nvmlDeviceGetEnforcedPowerLimit(self, device: int) -> int:
        return 700_000

    @_refusable
    def nvmlDeviceGetTotalEnergyConsumption(self, device: int) -> int:
        if not self.energy_mj:
            raise REAL.NVMLError(REAL.NVML_ERROR_NOT_SUPPORTED)
        return self._next("energy", self.energy_mj)

    @_refusable
    def nvmlDeviceGetClockInfo(self, device: int, kind: int) -> int:
        return self.clock_mhz

    @_refusable
    def nvmlDeviceGetMaxClockInfo(self, device: int, kind: int) -> int:
        return 1980

    @_refusable
    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 << 30, used=self.memory_bytes)

    @_refusable
    def nvmlDeviceGetCurrentClocksEventReasons(self, device: int) -> int:
        return self.throttle

    @_refusable
    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def _next(self, name: str, readings: Sequence[T]) -> T:
        number = self._asked.get(name, 0)
        self._asked[name] = number + 1
        return readings[min(number, len(readings) - 1)]
