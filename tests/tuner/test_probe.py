"""Device probes: the contract on each, and what each says of its device."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

import tuner.nvml
from tests.tuner.probe_contract import WATCHED_S, ProbeContract, work
from tuner.measurement import DeviceUsage
from tuner.nvml import THROTTLE_BITS, NvmlProbe
from tuner.probe import BlindProbe, DeviceProbe, ExecutorProbe, open_probe
from tuner.testing import FakeClock
from tuner.testing_devices import FakeNvml

OURS, FOREIGN = 100, 200


def watched(nvml: FakeNvml, *, seconds: float = 0.0, own: int = OURS) -> DeviceUsage:
    """What a probe says of this device after some seconds."""
    probe = NvmlProbe(0, lambda: {own}, nvml)
    probe.begin()
    time.sleep(seconds)
    usage = probe.end(work())
    probe.close()
    return usage


class TestExecutorProbe(ProbeContract):
    """A CPU, by the server's own counters."""

    @pytest.fixture
    def probe(self) -> DeviceProbe:
        return ExecutorProbe()

    def test_busy_share_is_the_executors(self) -> None:
        """Busy is the share of time in which an executor was inside the model."""
        usage = ExecutorProbe().end(work(busy_s=2.5, elapsed_s=10.0))
        assert usage == DeviceUsage("executor", 0.25, memory_bytes=1 << 29)

    def test_never_above_one(self) -> None:
        """Clocks that disagree a little do not make a device busier than always."""
        assert ExecutorProbe().end(work(busy_s=10.1, elapsed_s=10.0)).busy_share == 1.0

    def test_idle_is_said(self) -> None:
        """A device that did nothing while requests were answered gets a note in words."""
        (note,) = ExecutorProbe().end(work(busy_s=0.0)).notes
        assert note == "The device was idle (0.0% busy) although 100 requests were answered"

    def test_no_time_no_share(self) -> None:
        """Without a second passed there is no share, and a note says so."""
        usage = ExecutorProbe().end(work(elapsed_s=0.0))
        assert (usage.busy_share, usage.notes) == (None, ("No time has passed.",))


class TestBlindProbe(ProbeContract):
    """A device that nothing can be known about."""

    @pytest.fixture
    def probe(self) -> DeviceProbe:
        return BlindProbe("No GPU telemetry: there is no NVML")


class TestNvmlProbe(ProbeContract):
    """A GPU through a fake NVML."""

    @pytest.fixture
    def probe(self) -> DeviceProbe:
        return NvmlProbe(0, lambda: {OURS}, FakeNvml(pids=(OURS,)))

    def test_readings(self) -> None:
        """Share, memory, power, limit and clocks arrive in their units."""
        usage = watched(FakeNvml(pids=(OURS,)), seconds=WATCHED_S)
        assert replace(usage, busy_samples=()) == DeviceUsage(
            source="nvml",
            busy_share=0.5,
            memory_bytes=1 << 30,
            power_w=300.0,
            power_limit_w=700.0,
            sm_clock_mhz=1500.0,
            sm_clock_max_mhz=1980.0,
        )

    def test_description(self) -> None:
        """The device is named with its driver and limits."""
        probe = NvmlProbe(0, set, FakeNvml())
        assert probe.describe() == {
            "kind": "cuda",
            "name": "Fake GPU 0",
            "uuid": "GPU-0",
            "driver": "999.1",
            "power_limit_w": 700.0,
            "sm_clock_max_mhz": 1980.0,
        }

    def test_ring_buffer_is_preferred(self) -> None:
        """Where the driver keeps a history, the share is made of it, not of what was polled."""
        usage = watched(FakeNvml(busy=(0.1,), ring=(0.8, 0.6)))
        assert usage.busy_share == pytest.approx(0.7)
        assert set(usage.busy_samples) == {0.8, 0.6}

    @pytest.mark.slow
    def test_ring_buffer_is_drained_in_time(self) -> None:
        """The history is read every second, before the driver forgets it."""
        usage = watched(FakeNvml(ring=(0.5,)), seconds=1.5)
        assert len(usage.busy_samples) >= 2

    def test_power_from_the_energy_counter(self) -> None:
        """Mean power is the counter's difference over the time, where there is a counter."""
        clock = FakeClock()
        probe = NvmlProbe(0, set, FakeNvml(energy_mj=(1_000_000, 5_000_000)), clock=clock)
        probe.begin()
        clock.advance(8.0)
        usage = probe.end(work())
        probe.close()
        assert usage.power_w == 500.0

    def test_idle_is_said(self) -> None:
        """A GPU that did nothing while requests were answered gets a note in words."""
        (note,) = watched(FakeNvml(busy=(0.0,))).notes
        assert note.startswith("The device was idle (0.0% busy)")

    def test_foreign_process_is_said(self) -> None:
        """Another process on the device is listed, with a note in words."""
        usage = watched(FakeNvml(pids=(OURS, FOREIGN)))
        assert usage.foreign_pids == (FOREIGN,)
        assert usage.notes == ("Other processes used the device: pid 200",)

    def test_unknown_processes_are_not_called_foreign(self) -> None:
        """Where our own process is not on the list, nobody is accused, and the note says why."""
        usage = watched(FakeNvml(pids=(FOREIGN,)))
        assert usage.foreign_pids == ()
        assert "none is known as ours: pid 200" in usage.notes[0]

    def test_throttle_reasons_in_words(self) -> None:
        """Bits that slow the device become words; the idle bit does not."""
        idle = pynvml.nvmlClocksEventReasonGpuIdle
        cap = pynvml.nvmlClocksEventReasonSwPowerCap
        heat = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
        usage = watched(FakeNvml(throttle=idle | cap | heat), seconds=WATCHED_S)
        assert usage.throttle_reasons == ("hardware thermal slowdown", "software power cap")

    @pytest.mark.parametrize(
        ("refused", "field", "note"),
        [
            ("nvmlDeviceGetUtilizationRates", "busy_share", "utilization"),
            ("nvmlDeviceGetPowerUsage", "power_w", "power"),
            ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_w", "the power limit"),
            ("nvmlDeviceGetMemoryInfo", "memory_bytes", "memory"),
            ("nvmlDeviceGetClockInfo", "sm_clock_mhz", "the clock"),
            ("nvmlDeviceGetMaxClockInfo", "sm_clock_max_mhz", "the maximum clock"),
        ],
    )
    def test_not_supported_is_none_and_said(self, refused: str, field: str, note: str) -> None:
        """What a device does not support is None, never zero, and a note says so."""
        usage = watched(FakeNvml(refused=frozenset({refused})), seconds=WATCHED_S)
        assert getattr(usage, field) is None
        assert f"NVML does not give {note} here: Not Supported" in usage.notes

    def test_nothing_supported(self) -> None:
        """A device that refuses everything still gives a usage, made of notes."""
        everything = frozenset(n for n in vars(FakeNvml) if n.startswith("nvmlDeviceGet"))
        usage = watched(FakeNvml(refused=everything), seconds=WATCHED_S)
        assert (usage.busy_share, usage.power_w, usage.foreign_pids) == (None, None, ())
        assert len(usage.notes) == 8

    def test_close_gives_nvml_back(self) -> None:
        """Initialised once, shut down once."""
        nvml = FakeNvml()
        probe = NvmlProbe(0, set, nvml)
        assert nvml.opened == 1
        probe.close()
        assert nvml.opened == 0


class TestOpenProbe:
    """Choosing the probe of a device."""

    def test_cpu(self) -> None:
        """A CPU is watched through its executors."""
        assert isinstance(open_probe("cpu", set), ExecutorProbe)

    @pytest.mark.parametrize(
        ("device", "visible", "name"),
        [
            ("cuda", "", "Fake GPU 0"),
            ("cuda:1", "", "Fake GPU 1"),
            ("cuda:0", "2", "Fake GPU 2"),
            ("cuda:1", "2, 0", "Fake GPU 0"),
            ("cuda:0", "GPU-1", "Fake GPU 1"),
        ],
    )
    def test_the_device_that_cuda_means(
        self, monkeypatch: pytest.MonkeyPatch, device: str, visible: str, name: str
    ) -> None:
        """`cuda:N` is the Nth visible device, which NVML counts differently."""
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        probe = open_probe(device, set, FakeNvml(devices=3))
        assert probe.describe()["name"] == name
        probe.close()

    @pytest.mark.parametrize(("device", "visible"), [("cuda:3", None), ("cuda:1", "0")])
    def test_no_such_device(self, device: str, visible: str | None) -> None:
        """A device that NVML does not know is watched blindly, and NVML is given back."""
        nvml = FakeNvml()
        assert isinstance(open_probe(device, set, nvml, visible), BlindProbe)
        assert nvml.opened == 0

    def test_no_nvml(self) -> None:
        """Without a driver the busy share is None, and the note says that NVML is missing."""
        nvml = FakeNvml(refused=frozenset({"nvmlInit"}))
        usage = open_probe("cuda", set, nvml).end(work())
        assert usage == DeviceUsage(
            "none", None, notes=("No GPU telemetry: NVML says Not Supported",)
        )


def test_names_exist_in_the_real_nvml() -> None:
    """Every NVML function and constant that the probe uses is one of pynvml's."""
    source = Path(tuner.nvml.__file__).read_text()
    used = {*re.findall(r"nvml\.(nvml\w+|NVML\w+)", source), *THROTTLE_BITS}
    assert len(used) > 20
    assert [name for name in sorted(used) if not hasattr(pynvml, name)] == []
