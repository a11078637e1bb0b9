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
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
        "devices": [dict(device) for device in described["devices"]],
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


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
