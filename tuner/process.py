"""Child processes that end when they should: with a trial, and with the tuner however it dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

# How long the guard may take to kill and reap after the lifeline is cut: the kernel frees what a
# process holds on a device, some GB, before it lets go of it.
REAP_S = 30.0


class Child:
    """A command under a guard (see `tuner.guard`). Use `Child.start`.

    `stdin` and `stdout` are binary pipes where they were asked for. Standard error, and standard
    output unless piped, go to the log file.
    """

    def __init__(self, guard: subprocess.Popen[bytes], lifeline: int, log_path: Path) -> None:
        self._guard = guard
        self._lifeline: int | None = lifeline
        self.log_path = log_path

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> Self:
        """Start a command.

        Args:
            env: added to this process's environment.
            pass_fds: descriptors that the command inherits under the same numbers.
            stdin, stdout: `subprocess.PIPE` for a pipe.
        """
        read_end, write_end = os.pipe()
        try:
            with log_path.open("ab") as log:
                guard = subprocess.Popen(
                    [sys.executable, "-m", "tuner.guard", str(read_end), "--", *command],
                    stdin=stdin,
                    stdout=log if stdout is None else stdout,
                    stderr=log,
                    env={**os.environ, **(env or {})},
                    pass_fds=(read_end, *pass_fds),
                    start_new_session=True,  # the terminal's Ctrl-C is for the tuner alone
                )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return cls(guard, write_end, log_path)

    @property
    def pid(self) -> int:
        """The guard's process id; the command is its child."""
        return self._guard.pid

    @property
    def stdin(self) -> IO[bytes] | None:
        return self._guard.stdin

    @property
    def stdout(self) -> IO[bytes] | None:
        return self._guard.stdout

    def poll(self) -> int | None:
        """The command's exit code (128 + n for signal n), or None while it runs."""
        return self._guard.poll()

    def wait(self, timeout_s: float) -> int:
        """Wait for the command's end; kills it when the time is up."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout_s)
        return self.terminate(0)

    def terminate(self, grace_s: float) -> int:
        """End the command and every descendant: SIGTERM, and after the grace SIGKILL.

        Returns:
            The exit code. Nothing that the command started is alive afterwards.
        """
        if grace_s > 0 and self._guard.poll() is None:
            self._guard.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(grace_s)
        self._cut_lifeline()
        code = self._guard.wait(REAP_S)
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return code

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the log."""
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate(0)

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
