"""How the device is used while load runs: NVML on a GPU, the executors' own clock on a CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from types import ModuleType
from typing import Any, Protocol

from tuner.measurement import DeviceUsage, ServerWork

# NVML refreshes utilization every sixth of a second to a second; polling faster than 10 Hz loses
# nothing, and the ring buffer of samples, where the device has it, is read whole at the end.
SAMPLES_PER_S = 20.0
# Below this share, with requests answered, the device was as good as idle.
IDLE_SHARE = 0.02


class DeviceProbe(Protocol):
    """Watches one device between `begin` and `end`, as often as asked."""

    def describe(self) -> dict[str, str | float | None]:
        """What the device is, as far as it says."""

    def begin(self) -> None:
        """Start watching."""

    def end(self, work: ServerWork) -> DeviceUsage:
        """Stop watching: the use since `begin`.

        Args:
            work: the server's counters over the same time.
        """

    def close(self) -> None:
        """Give everything back; nothing may be asked afterwards."""


class ExecutorProbe:
    """A CPU device: busy while at least one executor is inside the model."""

    def describe(self) -> dict[str, str | float | None]:
        return {"kind": "cpu"}

    def begin(self) -> None:
        """The server counts by itself."""

    def end(self, work: ServerWork) -> DeviceUsage:
        share = min(work.busy_s / work.elapsed_s, 1.0) if work.elapsed_s > 0 else None
        return DeviceUsage(
            source="executor",
            busy_share=share,
            memory_bytes=work.memory_bytes,
            notes=_idle_note(share, work),
        )

    def close(self) -> None:
        """Nothing to give back."""


class BlindProbe:
    """A device that cannot be watched: says so instead of guessing."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def describe(self) -> dict[str, str | float | None]:
        return {"kind": "unknown", "reason": self._reason}

    def begin(self) -> None:
        """There is nothing to watch."""

    def end(self, work: ServerWork) -> DeviceUsage:
        return DeviceUsage(source="none", busy_share=None, notes=(self._reason,))

    def close(self) -> None:
        """Nothing to give back."""


@dataclass
class _Readings:
    """What the sampling thread has seen."""

    busy: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)
    clock_mhz: list[float] = field(default_factory=list)
    memory_bytes: int | None = None
    throttled: set[str] = field(default_factory=set)
    foreign: set[int] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)


class NvmlProbe:
    """An NVIDIA GPU through NVML. What it does not support or allow becomes None and a note.

    Args:
        index: of the device.
        own_pids: our server's processes; compute processes beside them are foreign.
        nvml: the `pynvml` module, or a stand-in.

    Raises:
        Exception: NVML's own errors, from the constructor only.
    """

    def __init__(
        self, index: int, own_pids: Callable[[], set[int]], nvml: ModuleType | Any
    ) -> None:
        self._nvml, self._own_pids = nvml, own_pids
        nvml.nvmlInit()
        self._device = nvml.nvmlDeviceGetHandleByIndex(index)
        self._readings = _Readings()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_seen = 0
        self._energy_mj: float | None = None
        self._began_s = 0.0

    def describe(self) -> dict[str, str | float | None]:
        nvml = self._nvml
        name = self._ask("name", nvml.nvmlDeviceGetName)
        return {
            "kind": "cuda",
            "name": name.decode() if isinstance(name, bytes) else name,
            "driver": self._ask("driver", lambda _: nvml.nvmlSystemGetDriverVersion()),
            "power_limit_w": self._power_limit_w(),
            "sm_clock_max_mhz": self._clock_max_mhz(),
        }

    def begin(self) -> None:
        self._readings, self._stop = _Readings(), threading.Event()
        self._energy_mj = self._ask("energy", self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        self._began_s = time.monotonic()
        self._ring_samples()  # what is older than now does not count
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)
        self._thread.start()

    def end(self, work: ServerWork) -> DeviceUsage:
        self._halt()
        seen = self._readings
        busy = self._ring_samples() or seen.busy
        share = fmean(busy) if busy else None
        notes = (*sorted(seen.notes), *_idle_note(share, work), *_foreign_note(seen.foreign))
        return DeviceUsage(
            source="nvml",
            busy_share=share,
            busy_samples=tuple(busy),
            memory_bytes=seen.memory_bytes,
            power_w=self._mean_power_w(seen),
            power_limit_w=self._power_limit_w(),
            sm_clock_mhz=fmean(seen.clock_mhz) if seen.clock_mhz else None,
            sm_clock_max_mhz=self._clock_max_mhz(),
            throttle_reasons=tuple(sorted(seen.throttled)),
            foreign_pids=tuple(sorted(seen.foreign)),
            notes=notes,
        )

    def close(self) -> None:
        self._halt()
        self._nvml.nvmlShutdown()

    def _halt(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(1 / SAMPLES_PER_S):
            self._sample()

    def _sample(self) -> None:
        nvml, seen = self._nvml, self._readings
        if (rates := self._ask("utilization", nvml.nvmlDeviceGetUtilizationRates)) is not None:
            seen.busy.append(rates.gpu / 100)
        if (power := self._ask("power", nvml.nvmlDeviceGetPowerUsage)) is not None:
            seen.power_w.append(power / 1000)
        if (clock := self._ask("clock", self._sm_clock)) is not None:
            seen.clock_mhz.append(float(clock))
        if (memory := self._ask("memory", nvml.nvmlDeviceGetMemoryInfo)) is not None:
            seen.memory_bytes = max(seen.memory_bytes or 0, int(memory.used))
        reasons = self._ask("throttle reasons", nvml.nvmlDeviceGetCurrentClocksEventReasons)
        seen.throttled |= set(throttle_words(nvml, reasons or 0))
        processes = self._ask("processes", nvml.nvmlDeviceGetComputeRunningProcesses)
        own = self._own_pids()
        # An empty set means that our own processes are not known (a container's pids are others)
        seen.foreign |= {p.pid for p in processes or () if own and p.pid not in own}

    def _ring_samples(self) -> list[float]:
        """GPU utilization since the last call from the driver's ring buffer, if it has one."""
        nvml = self._nvml
        answer = self._ask(
            "utilization samples",
            lambda device: nvml.nvmlDeviceGetSamples(
                device, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._last_seen
            ),
            quiet=True,
        )
        if answer is None:
            return []
        _, samples = answer
        self._last_seen = max((s.timeStamp for s in samples), default=self._last_seen)
        return [s.sampleValue.uiVal / 100 for s in samples]

    def _mean_power_w(self, seen: _Readings) -> float | None:
        """From the energy counter where there is one: it misses nothing between readings."""
        energy_mj = self._ask("energy", self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        took_s = time.monotonic() - self._began_s
        if energy_mj is not None and self._energy_mj is not None and took_s > 0:
            return float((energy_mj - self._energy_mj) / 1000 / took_s)
        return fmean(seen.power_w) if seen.power_w else None

    def _power_limit_w(self) -> float | None:
        limit = self._ask("power limit", self._nvml.nvmlDeviceGetEnforcedPowerLimit)
        return None if limit is None else limit / 1000

    def _clock_max_mhz(self) -> float | None:
        nvml = self._nvml
        return self._ask(
            "maximum clock",
            lambda device: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM),
        )

    def _sm_clock(self, device: Any) -> Any:
        return self._nvml.nvmlDeviceGetClockInfo(device, self._nvml.NVML_CLOCK_SM)

    def _ask(self, what: str, call: Callable[[Any], Any], *, quiet: bool = False) -> Any:
        try:
            return call(self._device)
        except self._nvml.NVMLError as error:
            if not quiet:
                self._readings.notes.add(f"NVML does not give {what} here: {error}")
            return None


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


def open_probe(device: str, own_pids: Callable[[], set[int]]) -> DeviceProbe:
    """The probe of a device: `cpu`, `cuda` or `cuda:N`."""
    if not device.startswith("cuda"):
        return ExecutorProbe()
    import pynvml

    index = int(device.partition(":")[2] or 0)
    try:
        return NvmlProbe(index, own_pids, pynvml)
    except pynvml.NVMLError as error:
        return BlindProbe(f"No GPU telemetry: NVML says {error}")


def _idle_note(share: float | None, work: ServerWork) -> tuple[str, ...]:
    if share is None or share > IDLE_SHARE or not work.answered:
        return ()
    answered = f"{work.answered} requests were answered"
    return (f"The device was idle ({share:.1%} busy) although {answered}",)


def _foreign_note(pids: set[int]) -> tuple[str, ...]:
    if not pids:
        return ()
    named = ", ".join(map(str, sorted(pids)))
    return (f"Other processes used the device: pid {named}",)
