"""The front end's handle on an executor: a process of its own, away from the front end's GIL.

The front end writes one JSON line a batch to a socket pair and reads one line back. Pictures stay
in the shared slots. When the front end's end of the socket closes, however it died, the executor
ends. What happens on the other side is in `serving.inference`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.errors import EngineFailure, StartError
from serving.settings import Settings
from serving.slots import Slots

# A line holds five classes and probabilities for each of up to 1024 pictures.
LINE_LIMIT = 1 << 20
# A batch in progress is finished first; the longest that anybody serves takes seconds.
STOP_WITHIN_S = 5.0
# Without it the caching allocator's fixed segments fragment when batch sizes change.
ALLOCATOR = "expandable_segments:True"


@dataclass(frozen=True)
class BatchResult:
    """One batch.

    Args:
        classes, probabilities: best ones by picture.
        start_s, end_s: when the device was at work, on the monotonic clock.
        ran: pictures that the device computed, padding included.
        preprocess_s: seconds of decoding inside the executor.
        bad: why pictures could not be decoded, by their place in the batch.
    """

    classes: list[list[int]]
    probabilities: list[list[float]]
    start_s: float
    end_s: float
    ran: int
    preprocess_s: float = 0.0
    bad: dict[int, str] = field(default_factory=dict)


class Executor:
    """One executor process with one lane or more; each lane runs one batch at a time.

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
                [sys.executable, "-m", "serving.inference", engine, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env=environment(),
            )
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._pending = dict[int, asyncio.Future[dict[str, Any]]]()
        self.device, self.lanes = "", 1
        self.guard: dict[str, Any] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def prepare(self, settings: Settings, slots: Slots, say: Callable[[str], None]) -> None:
        """Return when the model is loaded and warm.

        Args:
            settings: settled ones, with one device.
            say: told what takes long meanwhile.

        Raises:
            StartError: it could not be; the message is the executor's own.
        """
        self.device = settings.device
        self._reader, self._writer = await asyncio.open_connection(
            sock=self._link, limit=LINE_LIMIT
        )
        self._write({"settings": settings.model_dump(mode="json"), "count": slots.count,
                     "size": slots.size})  # fmt: skip
        answer = await self._read()
        while "progress" in answer:
            say(answer["progress"])
            answer = await self._read()
        if "failed" in answer or "error" in answer:
            raise StartError(str(answer.get("failed") or answer["error"]))
        self.lanes, self.guard = answer["lanes"], answer["guard"]
        self._listening = asyncio.ensure_future(self._listen())

    async def run(
        self, lane: int, slots: list[int], lengths: list[int] | None, active: int
    ) -> BatchResult:
        """One batch of pictures on an idle lane.

        Args:
            lengths: of their encoded bytes, where the executor decodes.

        Raises:
            EngineFailure: the model failed on it, or the process died.
        """
        answer = await self._ask({"lane": lane, "slots": slots, "lengths": lengths,
                                  "active": active})  # fmt: skip
        return BatchResult(
            answer["classes"], answer["probabilities"], answer["start_s"], answer["end_s"],
            answer["ran"], answer["preprocess_s"],
            {int(place): reason for place, reason in answer["bad"].items()},
        )  # fmt: skip

    async def time_batches(self, lane: int, size: int, repeats: int, active: int) -> list[float]:
        """Seconds of each of some batches of one size, through the same path."""
        asked = {"lane": lane, "slots": [0] * size, "active": active, "repeats": repeats}
        return [float(s) for s in (await self._ask(asked))["seconds"]]

    async def wait_dead(self) -> int:
        """Return the exit code once the process has ended."""
        return await asyncio.to_thread(self._process.wait)

    async def stop(self) -> None:
        """End the process; it finishes its batches first."""
        if self._writer is None:
            self._link.close()
        else:
            self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._listening is not None:
            self._listening.cancel()

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._listening is None or self._listening.done():
            raise EngineFailure("the executor process died")
        future = self._pending[request["lane"]] = asyncio.get_running_loop().create_future()
        self._write(request)
        answer: dict[str, Any] = await future
        if "error" in answer:
            raise EngineFailure(answer["error"])
        return answer

    async def _listen(self) -> None:
        """Hand every answer to the one who waits for its lane, until the process ends."""
        while True:
            answer = await self._read()
            for lane in [answer["lane"]] if "lane" in answer else list(self._pending):
                if not (future := self._pending.pop(lane)).done():
                    future.set_result(answer)
            if "lane" not in answer:
                return

    def _write(self, request: dict[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(request).encode() + b"\n")

    async def _read(self) -> dict[str, Any]:
        """The next line; one without a lane when there are no more."""
        assert self._reader is not None
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError) as error:
            return {"error": f"the executor's answer was broken: {error}"}
        if not line:
            return {"error": "the executor process died"}
        return dict(json.loads(line))


def environment() -> dict[str, str]:
    """The executors' environment: the caller's, with the allocator's setting where it has none."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the new name, and the one it had
    chosen = next((os.environ[name] for name in names if name in os.environ), ALLOCATOR)
    return {**os.environ, **dict.fromkeys(names, chosen)}


def places_of(executors: Sequence[Executor]) -> list[tuple[Executor, int]]:
    """Every lane of every executor: where a batch can go."""
    return [(executor, lane) for executor in executors for lane in range(executor.lanes)]
