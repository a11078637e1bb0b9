"""What every device probe promises, whatever the device."""

from __future__ import annotations

import threading
import time

from tuner.measurement import ServerWork
from tuner.probe import DeviceProbe

# Two intervals of the sampling thread, and room for a busy host.
WATCHED_S = 0.15


def work(*, answered: int = 100, busy_s: float = 5.0, elapsed_s: float = 10.0) -> ServerWork:
    """A server's counters over one phase."""
    return ServerWork(
        answered, 0, 0, answered, {1: answered}, 0.0, 0.0, busy_s, busy_s, elapsed_s, 1 << 29
    )


class ProbeContract:
    """Inherit, and give a fixture `probe`: a fresh one, closed by the test."""

    def test_says_what_the_device_is(self, probe: DeviceProbe) -> None:
        """A description names its kind."""
        assert probe.describe()["kind"] in ("cpu", "cuda", "unknown")
        probe.close()

    def test_share_or_note(self, probe: DeviceProbe) -> None:
        """The busy share is in [0, 1], or None with a note that says why."""
        probe.begin()
        time.sleep(WATCHED_S)
        usage = probe.end(work())
        probe.close()
        assert usage.source in ("nvml", "executor", "none")
        assert all(0 <= share <= 1 for share in usage.busy_samples)
        if usage.busy_share is None:
            assert usage.notes
        else:
            assert 0 <= usage.busy_share <= 1

    def test_again_and_again(self, probe: DeviceProbe) -> None:
        """One probe serves many measurements, even those that never reached their end."""
        probe.begin()
        probe.begin()
        first = probe.end(work())
        probe.begin()
        second = probe.end(work())
        probe.close()
        assert first.source == second.source

    def test_close_leaves_no_thread(self, probe: DeviceProbe) -> None:
        """Whatever watches in the background ends with the probe, also in the midst of a phase."""
        before = set(threading.enumerate())
        probe.begin()
        probe.begin()
        probe.close()
        assert set(threading.enumerate()) == before
