"""An NVIDIA GPU seen through NVML: a thread that samples while load runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from types import ModuleType
from typing import Any

from tuner.measurement import DeviceUsage, ServerWork
from tuner.probe import idle_notes

# NVML refreshes utilization every sixth of a second to a second, power and clocks faster.
SAMPLES_PER_S = 20
# The ring buffer of utilization holds some ten seconds, and finding our own processes costs
# milliseconds: both once a second.
SLOW_EVERY = SAMPLES_PER_S


@dataclass
class _Readings:
    """What was seen since `begin`."""

    busy: list[float] = field(default_factory=list)
    ring: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)
    clock_mhz: list[float] = field(default_factory=list)
    memory_bytes: int | None = None
    throttled: set[str] = field(default_factory=set)
    own: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)


class NvmlProbe:
    """A GPU through NVML. What it does not support or allow becomes None and a note.

    Args:
        ordinal: CUDA's number of the device.
        own_pids: our server's processes; compute processes beside them are foreign.
        nvml: the `pynvml` module, or a stand-in.
        visible: the server's `CUDA_VISIBLE_DEVICES`, if it has one.
        clock: seconds, monotonic.

    Raises:
        NVMLError: there is no NVML or no such device; from the constructor only.
    """

    def __init__(
        self,
        ordinal: int,
        own_pids: Callable[[], set[int]],
        nvml: ModuleType | Any,
        visible: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml, self._own_pids, self._clock = nvml, own_pids, clock
        nvml.nvmlInit()
        try:
            self._device = _handle(nvml, ordinal, visible)
        except nvml.NVMLError:
            nvml.nvmlShutdown()
            raise
        self._readings = _Readings()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_seen_us = 0
        self._energy_mj: float | None = None
        self._began_s = 0.0

    def describe(self) -> dict[str, str | float | None]:
        nvml = self._nvml
        return {
            "kind": "cuda",
            "name": self._ask("the name", nvml.nvmlDeviceGetName),
            "uuid": self._ask("the UUID", nvml.nvmlDeviceGetUUID),
            "driver": self._ask("the driver", lambda _: nvml.nvmlSystemGetDriverVersion()),
            "power_limit_w": self._power_limit_w(),
            "sm_clock_max_mhz": self._clock_max_mhz(),
        }

    def begin(self) -> None:
        self._halt()
        self._ring_samples()  # what is older than now does not count
        self._readings = _Readings()
        self._energy_mj, self._began_s = self._energy(), self._clock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until, args=(self._stop,), daemon=True)
        self._thread.start()

    def end(self, work: ServerWork) -> DeviceUsage:
        self._halt()
        power_w = self._mean_power_w()
        seen = self._readings
        if not seen.busy:  # a phase shorter than the interval
            self._sample()
        self._sample_slowly()
        busy = seen.ring or seen.busy
        share = fmean(busy) if busy else None
        limit_w, clock_max_mhz = self._power_limit_w(), self._clock_max_mhz()
        return DeviceUsage(
            source="nvml",
            busy_share=share,
            busy_samples=tuple(busy),
            memory_bytes=seen.memory_bytes,
            power_w=power_w,
            power_limit_w=limit_w,
            sm_clock_mhz=fmean(seen.clock_mhz) if seen.clock_mhz else None,
            sm_clock_max_mhz=clock_max_mhz,
            throttle_reasons=tuple(sorted(seen.throttled)),
            foreign_pids=tuple(sorted(seen.others)) if seen.own else (),
            notes=(*sorted(seen.notes), *idle_notes(share, work), *_process_notes(seen)),
        )

    def close(self) -> None:
        self._halt()
        self._nvml.nvmlShutdown()

    def _halt(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _sample_until(self, stop: threading.Event) -> None:
        count = 0
        while not stop.wait(1 / SAMPLES_PER_S):
            self._sample()
            if count % SLOW_EVERY == 0:
                self._sample_slowly()
            count += 1

    def _sample(self) -> None:
        nvml, seen = self._nvml, self._readings
        if (rates := self._ask("utilization", nvml.nvmlDeviceGetUtilizationRates)) is not None:
            seen.busy.append(rates.gpu / 100)
        if (power_mw := self._ask("power", nvml.nvmlDeviceGetPowerUsage)) is not None:
            seen.power_w.append(power_mw / 1000)
        if (clock_mhz := self._ask("the clock", self._sm_clock)) is not None:
            seen.clock_mhz.append(float(clock_mhz))
        if (memory := self._ask("memory", nvml.nvmlDeviceGetMemoryInfo)) is not None:
            seen.memory_bytes = max(seen.memory_bytes or 0, int(memory.used))
        reasons = self._ask("throttle reasons", nvml.nvmlDeviceGetCurrentClocksEventReasons)
        seen.throttled |= set(throttle_words(nvml, reasons or 0))

    def _sample_slowly(self) -> None:
        seen = self._readings
        seen.ring += self._ring_samples()
        processes = self._ask("processes", self._nvml.nvmlDeviceGetComputeRunningProcesses)
        listed, own = {int(p.pid) for p in processes or ()}, self._own_pids()
        seen.own |= listed & own
        seen.others |= listed - own

    def _ring_samples(self) -> list[float]:
        """GPU utilization since the last call from the driver's ring buffer, if it has one."""
        nvml = self._nvml
        answer = self._ask(
            "utilization samples",
            lambda device: nvml.nvmlDeviceGetSamples(
                device, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._last_seen_us
            ),
            quiet=True,  # also raised when nothing is new; the other reading stands in
        )
        samples = answer[1] if answer else ()
        fresh = [s for s in samples if s.timeStamp > self._last_seen_us]
        self._last_seen_us = max((s.timeStamp for s in fresh), default=self._last_seen_us)
        return [s.sampleValue.uiVal / 100 for s in fresh]

    def _energy(self) -> float | None:
        energy_mj = self._ask("energy", self._nvml.nvmlDeviceGetTotalEnergyConsumption, quiet=True)
        return None if energy_mj is None else float(energy_mj)

    def _mean_power_w(self) -> float | None:
        """From the energy counter where there is one: it misses nothing between readings."""
        energy_mj, took_s = self._energy(), self._clock() - self._began_s
        if energy_mj is not None and self._energy_mj is not None and took_s > 0:
            return (energy_mj - self._energy_mj) / 1000 / took_s
        power_w = self._readings.power_w
        return fmean(power_w) if power_w else None

    def _power_limit_w(self) -> float | None:
        limit_mw = self._ask("the power limit", self._nvml.nvmlDeviceGetEnforcedPowerLimit)
        return None if limit_mw is None else float(limit_mw) / 1000

    def _clock_max_mhz(self) -> float | None:
        nvml = self._nvml
        most_mhz = self._ask(
            "the maximum clock",
            lambda device: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM),
        )
        return None if most_mhz is None else float(most_mhz)

    def _sm_clock(self, device: Any) -> Any:
        return self._nvml.nvmlDeviceGetClockInfo(device, self._nvml.NVML_CLOCK_SM)

    def _ask(self, what: str, call: Callable[[Any], Any], *, quiet: bool = False) -> Any:
        try:
            return call(self._device)
        except self._nvml.NVMLError as error:
            if not quiet:
                self._readings.notes.add(f"NVML does not give {what} here: {error}")
            return None


def _handle(nvml: ModuleType | Any, ordinal: int, visible: str | None) -> Any:
    """CUDA's device N is the Nth that `CUDA_VISIBLE_DEVICES` names; NVML counts them all."""
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(ordinal)
    names = [name.strip() for name in visible.split(",")]
    if ordinal >= len(names):
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)
    name = names[ordinal]
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)


# Names of the bits of nvmlDeviceGetCurrentClocksEventReasons that slow a loaded GPU; the idle bit
# and user settings are not throttling.
THROTTLE_BITS = {
    "nvmlClocksEventReasonSwPowerCap": "software power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "software thermal slowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}


def throttle_words(nvml: ModuleType | Any, reasons: int) -> list[str]:
    """The throttle reasons of a bit mask, in words."""
    return [word for name, word in THROTTLE_BITS.items() if reasons & int(getattr(nvml, name))]


def _process_notes(seen: _Readings) -> tuple[str, ...]:
    """Who else was there. In a container NVML may number our own processes differently."""
    if not seen.others:
        return ()
    named = ", ".join(map(str, sorted(seen.others)))
    if seen.own:
        return (f"Other processes used the device: pid {named}",)
    note = f"Processes used the device of which none is known as ours: pid {named}"
    return (f"{note}; they may be ours under other numbers, as in a container",)
