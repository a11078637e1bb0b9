"""The batching policy on a fake clock: nothing here waits."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.batcher import Batcher, Dispatch, Policy, Scheduler, WaitUntil, decide


class FakeTimer:
    """A pending call of the fake clock."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


@dataclass
class FakeLoop:
    """A clock that jumps from one pending call to the next."""

    now_s: float = 0.0
    _calls: list[tuple[float, int, FakeTimer]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def scheduler(self) -> Scheduler:
        return Scheduler(lambda: self.now_s, self.call_at)

    def call_at(self, time_s: float, call: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(call)
        heapq.heappush(self._calls, (time_s, next(self._order), timer))
        return timer

    def run_until(self, end_s: float) -> None:
        while self._calls and self._calls[0][0] <= end_s:
            self.now_s, _, timer = heapq.heappop(self._calls)
            if timer.call is not None:
                timer.call()
        self.now_s = end_s


@dataclass
class Bench:
    """A batcher whose executors take a given time for every batch."""

    policy: Policy
    executors: int = 1
    service_s: float = 0.010
    devices: list[int] | None = None  # of each place; None: one device
    service_by_place_s: list[float] | None = None
    in_turn: bool = False
    dropped: Callable[[int], bool] = lambda _: False
    loop: FakeLoop = field(default_factory=FakeLoop)
    sent: list[tuple[float, int, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batcher = Batcher[int](
            self.policy,
            self.devices or [0] * self.executors,
            self.loop.scheduler(),
            self._send,
            dropped=self.dropped,
            in_turn=self.in_turn,
        )

    def arrive(self, *times_s: float) -> None:
        """Items numbered in order of arrival."""
        for number, time_s in enumerate(times_s):
            self.loop.call_at(time_s, lambda n=number: self.batcher.add(n))  # type: ignore[misc]

    def run(self, until_s: float = 10.0) -> list[tuple[float, list[int]]]:
        """When each batch went, and what was in it."""
        self.loop.run_until(until_s)
        return [(round(time_s, 6), items) for time_s, _, items in self.sent]

    def _send(self, executor: int, items: list[int]) -> None:
        now_s = self.loop.now_s
        self.sent.append((now_s, executor, items))
        took_s = self.service_by_place_s[executor] if self.service_by_place_s else self.service_s
        self.loop.call_at(now_s + took_s, lambda: self.batcher.release(executor))


class TestDecide:
    POLICY = Policy(window_s=0.005, max_batch=4)

    def test_nothing_waits(self) -> None:
        """An empty queue asks for nothing."""
        assert decide(self.POLICY, 0, 0.0, idle=True, now_s=1.0) is None

    def test_nobody_is_idle(self) -> None:
        """With every executor busy the queue only grows."""
        assert decide(self.POLICY, 9, 0.0, idle=False, now_s=1.0) is None

    def test_a_full_batch_goes_at_once(self) -> None:
        """The window is no reason to wait with a full batch."""
        assert decide(self.POLICY, 5, 1.0, idle=True, now_s=1.0) == Dispatch(4)

    def test_a_young_batch_waits_for_its_window(self) -> None:
        """The timer counts from the oldest request."""
        assert decide(self.POLICY, 2, 1.0, idle=True, now_s=1.001) == WaitUntil(1.005)

    def test_an_old_batch_goes(self) -> None:
        """What has waited for the window goes as it is."""
        assert decide(self.POLICY, 2, 1.0, idle=True, now_s=1.005) == Dispatch(2)


def test_the_window_starts_with_the_first_request() -> None:
    """Requests at 0, 3 and 6 ms with a window of 5 ms: the third is too late."""
    bench = Bench(Policy(0.005, 8))
    bench.arrive(0.0, 0.003, 0.0061)
    assert bench.run() == [(0.005, [0, 1]), (0.015, [2])]


def test_a_full_batch_does_not_wait() -> None:
    """The fourth of four sends the batch before its window ends."""
    bench = Bench(Policy(1.0, 4))
    bench.arrive(0.0, 0.001, 0.002, 0.003)
    assert bench.run() == [(0.003, [0, 1, 2, 3])]


def test_without_a_window_a_lone_request_goes_at_once() -> None:
    """Window 0 batches only what waits behind a busy executor."""
    bench = Bench(Policy(0.0, 8))
    bench.arrive(0.0, 0.001, 0.002)
    assert bench.run() == [(0.0, [0]), (0.010, [1, 2])]


def test_a_backlog_goes_as_soon_as_an_executor_is_idle() -> None:
    """Requests older than the window leave up to the maximum, the rest follows."""
    bench = Bench(Policy(0.002, 2))
    bench.arrive(*[0.0] * 5)
    assert bench.run() == [(0.0, [0, 1]), (0.010, [2, 3]), (0.020, [4])]


def test_two_executors_work_at_the_same_time() -> None:
    """The second batch goes to the other executor while the first is at work."""
    bench = Bench(Policy(0.0, 1), executors=2)
    bench.arrive(0.0, 0.001)
    bench.run()
    assert [executor for _, executor, _ in bench.sent] == [0, 1]


def test_the_device_with_fewer_batches_is_joined() -> None:
    """Device 0 has two places, device 1 one: the second batch goes to the idle device."""
    bench = Bench(Policy(0.0, 1), devices=[0, 0, 1])
    bench.arrive(0.0, 0.001)
    bench.run()
    assert [place for _, place, _ in bench.sent] == [0, 2]


def test_of_two_idle_devices_the_quicker_is_joined() -> None:
    """Known from its last batches; the slow one helps out when there is more than one waits."""
    bench = Bench(Policy(0.0, 1), devices=[0, 1], service_by_place_s=[0.040, 0.010])
    bench.arrive(0.0, 0.001, 0.1, 0.2, 0.3, 0.301)
    bench.run()
    assert [place for _, place, _ in bench.sent] == [0, 1, 1, 1, 1, 0]


def test_places_that_take_turns_wait_for_the_slow_one() -> None:
    """The baseline: a request waits for the place whose turn it is while another is idle."""
    bench = Bench(Policy(0.0, 1), devices=[0, 1], service_by_place_s=[0.040, 0.010], in_turn=True)
    bench.arrive(0.0, 0.001, 0.002, 0.003)
    assert [time_s for time_s, _ in bench.run()] == [0.0, 0.001, 0.040, 0.040]


def test_what_nobody_wants_takes_no_place_in_a_batch() -> None:
    """Dropped items are passed over, and count for nobody's batch."""
    bench = Bench(Policy(0.010, 2), dropped=lambda item: item in (1, 2))
    bench.arrive(*[0.0] * 5)
    assert bench.run() == [(0.0, [0]), (0.010, [3, 4])]


def test_a_changed_policy_applies_to_what_waits() -> None:
    """A shorter window or smaller maximum counts at once for the forming batch."""
    bench = Bench(Policy(1.0, 8))
    bench.arrive(0.0)
    bench.loop.call_at(0.020, lambda: bench.batcher.change(Policy(0.010, 8)))
    assert bench.run() == [(0.020, [0])]


@given(
    gaps_s=st.lists(st.floats(0, 0.02), max_size=60),
    window_s=st.floats(0, 0.03),
    max_batch=st.integers(1, 9),
    executors=st.integers(1, 12),
    service_s=st.floats(0.0001, 0.03),
)
def test_everything_is_sent_once_in_order_and_on_time(
    gaps_s: list[float], window_s: float, max_batch: int, executors: int, service_s: float
) -> None:
    """No request is lost, doubled or overtaken; no batch is too large; nobody waits for a window
    longer than it while an executor is idle."""
    arrivals = list(itertools.accumulate(gaps_s))
    bench = Bench(Policy(window_s, max_batch), executors, service_s)
    bench.arrive(*arrivals)
    batches = bench.run(until_s=60.0)
    assert [item for _, items in batches for item in items] == list(range(len(arrivals)))
    assert all(len(items) <= max_batch for _, items in batches)
    if executors >= len(batches):  # then some executor was always idle
        for time_s, items in batches:
            assert time_s <= arrivals[items[0]] + window_s + 1e-4


@pytest.mark.parametrize("rate_rps", [50, 200])
def test_gathers_one_plus_rate_times_window(rate_rps: int) -> None:
    """With fast executors the mean batch is 1 + rate x window."""
    import numpy as np

    gaps = np.random.default_rng(0).exponential(1 / rate_rps, 4000)
    bench = Bench(Policy(0.020, 64), executors=4, service_s=0.0001)
    bench.arrive(*np.cumsum(gaps))
    sizes = [len(items) for _, items in bench.run(until_s=1e6)]
    assert np.mean(sizes) == pytest.approx(1 + rate_rps * 0.020, rel=0.05)
