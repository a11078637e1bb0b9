"""Children end when they should, whatever they or the tuner do."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tuner.process import Child

pytestmark = pytest.mark.slow

# Prints its own pid and those of two descendants: one ignores SIGTERM, one left the session.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
nap = [sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(60)"]
stays = subprocess.Popen(nap)
leaves = subprocess.Popen(nap, start_new_session=True)
print(os.getpid(), stays.pid, leaves.pid, flush=True)
time.sleep(60)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def pids_of(child: Child) -> list[int]:
    assert child.stdout is not None
    return [int(word) for word in child.stdout.readline().split()]


def test_exit_codes_pass_through(tmp_path: Path) -> None:
    """The command's own code, and 128 + n for a signal."""
    with Child.start(python("raise SystemExit(7)"), log_path=tmp_path / "log") as child:
        assert child.wait(20) == 7
    killed = python("import os; os.kill(os.getpid(), 9)")
    with Child.start(killed, log_path=tmp_path / "log") as child:
        assert child.wait(20) == 128 + signal.SIGKILL


def test_terminate_leaves_nothing(tmp_path: Path) -> None:
    """A group that ignores SIGTERM and a descendant in another session are gone on return."""
    child = Child.start(python(STUBBORN), log_path=tmp_path / "log", stdout=subprocess.PIPE)
    pids = pids_of(child)
    assert all(map(alive, pids))
    child.terminate(0.2)
    assert not any(map(alive, pids))


def test_sigterm_reaches_the_command(tmp_path: Path) -> None:
    """A command that ends on SIGTERM does so with its own exit code."""
    code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print("up", flush=True)
time.sleep(60)
"""
    child = Child.start(python(code), log_path=tmp_path / "log", stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert child.terminate(10) == 3


def test_a_killed_tuner_leaves_nothing(tmp_path: Path) -> None:
    """kill -9 of the process that started the child ends the child and its descendants."""
    code = f"""
import subprocess, sys, time
from pathlib import Path
from tuner.process import Child
child = Child.start([sys.executable, "-c", {STUBBORN!r}], log_path=Path({str(tmp_path / "log")!r}),
                    stdout=subprocess.PIPE)
print(child.stdout.readline().decode(), flush=True)
time.sleep(60)
"""
    with subprocess.Popen(python(code), stdout=subprocess.PIPE) as tuner:
        assert tuner.stdout is not None
        pids = [int(word) for word in tuner.stdout.readline().split()]
        assert all(map(alive, pids))
        tuner.kill()
    assert eventually(lambda: not any(map(alive, pids)))


def test_descriptors_are_passed_and_not_kept(tmp_path: Path) -> None:
    """A listening socket works in the command, and its port is free once the command ended."""
    code = """
import socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
connection, _ = listener.accept()
connection.sendall(b"hello")
"""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        child = Child.start(
            [*python(code), str(listener.fileno())],
            log_path=tmp_path / "log",
            pass_fds=(listener.fileno(),),
        )
    with child:
        with socket.create_connection(address, timeout=10) as connection:
            assert connection.recv(5) == b"hello"
        assert child.wait(20) == 0
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(address)


def test_the_log_keeps_the_last_words(tmp_path: Path) -> None:
    """Standard error and output are in the log; the tail is its last lines."""
    code = "import sys; print('out'); print('err', file=sys.stderr)"
    with Child.start(python(code), log_path=tmp_path / "log") as child:
        child.wait(20)
        assert sorted(child.log_tail().splitlines()) == ["err", "out"]
        assert len(child.log_tail(1).splitlines()) == 1


def test_pipes_carry_both_ways(tmp_path: Path) -> None:
    """A command that answers on standard output what it read from standard input."""
    code = "import sys; print(sys.stdin.readline().upper(), end='', flush=True)"
    pipe = subprocess.PIPE
    with Child.start(python(code), log_path=tmp_path / "log", stdin=pipe, stdout=pipe) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"hello\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"HELLO\n"
        assert child.wait(20) == 0
