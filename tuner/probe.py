"""How the device is used while load runs: NVML on a GPU, the executors' own clock on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from tuner.measurement import DeviceUsage, ServerWork

# Below this share, with requests answered, the device was as good as idle.
IDLE_SHARE = 0.02


class DeviceProbe(Protocol):
    """Watches one device between `begin` and `end`, as often as asked.

    A `begin` without an `end` is forgotten by the next `begin`: a phase may die in between.
    """

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
            notes=idle_notes(share, work) if share is not None else ("No time has passed.",),
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


def open_probe(
    device: str,
    own_pids: Callable[[], set[int]],
    nvml: ModuleType | Any = None,
    visible: str | None = None,
) -> DeviceProbe:
    """The probe of a device: `cpu`, `cuda` or `cuda:N`.

    Args:
        own_pids: the processes of the server under test.
        nvml: a stand-in for the `pynvml` module.
        visible: instead of the environment's `CUDA_VISIBLE_DEVICES`.
    """
    if not device.startswith("cuda"):
        return ExecutorProbe()
    if nvml is None:
        nvml = import_module("pynvml")
    from tuner.nvml import NvmlProbe

    if visible is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        return NvmlProbe(int(device.partition(":")[2] or 0), own_pids, nvml, visible)
    except nvml.NVMLError as error:
        return BlindProbe(f"No GPU telemetry: NVML says {error}")


def idle_notes(share: float | None, work: ServerWork) -> tuple[str, ...]:
    """What to say of a device that did nothing while requests were answered."""
    if share is None or share > IDLE_SHARE or not work.answered:
        return ()
    answered = f"{work.answered} requests were answered"
    return (f"The device was idle ({share:.1%} busy) although {answered}",)
