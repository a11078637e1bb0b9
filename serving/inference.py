"""The executor's side: load, compare with the reference, warm up, then answer batches.

Runs as `python -m serving.inference ENGINE SOCKET_FD MEMORY_FD`; the first line that it reads holds
its settings. It ends when the socket closes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np

from serving.answers import best_classes
from serving.decoding import Decoder, open_decoder
from serving.engines import Engine, open_engines
from serving.guard import check_accuracy
from serving.pixels import Pixels, PixelSpec
from serving.settings import Settings
from serving.slots import Slots

# Powers of two up to the maximum: every kernel and every allocation is warm before the first batch.
WARM_RUNS = 2

Send = Callable[[dict[str, Any]], None]


class Lane:
    """One engine, the pictures that it reads, and how they are decoded if that is done here."""

    def __init__(
        self, number: int, engine: Engine, slots: Slots, spec: PixelSpec, decoder: Decoder | None
    ) -> None:
        self._number, self._engine, self._slots = number, engine, slots
        self._crop, self._decoder = spec.crop, decoder

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one line of the front end."""
        try:
            if "repeats" in request:
                seconds = [self._timed(request) for _ in range(request["repeats"])]
                return {"lane": self._number, "seconds": seconds}
            return self._run(request)
        except Exception as error:  # out of memory and its like: this batch fails, the server lives
            reason = f"the model failed: {type(error).__name__}: {error}"
            return {"lane": self._number, "error": reason}

    def warm_up(self, max_batch: int) -> None:
        """Run every power of two up to the maximum."""
        size = 1
        while True:
            for _ in range(WARM_RUNS):
                self._engine.run(self._slots.pixels([0] * size, self._crop), 1)
            if size == max_batch:
                return
            size = min(2 * size, max_batch)

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        began_s = time.monotonic()
        pixels, bad = self._pixels(request)
        start_s = time.monotonic()
        output = self._engine.run(pixels, request["active"])
        end_s = time.monotonic()
        classes, probabilities = best_classes(output.logits)
        return {
            "lane": self._number,
            "classes": classes.tolist(),
            "probabilities": np.round(probabilities, 6).tolist(),
            # On a GPU the device was at work for the events' time only, up to the end.
            "start_s": max(start_s, end_s - output.busy_s),
            "end_s": end_s,
            "ran": output.ran,
            "preprocess_s": start_s - began_s if self._decoder else 0.0,
            "bad": bad,
        }

    def _pixels(self, request: dict[str, Any]) -> tuple[Pixels | Any, dict[int, str]]:
        slots, lengths = request["slots"], request["lengths"]
        if self._decoder is None or lengths is None:
            return self._slots.pixels(slots, self._crop), {}
        pictures = [self._slots.encoded(s, n) for s, n in zip(slots, lengths, strict=True)]
        return self._decoder.decode(pictures)

    def _timed(self, request: dict[str, Any]) -> float:
        began_s = time.perf_counter()
        self._engine.run(self._slots.pixels(request["slots"], self._crop), request["active"])
        return time.perf_counter() - began_s


def main() -> None:
    """Load, warm up, then answer batches until the socket closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the group; the front end drains
        signal.signal(number, signal.SIG_IGN)
    engine_name, socket_fd, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if engine_name not in ("synthetic", "onnxruntime"):  # neither needs torch to run
        import torchvision.models  # noqa: F401 - while the front end imports its own
    with socket.socket(fileno=socket_fd) as link, link.makefile("rwb") as stream:
        send = _sender(stream)
        order = json.loads(stream.readline() or "null")
        if order is None:  # the front end ended before it had settings
            return
        settings = Settings.model_validate(order["settings"])
        slots = Slots(memory, order["count"], order["size"])
        try:
            lanes, guard = _open(settings, slots, lambda text: send({"progress": text}))
        except Exception as error:  # whatever it is, the front end must tell the user
            send({"failed": f"{error}" or type(error).__name__})
            return
        send({"lanes": len(lanes), "guard": guard})
        _answer_all(lanes, stream, send)


def _open(
    settings: Settings, slots: Slots, say: Callable[[str], None]
) -> tuple[list[Lane], dict[str, Any] | None]:
    engines = open_engines(settings, say)
    spec = settings.input or PixelSpec()
    decoder = open_decoder(settings, spec)
    report = check_accuracy(settings, spec, engines[0], decoder)
    # A decoder is one pipeline: every lane has its own.
    decoders = [decoder, *(open_decoder(settings, spec) for _ in engines[1:])]
    lanes = [
        Lane(number, engine, slots, spec, decoder)
        for number, (engine, decoder) in enumerate(zip(engines, decoders, strict=True))
    ]
    for lane in lanes:
        lane.warm_up(settings.max_batch_size)
    return lanes, report


def _answer_all(lanes: list[Lane], stream: Any, send: Send) -> None:
    """One lane works in this thread; several have a thread each."""
    if len(lanes) == 1:
        for line in stream:
            send(lanes[0].handle(json.loads(line)))
        return
    queues = [SimpleQueue[dict[str, Any]]() for _ in lanes]

    def work(lane: Lane, queue: SimpleQueue[dict[str, Any]]) -> None:
        while True:
            send(lane.handle(queue.get()))

    for lane, queue in zip(lanes, queues, strict=True):
        Thread(target=work, args=(lane, queue), daemon=True).start()
    for line in stream:
        request = json.loads(line)
        queues[request["lane"]].put(request)


def _sender(stream: Any) -> Send:
    lock = Lock()

    def send(document: dict[str, Any]) -> None:
        try:
            with lock:
                stream.write(json.dumps(document).encode() + b"\n")
                stream.flush()
        except BrokenPipeError:  # the front end is gone, and with it the reason to live
            os._exit(0)

    return send


if __name__ == "__main__":
    main()
