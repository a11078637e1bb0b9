"""The server behind its routes: admission, preprocessing, batcher and executors, wired together."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from serving import preprocess
from serving.admission import Pace
from serving.batcher import Batcher, Policy, Scheduler
from serving.errors import (
    BadImage,
    BadRequest,
    Busy,
    Cancelled,
    EngineFailure,
    Expired,
    SettingsError,
    TooLarge,
)
from serving.executor import Executor, places_of
from serving.pixels import Pixels, PixelSpec
from serving.settings import LIVE, Settings
from serving.slots import Slots
from serving.statistics import Statistics, imbalance

# Slots for requests admitted, and beyond them room for live changes of the queue's bound; pages
# that are never written take no memory.
LEAST_SLOTS = 4096
# Engines whose largest batch is part of what was built.
FIXED_BATCH = ("cudagraph", "tensorrt")

Best = tuple[list[int], list[float]]  # classes and probabilities of one picture


@dataclass(frozen=True)
class Terms:
    """What a request asks for beside its answer.

    Args:
        deadline_s: on the monotonic clock; None: whenever.
        gone: whether the client has left.
    """

    deadline_s: float | None = None
    gone: Callable[[], bool] = lambda: False


@dataclass(eq=False)
class Job:
    """A picture in a slot, waiting for its batch."""

    slot: int
    length: int  # of its encoded bytes, where the executor decodes
    done: asyncio.Future[Best]
    queued_s: float
    terms: Terms


class Service:
    """One model being served.

    Args:
        settings: settled ones, see `capabilities.settle`.
        executors: started, in the order of `capabilities.layout`.
        memory: descriptor of the file that they share with this process.
    """

    def __init__(self, settings: Settings, executors: Sequence[Executor], memory: int) -> None:
        self.settings = settings
        self.statistics = Statistics()
        self.failure: str | None = "loading"
        self.draining = False
        self.spec = settings.input or PixelSpec()
        # The model's name in paths: without folder and ending, without its module.
        self.model_name = Path(str(settings.model)).stem.rpartition(":")[2]
        # A synthetic executor has no decoder: its workers stand in.
        self.decodes_late = settings.preprocessing == "dali" and settings.engine != "synthetic"
        self._began_s = time.monotonic()
        in_batches = len(settings.devices) * settings.instances * settings.max_batch_size
        count = max(LEAST_SLOTS, settings.queue_capacity + in_batches)
        pixel_bytes = self.spec.crop**2 * 3
        size = max(pixel_bytes, settings.max_body_bytes) if self.decodes_late else pixel_bytes
        self._slots = Slots(memory, count, size)
        self._prepare = preprocess.preprocess_of(settings)
        self._workers = ThreadPoolExecutor(settings.workers, "preprocess")
        self._executors = executors
        self._places = list[tuple[Executor, int]]()
        self._batcher: Batcher[Job] | None = None
        self._pace = Pace()
        self._admitted = self._decoding = 0  # pictures that no executor, no worker has done yet
        self._active = 0
        self._built_for = settings.max_batch_size
        self._tasks = set[asyncio.Task[None]]()

    async def start(self) -> None:
        """Return when every executor is ready.

        Raises:
            StartError: one of them cannot run.
        """
        each = len(self._executors) // len(self.settings.devices)
        devices = [d for d in self.settings.devices for _ in range(each)]
        await asyncio.gather(*(
            executor.prepare(self._part(number, device), self._slots, self._progress)
            for number, (executor, device) in enumerate(zip(self._executors, devices, strict=True))
        ))  # fmt: skip
        self._places = places_of(self._executors)
        loop = asyncio.get_running_loop()
        self._batcher = Batcher(
            self._policy(),
            # Two `cpu` in the list are two devices: half of the processes each.
            [self._executors.index(executor) // each for executor, _ in self._places],
            Scheduler(loop.time, loop.call_at),
            self._send,
            dropped=self._dropped,
            in_turn=self.settings.dispatch == "round_robin",
        )
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

    async def answer(self, pictures: Sequence[bytes | Pixels], terms: Terms) -> list[Best]:
        """One request from its pictures, encoded or as pixels of the model's size, to its answers.

        Raises:
            RequestError: with the status that the client gets.
        """
        began_s = time.monotonic()
        try:
            batcher = self._admit(len(pictures), terms)
            if len(pictures) == 1:
                best = [await self._one(batcher, pictures[0], terms)]
            else:
                best = await _all(self._one(batcher, p, terms) for p in pictures)
        except Exception as error:
            self.statistics.requests[_outcome(error)] += 1
            raise
        self.statistics.requests["answered"] += 1
        self.statistics.answer_s += time.monotonic() - began_s
        return best

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
        most = self._slots.count - len(self._places) * changed.max_batch_size
        if changed.queue_capacity > most:
            raise SettingsError(f"queue_capacity: at most {most} without a restart")
        if changed.engine in FIXED_BATCH and changed.max_batch_size > self._built_for:
            raise SettingsError(
                f"max_batch_size: {changed.engine} was built for at most {self._built_for}; "
                "more needs a restart"
            )
        self.settings = self.settings.model_copy(update={k: getattr(changed, k) for k in LIVE})
        if self._batcher is not None:
            self._batcher.change(self._policy())
        return self.settings

    async def calibrate(self, size: int, repeats: int, instances: int) -> list[float]:
        """Seconds of batches of one size while `instances` places run them at the same time.

        Raises:
            Busy: requests are in flight, or not everything is ready.
            EngineFailure: the model fails at this size.
        """
        if self.failure or self._admitted or self._active:
            raise Busy(self.failure or "calibration needs an idle server")
        chosen = self._places[:instances]
        self._active = len(chosen)
        try:
            timed = (e.time_batches(lane, size, repeats, len(chosen)) for e, lane in chosen)
            return [s for seconds in await asyncio.gather(*timed) for s in seconds]
        finally:
            self._active = 0

    def document(self) -> dict[str, Any]:
        """All counters, JSON-ready."""
        now_s = time.monotonic()
        busy_s = {d: b.total_s() for d, b in sorted(self.statistics.device_busy.items())}
        return {
            "monotonic_s": now_s,
            "uptime_s": now_s - self._began_s,
            "model": self.model_name,
            "synthetic": self.settings.engine == "synthetic",
            **self.statistics.document(),
            "in_flight": self._admitted + self._active,
            "queue_depth": self._batcher.waiting if self._batcher else 0,
            "instances": [
                {**self.statistics.places[i].document(), "device": e.device, "pid": e.pid,
                 "rss_bytes": _rss(e.pid)}
                for i, (e, _) in enumerate(self._places)
            ],
            "devices": {device: {"busy_seconds": s} for device, s in busy_s.items()},
            "imbalance": imbalance(busy_s),
            "guard": next((e.guard for e in self._executors if e.guard), None),
            "front_rss_bytes": _rss(os.getpid()),
        }  # fmt: skip

    def _part(self, number: int, device: str) -> Settings:
        """What one executor is told: its own device, and its speed if it is a synthetic one."""
        changes: dict[str, Any] = {"device": device}
        if self.settings.synthetic.speeds:
            speeds = self.settings.synthetic.speeds
            each = len(self._executors) // len(self.settings.devices)
            speed = speeds[number // each % len(speeds)]
            changes["synthetic"] = self.settings.synthetic.model_copy(update={"speeds": (speed,)})
        return self.settings.model_copy(update=changes)

    def _progress(self, text: str) -> None:
        self.failure = f"loading: {text}"

    def _admit(self, count: int, terms: Terms) -> Batcher[Job]:
        """Take a request, or refuse at once what cannot be served in time."""
        self.statistics.requests["received"] += 1
        reason = self.failure or ("the server is shutting down" if self.draining else None)
        if reason is None and self._admitted + count > self.settings.queue_capacity:
            reason = f"the queue of {self.settings.queue_capacity} requests is full"
        if reason is not None or self._batcher is None:
            raise Busy(reason or "loading")
        if terms.deadline_s is not None:
            left_s = terms.deadline_s - time.monotonic()
            wait_s = self._pace.answer_in_s(
                self._decoding, self._admitted, self.settings.workers, len(self._places)
            )
            # An idle server always tries: otherwise one slow answer could close it for good.
            if left_s <= 0 or (self._admitted and not self._pace.makes_it(left_s, wait_s)):
                raise Expired(f"an answer would take {wait_s:.3f} s, {left_s:.3f} s are left")
        return self._batcher

    async def _one(self, batcher: Batcher[Job], picture: bytes | Pixels, terms: Terms) -> Best:
        slot = self._slots.take()
        if slot is None:
            raise Busy("no memory is free for another picture")
        try:
            length = await self._fill(picture, slot, terms)
            loop = asyncio.get_running_loop()
            job = Job(slot, length, loop.create_future(), time.monotonic(), terms)
            batcher.add(job)
            # A batch may still read the slot: it is not given back before, even if cancelled.
            return await asyncio.shield(job.done)
        finally:
            self._slots.give_back(slot)

    async def _fill(self, picture: bytes | Pixels, slot: int, terms: Terms) -> int:
        """The picture into its slot; the length of its encoded bytes."""
        self._admitted += 1
        try:
            if not isinstance(picture, bytes):
                if self.decodes_late:
                    raise BadRequest("pixels are not taken with preprocessing dali: send images")
                self._slots.put(slot, picture)
                return 0
            if self.decodes_late:
                preprocess.check_size(picture, self.settings.max_pixels)
                self._slots.put(slot, picture)
                return len(picture)
            await self._decode(picture, slot, terms)
        except BaseException:
            self._admitted -= 1
            raise
        return 0

    async def _decode(self, picture: bytes, slot: int, terms: Terms) -> None:
        loop = asyncio.get_running_loop()

        def work() -> float:
            """In a worker thread: the picture's pixels into its slot; the seconds it took."""
            began_s = time.perf_counter()
            if terms.gone():
                raise Cancelled("the client is gone")
            if terms.deadline_s is not None and time.monotonic() >= terms.deadline_s:
                raise Expired("the deadline has passed")
            if not picture and self.settings.engine == "synthetic":
                return 0.0
            preprocess.check_size(picture, self.settings.max_pixels)
            self._slots.put(slot, self._prepare(picture, self.spec))
            return time.perf_counter() - began_s

        self._decoding += 1
        try:
            took_s = await loop.run_in_executor(self._workers, work)
        finally:
            self._decoding -= 1
        self.statistics.preprocess_s += took_s
        self._pace.preprocessed(took_s)

    def _dropped(self, job: Job) -> bool:
        """At dispatch: whether nobody wants the answer, or it would come too late."""
        error: Exception | None = None
        if job.terms.gone():
            error = Cancelled("the client is gone")
        elif job.terms.deadline_s is not None:
            ends_s = time.monotonic() + self._pace.batch_s
            # A lone picture is tried while there is time at all: the pace may be an old one.
            alone = self._admitted == 1
            if job.terms.deadline_s < (time.monotonic() if alone else ends_s):
                error = Expired("the deadline would have passed before the answer")
        if error is None:
            return False
        self._admitted -= 1
        job.done.set_exception(error)
        return True

    def _send(self, place: int, batch: list[Job]) -> None:
        now_s = time.monotonic()
        self.statistics.queue_s += sum(now_s - job.queued_s for job in batch)
        self._admitted -= len(batch)
        self._active += 1
        task = asyncio.ensure_future(self._run(place, batch))
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)

    async def _run(self, place: int, batch: list[Job]) -> None:
        executor, lane = self._places[place]
        lengths = [job.length for job in batch] if self.decodes_late else None
        began_s = time.perf_counter()
        try:
            result = await executor.run(lane, [job.slot for job in batch], lengths, self._active)
        except EngineFailure as failure:
            self.statistics.uncaptured += "no CUDA graph" in str(failure)
            for job in batch:
                job.done.set_exception(EngineFailure(str(failure)))
        else:
            self._pace.batch_done(len(batch), time.perf_counter() - began_s)
            self.statistics.preprocess_s += result.preprocess_s
            self.statistics.batch_done(
                place, self._device_of(place), len(batch), result.ran, result.start_s, result.end_s
            )
            for at, job in enumerate(batch):
                if at in result.bad:
                    job.done.set_exception(BadImage(result.bad[at]))
                else:
                    job.done.set_result((result.classes[at], result.probabilities[at]))
        finally:
            self._active -= 1
            if self._batcher is not None and self.failure is None:
                self._batcher.release(place)

    def _device_of(self, place: int) -> str:
        """Its name, numbered where the list has the same device more than once."""
        device = self._places[place][0].device
        if self.settings.devices.count(device) == 1:
            return device
        return f"{device}#{place * len(self.settings.devices) // len(self._places)}"

    def _policy(self) -> Policy:
        return Policy(self.settings.batch_window_ms / 1000, self.settings.max_batch_size)


async def _all(answers: Any) -> list[Best]:
    """Every answer; the first failure, once all have ended."""
    found = await asyncio.gather(*answers, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return [one for one in found if not isinstance(one, BaseException)]


def _outcome(error: Exception) -> str:
    match error:
        case Expired():
            return "expired"
        case Busy():
            return "rejected"
        case Cancelled():
            return "cancelled"
        case BadImage() | TooLarge():
            return "bad_request"
    return "failed"


def _rss(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
