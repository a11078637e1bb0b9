"""Load generators: every arrival once, latency from the intended send, every failure counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tuner import arrivals
from tuner.errors import MeasurementError
from tuner.load import LoadGenerator, LoadSpec, LocustLoad, Samples
from tuner.loadgen.wire import Phase
from tuner.testing import SimulatedLoad, SimulatedServer

# A server whose answers are scripted by path: /ok, /refuse (503), /slow (1 s), /stall (nobody is
# answered for the second half of every second), /drop (closes without an answer). GET /seen
# returns the SHA-256 of every body received.
SERVER = """
import asyncio, hashlib, json, sys, time
seen = []

async def serve(reader, writer):
    try:
        while head := await reader.readuntil(b"\\r\\n\\r\\n"):
            path = head.split()[1].decode()
            length = next((int(l.split(b":")[1]) for l in head.split(b"\\r\\n")
                           if l.lower().startswith(b"content-length")), 0)
            received = await reader.readexactly(length)
            body = b"{}"
            if path == "/seen":
                body = json.dumps(seen).encode()
            else:
                seen.append(hashlib.sha256(received).hexdigest())
            if path == "/drop":
                break
            if path == "/slow":
                await asyncio.sleep(1)
            if path == "/stall" and time.monotonic() % 1 > 0.5:
                await asyncio.sleep(1 - time.monotonic() % 1)
            status = b"503 Busy" if path == "/refuse" else b"200 OK"
            length = b"Content-Length: %d" % len(body)
            writer.write(b"\\r\\n".join([b"HTTP/1.1 " + status, length, b"", body]))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@contextmanager
def scripted_server() -> Iterator[str]:
    """The base URL of a scripted server in a real process."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server() as base:
        yield base


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Three random bodies; the largest does not fit into one segment of the loopback device."""
    folder = tmp_path_factory.mktemp("payloads")
    paths = tuple(folder / f"{n}.bin" for n in (1_000, 20_000, 100_000))
    for path in paths:
        path.write_bytes(np.random.default_rng(1).bytes(int(path.stem)))
    return paths


@pytest.fixture(scope="module")
def locust_load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocustLoad]:
    with LocustLoad(tmp_path_factory.mktemp("loadgen")) as load:
        yield load


def spec_for(url: str, payloads: tuple[Path, ...]) -> LoadSpec:
    return LoadSpec(url, 100.0, "poisson", 5, 1.5, payloads, timeout_s=5.0)


def seen_bodies(base: str) -> Counter[str]:
    """How often the server received each body, by its hash."""
    with urllib.request.urlopen(f"{base}/seen") as answer:
        return Counter(json.load(answer))


def process_of(load: LocustLoad) -> int:
    """The generator's process id: the only child of its guard."""
    assert load._child is not None
    guard = load._child.pid
    return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])


class TestArrivals:
    def test_the_seed_is_the_schedule(self) -> None:
        """Same seed, same times; another seed, other times."""
        first, second = (arrivals.draw("poisson", 50, 1, 10) for _ in range(2))
        assert np.array_equal(first, second)
        assert not np.array_equal(first, arrivals.draw("poisson", 50, 2, 10)[: len(first)])

    def test_a_longer_phase_extends_a_shorter_one(self) -> None:
        """The first ten seconds do not depend on the duration."""
        short, long = (arrivals.draw("poisson", 900, 1, d) for d in (10, 20))
        assert np.array_equal(short, long[: len(short)])

    def test_rates_share_one_pattern(self) -> None:
        """Twice the rate is the same schedule in half the time."""
        slow, fast = arrivals.draw("poisson", 50, 1, 10), arrivals.draw("poisson", 100, 1, 5)
        assert slow == pytest.approx(2 * fast)

    @pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("constant", 0.0)])
    def test_gaps_have_their_variation(self, kind: str, cv: float) -> None:
        """Rate and coefficient of variation are those asked for."""
        gaps = np.diff(arrivals.draw(kind, 200, 3, 100))
        assert gaps.mean() == pytest.approx(1 / 200, rel=0.03)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.03)

    def test_no_time_no_arrivals(self) -> None:
        """An empty phase is empty."""
        assert len(arrivals.draw("poisson", 100, 1, 0)) == 0

    def test_an_unknown_kind_is_refused(self) -> None:
        """A misspelt process is not silently another one."""
        with pytest.raises(ValueError, match="'poison' is not a kind"):
            arrivals.draw("poison", 100, 1, 1)


class LoadContract:
    """What every load generator promises. Subclasses provide `load` and `spec`."""

    def test_every_arrival_is_there_once(self, load: LoadGenerator, spec: LoadSpec) -> None:
        """The samples are the schedule, in order, all answered."""
        result = load.run(spec)
        expected = arrivals.draw(spec.arrivals, spec.rate_rps, spec.seed, spec.duration_s)
        assert result.samples.intended_s == pytest.approx(expected)
        assert result.samples.answered == result.samples.sent == len(expected)
        assert result.elapsed_s == spec.duration_s

    def test_latency_counts_from_the_intended_send(
        self, load: LoadGenerator, spec: LoadSpec
    ) -> None:
        """No response time is shorter than what lies between intended send and answer."""
        samples = load.run(spec).samples
        assert samples.latency_s == pytest.approx(samples.done_s - samples.intended_s)
        assert (samples.sent_s >= samples.intended_s).all()

    def test_stops_early_when_told(self, load: LoadGenerator, spec: LoadSpec) -> None:
        """After True nothing more is sent, and what is in flight is still answered."""
        result = load.run(replace(spec, duration_s=30.0), lambda elapsed, _: elapsed > 0.5)
        assert 0.5 < result.elapsed_s < 10
        assert result.samples.answered == result.samples.offered
        schedule = arrivals.draw(spec.arrivals, spec.rate_rps, spec.seed, 30.0)
        due = schedule[schedule <= result.elapsed_s]
        assert result.samples.intended_s == pytest.approx(due, abs=1e-9)

    def test_observers_see_growing_samples(self, load: LoadGenerator, spec: LoadSpec) -> None:
        """Times rise, arrivals accumulate, pending ones are NaN and never counted as failures."""
        seen = list[tuple[float, Samples]]()

        def observe(elapsed_s: float, samples: Samples) -> bool:
            seen.append((elapsed_s, samples))
            return False

        load.run(spec, observe)
        times = [t for t, _ in seen]
        counts = [s.offered for _, s in seen]
        assert times == sorted(times)
        assert counts == sorted(counts)
        assert len(seen) >= 3
        assert all(not s.errors() for _, s in seen)

    def test_phases_follow_each_other(self, load: LoadGenerator, spec: LoadSpec) -> None:
        """One generator serves several phases; each has its own samples."""
        first = load.run(spec)
        second = load.run(replace(spec, rate_rps=200.0, seed=9))
        assert second.samples.offered > first.samples.offered


class TestSimulatedLoad(LoadContract):
    @pytest.fixture
    def load(self) -> LoadGenerator:
        return SimulatedLoad(lambda _: SimulatedServer(lambda size: 0.002 + 0.001 * size))

    @pytest.fixture
    def spec(self, payloads: tuple[Path, ...]) -> LoadSpec:
        return spec_for("http://simulated/predict", payloads)

    def test_gathers_one_plus_rate_times_window(self) -> None:
        """The simulated batcher has the batch size of the theory: 1 + 100/s x 20 ms = 3."""
        server = SimulatedServer(lambda _: 0.001, window_s=0.02, max_batch=64)
        _, sizes = server.finish_times(arrivals.draw("poisson", 100, 1, 200))
        assert np.mean(sizes) == pytest.approx(3.0, rel=0.03)


@pytest.mark.slow
class TestLocustLoad(LoadContract):
    @pytest.fixture
    def load(self, locust_load: LocustLoad) -> LoadGenerator:
        return locust_load

    @pytest.fixture
    def spec(self, url: str, payloads: tuple[Path, ...]) -> LoadSpec:
        return spec_for(f"{url}/ok", payloads)

    def test_bodies_are_delivered(self, load: LoadGenerator, spec: LoadSpec) -> None:
        """The server received what was sent, every arrival once, and the seed decides what."""
        received = []
        for _ in range(2):
            with scripted_server() as base:
                result = load.run(replace(spec, url=f"{base}/ok"))
                received.append(seen_bodies(base))
        assert received[0] == received[1]
        assert received[0].total() == result.samples.offered
        assert set(received[0]) == {sha256(p.read_bytes()).hexdigest() for p in spec.payloads}

    def test_connections_are_kept(self, load: LoadGenerator, spec: LoadSpec) -> None:
        """No more connections than there were requests in flight."""
        result = load.run(spec)
        assert 1 <= result.connections <= result.in_flight_peak

    def test_a_stop_does_not_wait_for_an_arrival(self, load: LoadGenerator, spec: LoadSpec) -> None:
        """Between rare arrivals the phase ends when told: the first would come after 100 s."""
        rare = replace(spec, rate_rps=0.01, arrivals="constant", duration_s=150.0)
        result = load.run(rare, lambda *_: True)
        assert result.elapsed_s < 50
        assert result.samples.offered == 0

    def test_a_stall_is_seen_by_all_who_would_have_sent(
        self, load: LoadGenerator, spec: LoadSpec
    ) -> None:
        """Half of every second stalls: P90 is hundreds of ms, not the few of a closed loop."""
        spec = replace(spec, url=spec.url.replace("/ok", "/stall"), duration_s=3.0)
        result = load.run(spec)
        assert np.quantile(result.samples.latency_s, 0.9) > 0.25
        assert result.in_flight_peak > 10

    def test_refusals_are_failures(self, load: LoadGenerator, spec: LoadSpec) -> None:
        """A fast 503 has infinite latency."""
        samples = load.run(replace(spec, url=spec.url.replace("/ok", "/refuse"))).samples
        assert samples.errors() == {"503": samples.offered}
        assert np.isinf(samples.latency_s).all()

    def test_timeouts_are_failures(self, load: LoadGenerator, spec: LoadSpec) -> None:
        """A request given up after its time-out is counted as such."""
        slow = replace(spec, url=spec.url.replace("/ok", "/slow"), duration_s=0.5, timeout_s=0.2)
        samples = load.run(slow).samples
        assert samples.errors() == {"timeout": samples.offered}

    def test_dropped_connections_are_failures(self, load: LoadGenerator, spec: LoadSpec) -> None:
        """A connection closed without an answer is counted, and not retried."""
        samples = load.run(replace(spec, url=spec.url.replace("/ok", "/drop"))).samples
        assert samples.errors() == {"connection": samples.offered}

    def test_a_refused_port_is_a_failure(self, load: LoadGenerator, spec: LoadSpec) -> None:
        """Nobody listening is the server's failure, not the generator's."""
        samples = load.run(replace(spec, url="http://127.0.0.1:1/x", duration_s=0.3)).samples
        assert samples.errors() == {"connection": samples.offered}

    def test_the_undrained_are_counted(self, load: LoadGenerator, spec: LoadSpec) -> None:
        """Requests open when the drain ends are unanswered, not dropped."""
        slow = replace(spec, url=spec.url.replace("/ok", "/slow"), duration_s=0.5, drain_s=0.2)
        samples = load.run(slow).samples
        assert samples.errors().get("unanswered", 0) > 0
        assert samples.answered + samples.errors()["unanswered"] == samples.offered

    def test_the_in_flight_cap_is_counted(self, load: LoadGenerator, spec: LoadSpec) -> None:
        """Arrivals beyond the cap are not sent, and say so."""
        slow = replace(spec, url=spec.url.replace("/ok", "/slow"), duration_s=0.5, in_flight_cap=5)
        samples = load.run(slow).samples
        assert samples.errors() == {"not_sent": samples.offered - 5}
        assert samples.sent == 5

    def test_a_killed_generator_is_our_fault(self, spec: LoadSpec, tmp_path: Path) -> None:
        """It raises, names itself, and the next phase gets a new process."""
        with LocustLoad(tmp_path) as load:
            load.run(replace(spec, duration_s=0.2))
            generator = process_of(load)

            def kill(_: float, __: Samples) -> bool:
                with suppress(ProcessLookupError):  # a second report may have been under way
                    os.kill(generator, signal.SIGKILL)
                return False

            with pytest.raises(MeasurementError, match="load generator ended"):
                load.run(replace(spec, duration_s=5.0), kill)
            assert load.run(replace(spec, duration_s=0.2)).samples.offered > 0

    def test_a_hanging_generator_is_our_fault(self, spec: LoadSpec, tmp_path: Path) -> None:
        """One that stops talking is given up, and ended although it hangs."""
        with LocustLoad(tmp_path, silence_s=2.0) as load:
            stopped = list[int]()

            def stop(_: float, __: Samples) -> bool:
                stopped.append(process_of(load))
                os.kill(stopped[0], signal.SIGSTOP)
                return False

            with pytest.raises(MeasurementError, match="said nothing for 2 s"):
                load.run(replace(spec, duration_s=5.0), stop)
            assert not Path(f"/proc/{stopped[0]}").exists()

    def test_an_interrupted_phase_leaves_nothing(self, spec: LoadSpec, tmp_path: Path) -> None:
        """After Ctrl-C no process is left, and the generator can be used again."""
        with LocustLoad(tmp_path) as load:
            seen = list[int]()

            def interrupt(_: float, __: Samples) -> bool:
                seen.append(process_of(load))
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                load.run(spec, interrupt)
            assert not Path(f"/proc/{seen[0]}").exists()
            assert load.run(replace(spec, duration_s=0.2)).samples.offered > 0

    def test_what_it_cannot_send_is_said(self, spec: LoadSpec, tmp_path: Path) -> None:
        """A URL that is not plain HTTP is refused by name, not sent somewhere else."""
        with LocustLoad(tmp_path) as load, pytest.raises(MeasurementError) as caught:
            load.run(replace(spec, url="https://127.0.0.1/x"))
        assert "https://127.0.0.1/x: the load generator speaks http" in str(caught.value.hint)


@pytest.mark.slow
def test_locust_counts_the_same(url: str, payloads: tuple[Path, ...]) -> None:
    """Locust's own statistics have every arrival of the phase, and every failure."""
    phase = Phase(
        id=1, url=f"{url}/slow", rate_rps=100.0, arrivals="constant", seed=1, duration_s=0.5,
        timeout_s=5.0, drain_s=0.2, in_flight_cap=30, payloads=tuple(map(str, payloads)),
    )  # fmt: skip
    command, pipe = [sys.executable, "-m", "tuner.loadgen"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(phase.to_line())
        process.stdin.flush()
        events = map(json.loads, process.stdout)
        result = next(event for event in events if event["event"] == "result")
        process.stdin.close()
        assert process.wait(10) == 0
    assert result["due"] == result["locust_requests"] == result["locust_failures"] == 49


def test_locust_stays_out_of_this_process() -> None:
    """Using the generator imports neither gevent nor Locust here."""
    code = "import sys, tuner.load; print([m for m in ('gevent', 'locust') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
