"""The server behind its routes: admission, preprocessing, batcher and executors, wired together."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil

from serving import preprocess
from serving.batcher import Batcher, Policy, Scheduler
from serving.errors import BadImage, Busy, EngineFailure, SettingsError, TooLarge
from serving.executor import Executor
from serving.preprocess import PixelSpec
from serving.settings import LIVE, Settings
from serving.slots import Slots
from serving.statistics import Statistics

# Slots for requests admitted, and beyond them room for live changes of the queue's bound; pages
# that are never written take no memory.
LEAST_SLOTS = 4096


@dataclass(eq=False)
class Job:
    """A request whose pixels are in a slot, waiting for its batch."""

    slot: int
    done: asyncio.Future[tuple[list[int], list[float]]]
    queued_s: float


class Service:
    """One model being served.

    Args:
        settings: resolved ones, see `capabilities.settle`.
        executors: started, one for each instance.
        memory: descriptor of the file that they share with this process.
    """

    def __init__(self, settings: Settings, executors: list[Executor], memory: int) -> None:
        self.settings = settings
        self.statistics = Statistics()
        self.failure: str | None = "loading"
        self.draining = False
        self._began_s = time.monotonic()
        self._spec = _pixel_spec(settings)
        in_batches = settings.instances * settings.max_batch_size
        count = max(LEAST_SLOTS, settings.queue_capacity + in_batches)
        self._slots = Slots(memory, count, self._spec.crop)
        self._workers = ThreadPoolExecutor(settings.workers, "preprocess")
        self._executors = executors
        self._batcher: Batcher[Job] | None = None
        self._admitted = 0  # requests that no executor has yet
        self._active = 0
        self._tasks = set[asyncio.Task[None]]()

    async def start(self) -> None:
        """Return when every executor is ready.

        Raises:
            StartError: one of them cannot run.
        """
        await asyncio.gather(*(e.prepare(self.settings, self._slots) for e in self._executors))
        loop = asyncio.get_running_loop()
        scheduler = Scheduler(loop.time, loop.call_at)
        self._batcher = Batcher(self._policy(), len(self._executors), scheduler, self._send)
        self.failure = None

    async def wait_failed(self) -> str:
        """Return when an executor has died: the server cannot go on."""
        deaths = [asyncio.ensure_future(e.wait_dead()) for e in self._executors]
        done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        self.failure = f"an executor died with exit code {done.pop().result()}"
        return self.failure

    async def stop(self) -> None:
        """End the executors and the workers."""
        await asyncio.gather(*(e.stop() for e in self._executors))
        self._workers.shutdown(cancel_futures=True)

    async def predict(self, body: bytes) -> dict[str, Any]:
        """One request from its encoded image to its answer.

        Raises:
            RequestError: with the status that the client gets.
        """
        batcher = self._admit()
        try:
            slot = self._slots.take()
            if slot is None:
                raise Busy("no memory is free for another picture")
            try:
                await self._preprocess(body, slot)
                classes, probabilities = await self._in_batch(batcher, slot)
            finally:
                self._slots.give_back(slot)
        except Exception as error:
            self._count_failure(error)
            raise
        self.statistics.requests["answered"] += 1
        answer: dict[str, Any] = {"classes": classes, "probabilities": probabilities}
        if self.settings.engine == "synthetic":
            answer["synthetic"] = True
        return answer

    def change(self, changes: dict[str, Any]) -> Settings:
        """Change live settings at once.

        Raises:
            SettingsError: a key that needs a restart, or a value out of bounds.
        """
        for key in changes:
            if key not in LIVE:
                raise SettingsError(
                    f"{key} cannot change on a running server; {', '.join(LIVE)} can"
                )
        changed = self.settings.changed(changes)
        most = self._slots.count - changed.instances * changed.max_batch_size
        if changed.queue_capacity > most:
            raise SettingsError(f"queue_capacity: at most {most} without a restart")
        self.settings = self.settings.model_copy(update={k: getattr(changed, k) for k in LIVE})
        if self._batcher is not None:
            self._batcher.change(self._policy())
        return self.settings

    async def calibrate(self, size: int, repeats: int, instances: int) -> list[float]:
        """Seconds of batches of one size while `instances` executors run them at the same time.

        Raises:
            Busy: requests are in flight, or not everything is ready.
            EngineFailure: the model fails at this size.
        """
        if self.failure or self._admitted or self._active:
            raise Busy(self.failure or "calibration needs an idle server")
        chosen = self._executors[:instances]
        self._active = len(chosen)
        try:
            timed = (e.time_batches(size, repeats, len(chosen)) for e in chosen)
            return [s for seconds in await asyncio.gather(*timed) for s in seconds]
        finally:
            self._active = 0

    def document(self) -> dict[str, Any]:
        """All counters, JSON-ready."""
        now_s = time.monotonic()
        return {
            "monotonic_s": now_s,
            "uptime_s": now_s - self._began_s,
            "synthetic": self.settings.engine == "synthetic",
            **self.statistics.document(),
            "in_flight": self._admitted + self._active,
            "queue_depth": self._batcher.waiting if self._batcher else 0,
            "instances": [
                {**self.statistics.instance_document(i), "pid": e.pid, "rss_bytes": _rss(e.pid)}
                for i, e in enumerate(self._executors)
            ],
            "front_rss_bytes": _rss(os.getpid()),
        }

    def _admit(self) -> Batcher[Job]:
        self.statistics.requests["received"] += 1
        reason = self.failure or ("the server is shutting down" if self.draining else None)
        if reason is None and self._admitted >= self.settings.queue_capacity:
            reason = f"the queue of {self.settings.queue_capacity} requests is full"
        if reason is not None or self._batcher is None:
            self.statistics.requests["rejected"] += 1
            raise Busy(reason or "loading")
        return self._batcher

    async def _preprocess(self, body: bytes, slot: int) -> None:
        self._admitted += 1
        loop = asyncio.get_running_loop()
        try:
            took_s = await loop.run_in_executor(self._workers, self._fill, body, slot)
        except BaseException:
            self._admitted -= 1
            raise
        self.statistics.preprocess_s += took_s

    def _fill(self, body: bytes, slot: int) -> float:
        """In a worker thread: the picture's pixels into its slot; the seconds it took."""
        began_s = time.perf_counter()
        if not body and self.settings.engine == "synthetic":
            return 0.0
        preprocess.check_size(body, self.settings.max_pixels)
        pixels = preprocess.KINDS[self.settings.preprocessing](body, self._spec)
        self._slots.pixels[slot] = pixels
        return time.perf_counter() - began_s

    async def _in_batch(self, batcher: Batcher[Job], slot: int) -> tuple[list[int], list[float]]:
        loop = asyncio.get_running_loop()
        job = Job(slot, loop.create_future(), loop.time())
        batcher.add(job)
        # A slot must not be given back while a batch may still read it: wait even if cancelled.
        return await asyncio.shield(job.done)

    def _send(self, executor: int, batch: list[Job]) -> None:
        now_s = asyncio.get_running_loop().time()
        self.statistics.queue_s += sum(now_s - job.queued_s for job in batch)
        self._admitted -= len(batch)
        self._active += 1
        task = asyncio.ensure_future(self._run(executor, batch))
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, batch: list[Job]) -> None:
        try:
            result = await self._executors[number].run([j.slot for j in batch], self._active)
        except EngineFailure as failure:
            for job in batch:
                job.done.set_exception(EngineFailure(str(failure)))
        else:
            self.statistics.batch_done(number, len(batch), result.start_s, result.end_s)
            answers = zip(result.classes, result.probabilities, strict=True)
            for job, answer in zip(batch, answers, strict=True):
                job.done.set_result(answer)
        finally:
            self._active -= 1
            if self._batcher is not None and self.failure is None:
                self._batcher.release(number)

    def _policy(self) -> Policy:
        return Policy(self.settings.batch_window_ms / 1000, self.settings.max_batch_size)

    def _count_failure(self, error: Exception) -> None:
        if isinstance(error, Busy):
            self.statistics.requests["rejected"] += 1
        elif isinstance(error, BadImage | TooLarge):
            self.statistics.requests["bad_request"] += 1
        else:
            self.statistics.requests["failed"] += 1


def _pixel_spec(settings: Settings) -> PixelSpec:
    if settings.engine == "synthetic":
        return PixelSpec()
    from serving.models import pixel_spec

    return pixel_spec(str(settings.model))


def _rss(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
