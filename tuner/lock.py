"""One tuner per device and per study: a second one would measure the first one's load."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from tuner.errors import UsageError


@contextmanager
def exclusive(what: str) -> Iterator[None]:
    """Hold the lock on a device or study of this machine.

    Raises:
        UsageError: another process holds it; the message names the process.
    """
    # In the machine's common folder, because another user's load disturbs as much.
    folder = Path(tempfile.gettempdir()) / "p99-tuner-locks"
    folder.mkdir(mode=0o777, exist_ok=True)
    path = folder / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.lock"
    holder = path.with_suffix(".holder")
    lock = FileLock(path, mode=0o666)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        text = holder.read_text() if holder.exists() else "another process"
        raise UsageError(
            f"{text} holds {what}.",
            hint="Wait until it ends, or end it: two tuners would measure each other's load.",
        ) from None
    try:
        holder.write_text(f"Another tuner (pid {os.getpid()}, started {time.strftime('%H:%M')})")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()
