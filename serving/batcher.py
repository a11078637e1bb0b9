"""Dynamic batching: which requests go to which executor's place, and when.

The policy is a pure function of the queue, the idle executors and the time. The window's timer runs
from the oldest waiting request, so a backlog older than the window goes as soon as an executor is
idle, up to the maximum batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")
# Times this close are equal: a timer may fire a moment early, and floats do not add up exactly.
TICK_S = 1e-6
# Of a device's newest batch in its average: a change of speed is seen within some twenty batches.
RECENT_WEIGHT = 0.1


@dataclass(frozen=True)
class Policy:
    """When a batch goes: full, or its oldest request has waited for the window."""

    window_s: float
    max_batch: int


@dataclass(frozen=True)
class Dispatch:
    """Send this many of the oldest requests now."""

    size: int


@dataclass(frozen=True)
class WaitUntil:
    """Nothing goes before this time, unless a request arrives."""

    time_s: float


Decision = Dispatch | WaitUntil | None


def decide(policy: Policy, waiting: int, oldest_s: float, *, idle: bool, now_s: float) -> Decision:
    """What to do now; None: nothing until a request arrives or an executor becomes idle.

    Args:
        waiting: requests in the queue.
        oldest_s: when the oldest of them entered it.
        idle: whether some executor is.
    """
    if not waiting or not idle:
        return None
    if waiting >= policy.max_batch:
        return Dispatch(policy.max_batch)
    due_s = oldest_s + policy.window_s
    return Dispatch(waiting) if now_s >= due_s - TICK_S else WaitUntil(due_s)


class Timer(Protocol):
    """A pending call."""

    def cancel(self) -> None: ...


@dataclass(frozen=True)
class Scheduler:
    """Time, and calls in the future: an event loop's, or a test's.

    Args:
        now_s: seconds on the clock that `call_at` uses.
    """

    now_s: Callable[[], float]
    call_at: Callable[[float, Callable[[], None]], Timer]


class Batcher(Generic[Item]):
    """Gathers items and hands batches to idle places, numbered from 0.

    A place runs one batch at a time; a device has one place or more. A batch joins the device with
    the fewest batches at work, of equal ones the one whose batches have been the quickest.

    Not thread-safe: everything happens on one event loop.

    Args:
        devices: the device of each place.
        send: called with a place and its batch; `release` must follow.
        dropped: asked of each item when its turn comes; True: it is dealt with, leave it out.
        in_turn: places take turns instead, whether idle or not: the baseline to compare with.
    """

    def __init__(
        self,
        policy: Policy,
        devices: Sequence[int],
        scheduler: Scheduler,
        send: Callable[[int, list[Item]], None],
        *,
        dropped: Callable[[Item], bool] = lambda _: False,
        in_turn: bool = False,
    ) -> None:
        self._policy = policy
        self._devices = devices
        self._scheduler = scheduler
        self._send = send
        self._dropped = dropped
        self._turn: int | None = 0 if in_turn else None
        self._idle = deque(range(len(devices)))
        self._waiting = deque[tuple[float, Item]]()
        self._timer: Timer | None = None
        self._sent_s = dict[int, float]()  # by busy place
        self._batch_s = dict.fromkeys(devices, 0.0)  # moving average by device

    @property
    def waiting(self) -> int:
        """Items not yet dispatched."""
        return len(self._waiting)

    def add(self, item: Item) -> None:
        """Queue an item."""
        self._waiting.append((self._scheduler.now_s(), item))
        self._act()

    def release(self, place: int) -> None:
        """A place has finished its batch."""
        device, took_s = self._devices[place], self._scheduler.now_s() - self._sent_s.pop(place)
        before_s = self._batch_s[device] or took_s
        self._batch_s[device] = before_s + RECENT_WEIGHT * (took_s - before_s)
        self._idle.append(place)
        self._act()

    def change(self, policy: Policy) -> None:
        """Use another policy from now on, for what is already waiting too."""
        self._policy = policy
        self._act()

    def _act(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while isinstance(decision := self._decide(), Dispatch):
            if batch := self._take(decision.size):
                place = self._choose()
                self._idle.remove(place)
                self._sent_s[place] = self._scheduler.now_s()
                self._send(place, batch)
        if isinstance(decision, WaitUntil):
            self._timer = self._scheduler.call_at(decision.time_s, self._act)

    def _take(self, size: int) -> list[Item]:
        """Up to this many of the oldest items that are still wanted."""
        batch = list[Item]()
        while self._waiting and len(batch) < size:
            _, item = self._waiting.popleft()
            if not self._dropped(item):
                batch.append(item)
        return batch

    def _choose(self) -> int:
        if self._turn is not None:
            place, self._turn = self._turn, (self._turn + 1) % len(self._devices)
            return place
        busy = Counter(self._devices[place] for place in self._sent_s)

        def load(place: int) -> tuple[int, float]:
            device = self._devices[place]
            return busy[device], self._batch_s[device]

        return min(self._idle, key=load)

    def _decide(self) -> Decision:
        oldest_s = self._waiting[0][0] if self._waiting else 0.0
        return decide(
            self._policy,
            len(self._waiting),
            oldest_s,
            idle=bool(self._idle) if self._turn is None else self._turn in self._idle,
            now_s=self._scheduler.now_s(),
        )
