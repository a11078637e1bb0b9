"""The probe's contract on the real NVML."""

from __future__ import annotations

import os
from typing import Any

import pynvml
import pytest

from tests.tuner.probe_contract import ProbeContract, work
from tuner.probe import DeviceProbe, open_probe

NVML: Any = pynvml  # it has no type hints


def _reason_to_skip() -> str:
    try:
        NVML.nvmlInit()
    except NVML.NVMLError as error:
        return f"needs an NVIDIA GPU; NVML says {error}"
    NVML.nvmlShutdown()
    return ""


REASON = _reason_to_skip()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON)]


class TestRealNvml(ProbeContract):
    """A GPU through its driver."""

    @pytest.fixture
    def probe(self) -> DeviceProbe:
        return open_probe("cuda", lambda: {os.getpid()})

    def test_memory_and_name(self, probe: DeviceProbe) -> None:
        """A GPU tells its name, its driver and the memory in use."""
        described = probe.describe()
        assert described["name"]
        assert described["driver"]
        probe.begin()
        usage = probe.end(work())
        probe.close()
        assert usage.source == "nvml"
        assert usage.memory_bytes
