"""`python -m tuner.loadgen`: phases on standard input, events on standard output, until EOF."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import gevent
from gevent.os import nb_read
from gevent.queue import Queue
from locust.env import Environment  # patches the standard library for gevent: first of all

from tuner.loadgen.user import OpenLoopUser
from tuner.loadgen.wire import Phase

# The nicest to ourselves that the system allows: on shared cores an equal share makes one send in
# a hundred late by a scheduler slice of 4 ms.
NICE = -19
# Five times the default in-flight cap, and the most that macOS allows.
DESCRIPTORS = 10_240


def main() -> None:
    """Serve phases until standard input ends."""
    _raise_priority()
    _allow_descriptors()
    OpenLoopUser.phases = Queue()
    OpenLoopUser.emit = _emit
    # Locust's default restarts a failing task for ever; its own stop time-out is beside the point,
    # because every phase drains itself.
    environment = Environment(user_classes=[OpenLoopUser], catch_exceptions=False)
    runner = environment.create_local_runner()
    runner.start(1, spawn_rate=1)
    gevent.get_hub().handle_error = _end_on_error
    for line in _lines():
        _obey(json.loads(line))
    os._exit(0)  # nothing to save, and a phase may still be in flight


def _raise_priority() -> None:
    """Where it is permitted. A session that Linux groups for scheduling has a nice value itself,
    and within a group of one the process's own means nothing."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        Path("/proc/self/autogroup").write_text(str(NICE))


def _allow_descriptors() -> None:
    """A connection refused for want of a descriptor would look like the server's failure."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _obey(command: dict[str, Any]) -> None:
    if "stop" in command:
        current = OpenLoopUser.current
        if current is not None and current.phase.id == command["stop"]:
            current.stop()
    else:
        OpenLoopUser.phases.put(Phase.from_document(command))


def _lines() -> Any:
    """Lines of standard input, without blocking gevent's loop."""
    os.set_blocking(0, False)
    rest = b""
    while chunk := nb_read(0, 65536):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _emit(event: str, **fields: Any) -> None:
    if event == "hello":
        fields["nice"] = os.getpriority(os.PRIO_PROCESS, 0)
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


def _end_on_error(context: Any, kind: Any, value: Any, trace: Any) -> None:
    """A defect in a greenlet ends the process; the tuner reports the log and starts another."""
    if kind is None or issubclass(kind, gevent.GreenletExit):
        return
    sys.__excepthook__(kind, value, trace)
    os._exit(1)


if __name__ == "__main__":
    main()
