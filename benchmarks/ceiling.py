"""How much of a core's ceiling the server delivers, and what a request costs beside its work.

    python -m benchmarks.ceiling [--seconds 6] [--rounds 2] [--engines eager onnxruntime]

The ceiling is the same decoder and engine in a loop, decode -> batch -> model, without a server, on
the server's core. Server and ceiling run on core 0, the generator on core 1; with `--shared` the
server has both cores, and so has the ceiling, as two processes. Each round measures ceiling,
served, ceiling; figures are medians over rounds, the ratio is of one round's figures.

- served: answers/s at saturation, 48 keep-alive connections that always have a request out.
- overhead: CPU time of all server processes per answer, less the ceiling's per picture.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import uvloop

from serving import oip, preprocess
from serving.capabilities import settle
from serving.engines import open_engines
from serving.settings import Settings
from tests.serving.conftest import RunningServer, run_server
from tuner.payloads import generate

BATCH = 16
CONNECTIONS = 48
WARM_S = 2.0
MODEL = "mobilenet_v3_small"


@dataclass(frozen=True)
class Rate:
    """Pictures per second, and CPU milliseconds of each."""

    per_s: float
    cpu_ms: float


def images() -> list[bytes]:
    folder = Path(tempfile.gettempdir()) / "p99-tuner-benchmark"
    return [path.read_bytes() for path in generate(folder).paths]


def settings_of(engine: str) -> Settings:
    return settle(
        Settings.model_validate({"device": "cpu", "model": MODEL, "engine": engine, "threads": 1})
    )


def ceiling_process(engine: str, kind: str, core: int, seconds: float) -> None:
    """Run the loop in this process and print its figures."""
    os.sched_setaffinity(0, {core})
    import torch

    torch.set_num_threads(1)
    settings = settings_of(engine)
    (model,) = open_engines(settings, lambda _: None)
    prepare = preprocess.preprocess_of(settings)
    spec = settings.input
    assert spec is not None
    bodies = images()
    ready = [np.ascontiguousarray(prepare(body, spec)) for body in bodies]
    batch = np.empty((BATCH, spec.crop, spec.crop, 3), np.uint8)

    def one(number: int) -> None:
        for place in range(BATCH):
            at = (number * BATCH + place) % len(bodies)
            batch[place] = prepare(bodies[at], spec) if kind == "jpeg" else ready[at]
        model.run(batch, 1)

    for number in range(4):
        one(number)
    began_s, cpu_s, done = time.perf_counter(), time.process_time(), 0
    while (took_s := time.perf_counter() - began_s) < seconds:
        one(done)
        done += 1
    pictures = done * BATCH
    used_s = time.process_time() - cpu_s
    print(json.dumps({"per_s": pictures / took_s, "cpu_ms": 1000 * used_s / pictures}))


def ceiling(engine: str, kind: str, cores: list[int], seconds: float) -> Rate:
    """The sum of one process a core."""
    command = [sys.executable, "-m", "benchmarks.ceiling", "--ceiling", engine, kind]
    running = [
        subprocess.Popen([*command, str(core), str(seconds)], stdout=subprocess.PIPE, text=True)
        for core in cores
    ]
    found = [json.loads(process.communicate()[0]) for process in running]
    return Rate(sum(f["per_s"] for f in found), median(f["cpu_ms"] for f in found))


def requests_of(kind: str, engine: str) -> list[bytes]:
    """Whole HTTP requests, made once."""
    if kind == "jpeg":
        return [_http("/predict", body, {}) for body in images()]
    settings = settings_of(engine)
    prepare, spec = preprocess.preprocess_of(settings), settings.input
    assert spec is not None
    made = list[bytes]()
    for body in images():
        raw = np.ascontiguousarray(prepare(body, spec)).tobytes()
        header = json.dumps({
            "inputs": [{"name": "pixels", "shape": [1, spec.crop, spec.crop, 3],
                        "datatype": "UINT8", "parameters": {"binary_data_size": len(raw)}}],
            "parameters": {"binary_data_output": True},
        }).encode()  # fmt: skip
        made.append(
            _http(f"/v2/models/{MODEL}/infer", header + raw, {oip.HEADER_LENGTH: str(len(header))})
        )
    return made


def _http(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Connection(asyncio.Protocol):
    """Sends the next request as soon as the last one's answer is complete."""

    def __init__(self, requests: list[bytes], first: int, counts: dict[str, int]) -> None:
        self._requests, self._next, self._counts = requests, first, counts
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        if len(body) >= length:
            self._counts[head[9:12].decode()] = self._counts.get(head[9:12].decode(), 0) + 1
            self._received = b""
            self._send()

    def _send(self) -> None:
        self._transport.write(self._requests[self._next % len(self._requests)])
        self._next += 1


def saturate(server: RunningServer, requests: list[bytes], seconds: float) -> Rate:
    """Answers/s of a server whose connections are never idle, and its CPU time of each."""

    async def run() -> Rate:
        loop, counts = asyncio.get_running_loop(), dict[str, int]()
        for number in range(CONNECTIONS):
            await loop.create_connection(
                lambda n=number: Connection(requests, n, counts),  # type: ignore[misc]
                "127.0.0.1",
                server.port,
            )
        await asyncio.sleep(WARM_S)
        before, cpu_s, began_s = dict(counts), cpu_time_s(server), time.perf_counter()
        await asyncio.sleep(seconds)
        done = counts["200"] - before.get("200", 0)
        took_s, used_s = time.perf_counter() - began_s, cpu_time_s(server) - cpu_s
        if set(counts) != {"200"}:
            raise SystemExit(f"not every answer was 200: {counts}")
        return Rate(done / took_s, 1000 * used_s / done)

    return uvloop.run(run())


def cpu_time_s(server: RunningServer) -> float:
    """User and system seconds of the server and its executors so far."""
    front = psutil.Process(server.process.pid)
    times = [p.cpu_times() for p in (front, *front.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def served(engine: str, kind: str, *, shared: bool, seconds: float) -> tuple[Rate, float]:
    """The server's rate and its mean batch."""
    requests = requests_of(kind, engine)
    settings = {
        "device": "cpu", "model": MODEL, "engine": engine, "threads": 1, "workers": 1,
        "max_batch_size": BATCH, "batch_window_ms": 20.0,
        "instances": 2 if shared else 1,
    }  # fmt: skip
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, everywhere if shared else {0})  # inherited by the server
    try:
        with tempfile.TemporaryDirectory() as folder, run_server(Path(folder), settings) as server:
            os.sched_setaffinity(0, everywhere if shared else {1})
            rate = saturate(server, requests, seconds)
            document = server.stats()
            return rate, document["pictures"] / document["batches"]
    finally:
        os.sched_setaffinity(0, everywhere)


def main() -> None:
    if sys.argv[1:2] == ["--ceiling"]:
        ceiling_process(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--engines", nargs="+", default=["eager", "onnxruntime"])
    parser.add_argument("--kinds", nargs="+", default=["jpeg", "tensor"])
    parser.add_argument("--shared", action="store_true")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2] if options.shared else [0]
    layout = "two cores shared with the generator" if options.shared else "one core"
    print(f"{MODEL}, {layout}, batch up to {BATCH}, {options.rounds} rounds")
    print("engine       input    ceiling/s  served/s  ratio  mean batch  overhead ms CPU")
    for engine in options.engines:
        open_engines(settings_of(engine), lambda _: None)  # what is built is built before
        for kind in options.kinds:
            rows = list[tuple[float, float, float, float, float]]()
            for _ in range(options.rounds):
                first = ceiling(engine, kind, cores, options.seconds / 2)
                rate, batch = served(engine, kind, shared=options.shared, seconds=options.seconds)
                second = ceiling(engine, kind, cores, options.seconds / 2)
                best = (first.per_s + second.per_s) / 2
                work_ms = (first.cpu_ms + second.cpu_ms) / 2
                rows.append((best, rate.per_s, rate.per_s / best, batch, rate.cpu_ms - work_ms))
            figures = [median(column) for column in zip(*rows, strict=True)]
            print("{:<12} {:<8} {:9.0f} {:9.0f} {:6.2f} {:11.1f} {:16.2f}".format(
                engine, kind, *figures), flush=True)  # fmt: skip
            names = ("ceiling_rps", "served_rps", "ratio", "mean_batch", "overhead_cpu_ms")
            print("# " + json.dumps({"engine": engine, "input": kind, "shared": options.shared,
                                     **dict(zip(names, figures, strict=True))}))  # fmt: skip


if __name__ == "__main__":
    main()
