"""Dynamic batching: which requests go to which executor, and when.

The policy is a pure function of the queue, the idle executors and the time. The window's timer runs
from the oldest waiting request, so a backlog older than the window goes as soon as an executor is
idle, up to the maximum batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")
# Times this close are equal: a timer may fire a moment early, and floats do not add up exactly.
TICK_S = 1e-6


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
    """Gathers items and hands batches to idle executors, numbered from 0.

    Not thread-safe: everything happens on one event loop.

    Args:
        send: called with an executor's number and its batch; `release` must follow.
    """

    def __init__(
        self,
        policy: Policy,
        executors: int,
        scheduler: Scheduler,
        send: Callable[[int, list[Item]], None],
    ) -> None:
        self._policy = policy
        self._scheduler = scheduler
        self._send = send
        self._idle = deque(range(executors))
        self._waiting = deque[tuple[float, Item]]()
        self._timer: Timer | None = None

    @property
    def waiting(self) -> int:
        """Items not yet dispatched."""
        return len(self._waiting)

    def add(self, item: Item) -> None:
        """Queue an item."""
        self._waiting.append((self._scheduler.now_s(), item))
        self._act()

    def release(self, executor: int) -> None:
        """An executor has finished its batch."""
        self._idle.append(executor)
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
            batch = [self._waiting.popleft()[1] for _ in range(decision.size)]
            self._send(self._idle.popleft(), batch)
        if isinstance(decision, WaitUntil):
            self._timer = self._scheduler.call_at(decision.time_s, self._act)

    def _decide(self) -> Decision:
        oldest_s = self._waiting[0][0] if self._waiting else 0.0
        return decide(
            self._policy,
            len(self._waiting),
            oldest_s,
            idle=bool(self._idle),
            now_s=self._scheduler.now_s(),
        )
