"""What a person sees while the tuner works: a live panel, or plain lines off a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tuner.durations import format_s
from tuner.measurement import Status, TrialResult

MARKS = {Status.MEASURED: " ", Status.SKIPPED: "-", Status.CRASHED: "!", Status.VOID: "?"}


class Watch(Protocol):
    """Told by the study what happens, in order."""

    def stage(self, name: str) -> None: ...

    def say(self, detail: str) -> None: ...

    def note(self, text: str) -> None: ...

    def trial(self, number: int, result: TrialResult, best: str) -> None: ...


class LineWatch:
    """One line per trial and note on standard error, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def stage(self, name: str) -> None:
        """Stages are for the live panel; a log shows their results."""

    def say(self, detail: str) -> None:
        """Details are for the live panel."""

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def trial(self, number: int, result: TrialResult, best: str) -> None:
        line = trial_line(number, result)
        self._console.print(f"{line} | best {best}", soft_wrap=True, highlight=False, markup=False)


class LiveWatch(LineWatch):
    """The same lines, with a live panel below: stage, detail, best so far, time left."""

    def __init__(
        self, console: Console, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console)
        self._deadline_s, self._clock = deadline_s, clock
        self._stage, self._detail, self._best = "setting up", "", "none yet"
        self._live = Live(console=console, get_renderable=self._panel, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stage = self._detail = ""
        self._live.stop()

    def stage(self, name: str) -> None:
        self._stage, self._detail = name, ""

    def say(self, detail: str) -> None:
        self._detail = detail

    def trial(self, number: int, result: TrialResult, best: str) -> None:
        self._best = best
        self._console.print(trial_line(number, result), highlight=False, markup=False)

    def _panel(self) -> Table:
        left_s = max(self._deadline_s - self._clock(), 0)
        table = Table.grid(padding=(0, 2))
        table.add_row("now", f"{self._stage}: {self._detail}" if self._detail else self._stage)
        table.add_row("best", self._best)
        table.add_row("left", format_s(float(round(left_s))))
        return table


def open_watch(deadline_s: float) -> LineWatch:
    """The live panel on a terminal, plain lines elsewhere; both on standard error."""
    console = Console(stderr=True)
    if sys.stderr.isatty():
        return LiveWatch(console, deadline_s)
    return LineWatch(console)


def trial_line(number: int, result: TrialResult) -> str:
    """One trial in one line: configuration, verdict, capacity, predicted and measured batch."""
    head = f"{MARKS[result.status]} trial {number:>3} [{result.origin}] {searched(result)}"
    if result.status is not Status.MEASURED:
        return f"{head}: {result.status}: {result.reason}"
    target = result.phase("target")
    assert target is not None
    predicted = result.prediction.mean_batch if result.prediction else float("nan")
    return (
        f"{head}: {target.rate_rps:.0f}/s {target.verdict.outcome}, "
        f"P99 {target.verdict.p99_ms:.1f} ms, capacity {result.capacity_rps:.0f}/s, "
        f"batch {target.work.mean_batch:.2f} (predicted {predicted:.2f}), "
        f"busy {_percent(target.device.busy_share)}, lag P99 "
        f"{target.certificate.send_lag_p99_ms:.1f} ms"
    )


def searched(result: TrialResult) -> str:
    """The settings a reader compares, shortest form first."""
    configuration = result.configuration
    parts = [
        f"window={configuration.number('batch_window_ms', 0):g}ms",
        f"batch<={configuration.get('max_batch_size', '?')}",
    ]
    parts += [f"{k}={configuration[k]}" for k in ("workers", "instances", "precision")
              if k in configuration]  # fmt: skip
    return " ".join(parts)


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.0%}"
