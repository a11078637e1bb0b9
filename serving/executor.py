"""Executors: each holds a model in a process of its own, away from the front end's GIL.

The front end writes one JSON line a batch to a socket pair and reads one line back. Pixels stay in
the shared slots. When the front end's end of the socket closes, however it died, the executor ends.

The child runs as `python -m serving.executor ENGINE SOCKET_FD MEMORY_FD`; the first line that it
reads holds its settings.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.engines import Engine, open_engine
from serving.errors import EngineFailure, StartError
from serving.settings import Settings
from serving.slots import Slots

# Powers of two up to the maximum: every kernel and every allocation is warm before the first batch.
WARM_RUNS = 2
# A line holds five classes and probabilities for each of up to 1024 pictures.
LINE_LIMIT = 1 << 20
# A batch in progress is finished first; the longest that anybody serves takes seconds.
STOP_WITHIN_S = 5.0


@dataclass(frozen=True)
class BatchResult:
    """One batch: best classes and probabilities by picture, and when the model was at work."""

    classes: list[list[int]]
    probabilities: list[list[float]]
    start_s: float
    end_s: float


class Executor:
    """The front end's handle on one executor process.

    Starting the process at once and telling it later what to do lets both sides import their
    libraries at the same time.

    Args:
        engine: which one, so that the process knows what to import.
        memory: descriptor of the shared slots' file.
    """

    def __init__(self, engine: str, memory: int) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), memory)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serving.executor", engine, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
            )
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def prepare(self, settings: Settings, slots: Slots) -> None:
        """Return when the model is loaded and warm.

        Raises:
            StartError: it could not be; the message is the executor's own.
        """
        self._reader, self._writer = await asyncio.open_connection(
            sock=self._link, limit=LINE_LIMIT
        )
        try:
            answer = await self._ask(
                {"settings": settings.model_dump(mode="json"), "count": slots.count,
                 "size": slots.size}
            )  # fmt: skip
        except EngineFailure as failure:
            raise StartError(str(failure)) from failure
        if "failed" in answer:
            raise StartError(str(answer["failed"]))

    async def run(self, slots: list[int], active: int) -> BatchResult:
        """One batch of pictures.

        Raises:
            EngineFailure: the model failed on it, or the process died.
        """
        answer = await self._ask({"slots": slots, "active": active})
        return BatchResult(
            answer["classes"], answer["probabilities"], answer["start_s"], answer["end_s"]
        )

    async def time_batches(self, size: int, repeats: int, active: int) -> list[float]:
        """Seconds of each of some batches of one size, through the same path."""
        asked = {"slots": [0] * size, "active": active, "repeats": repeats}
        return [float(s) for s in (await self._ask(asked))["seconds"]]

    async def wait_dead(self) -> int:
        """Return the exit code once the process has ended."""
        return await asyncio.to_thread(self._process.wait)

    async def stop(self) -> None:
        """End the process; it finishes its batch first."""
        if self._writer is None:
            self._link.close()
        else:
            self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._writer is not None
        self._writer.write(json.dumps(request).encode() + b"\n")
        answer = await self._read()
        if "error" in answer:
            raise EngineFailure(f"the model failed: {answer['error']}")
        return answer

    async def _read(self) -> dict[str, Any]:
        assert self._reader is not None
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError) as error:
            raise EngineFailure(f"the executor's answer was broken: {error}") from error
        if not line:
            raise EngineFailure("the executor process died")
        return dict(json.loads(line))


def main() -> None:
    """The child: load, warm up, then answer batches until the socket closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the group; the front end drains
        signal.signal(number, signal.SIG_IGN)
    engine_name, socket_fd, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if engine_name != "synthetic":
        import torchvision.models  # noqa: F401 - while the front end imports its own
    with socket.socket(fileno=socket_fd) as link, link.makefile("rwb") as stream:
        order = json.loads(stream.readline() or "null")
        if order is None:  # the front end ended before it had settings
            return
        settings = Settings.model_validate(order["settings"])
        slots = Slots(memory, order["count"], order["size"])
        try:
            engine = open_engine(settings)
            _warm_up(engine, slots, settings.max_batch_size)
        except Exception as error:  # whatever it is, the front end must tell the user
            _answer(stream, {"failed": f"{error}" or type(error).__name__})
            return
        _answer(stream, {"ready": True})
        for line in stream:
            _answer(stream, _handle(engine, slots, json.loads(line)))


def _handle(engine: Engine, slots: Slots, request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "repeats" in request:
            return {"seconds": [_timed(engine, slots, request) for _ in range(request["repeats"])]}
        start_s = time.monotonic()
        answer = engine.run(slots.gather(request["slots"]), request["active"])
        end_s = time.monotonic()
    except Exception as error:  # out of memory and its like: this batch fails, the server lives
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "classes": answer.classes.tolist(),
        "probabilities": np.round(answer.probabilities, 6).tolist(),
        # On a GPU the device was at work for the events' time only, up to the end.
        "start_s": max(start_s, end_s - answer.busy_s),
        "end_s": end_s,
    }


def _timed(engine: Engine, slots: Slots, request: dict[str, Any]) -> float:
    began_s = time.perf_counter()
    engine.run(slots.gather(request["slots"]), request["active"])
    return time.perf_counter() - began_s


def _warm_up(engine: Engine, slots: Slots, max_batch: int) -> None:
    size = 1
    while True:
        for _ in range(WARM_RUNS):
            engine.run(slots.gather([0] * size), 1)
        if size == max_batch:
            return
        size = min(2 * size, max_batch)


def _answer(stream: Any, document: dict[str, Any]) -> None:
    try:
        stream.write(json.dumps(document).encode() + b"\n")
        stream.flush()
    except BrokenPipeError:  # the front end is gone, and with it the reason to live
        os._exit(0)


if __name__ == "__main__":
    main()
