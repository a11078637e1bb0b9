"""What a measurement depends on beside the configuration: the machine, the device, the versions."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

LIBRARIES = ("locust", "numpy", "optuna", "pillow", "scipy", "sqlalchemy", "starlette", "uvicorn")


def take(described: Mapping[str, Any]) -> dict[str, Any]:
    """The environment of this process and of the described server, JSON-ready.

    Args:
        described: what the server under test says of itself (`server.describe`).
    """
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "stolen_percent": stolen_percent(_read("/proc/stat") or ""),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "devices": {device["id"]: _lasting(device) for device in described["devices"]},
        "model": dict(described["model"]),
        "server": dict(described["server"]),
        "versions": dict(described["versions"]),
    }  # fmt: skip


def difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What changed from one fingerprint to another, one readable line each."""
    lines = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += difference(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before} -> {after}")
    return lines


def digest(document: Mapping[str, Any]) -> str:
    """A short name for a JSON-ready document: equal documents have equal digests."""
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def stolen_percent(proc_stat: str) -> int | None:
    """Share of CPU time since boot that the hypervisor gave to others; None where it is not told.

    Args:
        proc_stat: the text of `/proc/stat`.
    """
    ticks = proc_stat.partition("\n")[0].split()[
        1:9
    ]  # user nice system idle iowait irq softirq steal
    if len(ticks) < 8:
        return None
    return round(100 * int(ticks[7]) / max(sum(map(int, ticks)), 1))


def _lasting(device: Mapping[str, Any]) -> dict[str, Any]:
    """A device without its id and without the memory that a CPU has free at the moment."""
    passing = {"id", "memory_bytes"} if device["id"] == "cpu" else {"id"}
    return {key: value for key, value in device.items() if key not in passing}


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
