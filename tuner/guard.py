"""A guard around a child process: the child and all its descendants end with the tuner.

`python -m tuner.guard LIFELINE_FD -- COMMAND...` runs COMMAND in a process group of its own and
watches the read end of a pipe whose write end only the tuner holds. When that end closes, however
the tuner died, the guard kills everything below it. SIGTERM is passed on to the group. Only the
standard library is imported, so that it is up in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Run the command to its end, or to the tuner's."""
    lifeline = int(sys.argv[1])
    command = sys.argv[sys.argv.index("--") + 1 :]
    _adopt_orphans()
    inherited = [fd for fd in _open_descriptors() if fd > 2 and fd != lifeline]
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tuner's to handle
    child = subprocess.Popen(
        command, pass_fds=inherited, start_new_session=True, preexec_fn=_die_with_guard
    )
    for fd in (0, 1, *inherited):  # the child's alone: a listener or pipe held here outlives it
        with contextlib.suppress(OSError):
            os.close(fd)
    while (code := child.poll()) is None:
        ready, _, _ = select.select([lifeline, woken], [], [])
        if lifeline in ready and not os.read(lifeline, 1):
            break
        if woken in ready and signal.SIGTERM in os.read(woken, 64):
            _signal_group(child.pid, signal.SIGTERM)
    kill_descendants(child.pid)
    return 128 + signal.SIGKILL if code is None else code if code >= 0 else 128 - code


def kill_descendants(group: int) -> None:
    """Kill the group, then whatever left it but was adopted, until nothing is left."""
    _signal_group(group, signal.SIGKILL)
    while children := list(_children_of(os.getpid())):
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _adopt_orphans() -> None:
    """On Linux, descendants whose parent dies become this process's children."""
    if sys.platform == "linux":
        _libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _die_with_guard() -> None:
    """Should the guard itself be killed, the command at least goes with it."""
    if sys.platform == "linux":
        _libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _open_descriptors() -> Iterable[int]:
    folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            yield int(name)


def _children_of(pid: int) -> Iterable[int]:
    """Direct children, from /proc; elsewhere only the process group can be reached."""
    if sys.platform != "linux":
        return
    for tasks in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, (tasks / "children").read_text().split())


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
