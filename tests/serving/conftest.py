"""A real server process on a free port, and images to send it."""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from ruamel.yaml import YAML

TOKEN = "test-token"
READY_WITHIN_S = 60.0


@dataclass(frozen=True)
class RunningServer:
    """A server process and how to talk to it."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
        status, _, answer = self.request(method, path, body)
        return status, json.loads(answer)

    def admin(self, method: str, path: str, document: Any) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        status, _, answer = self.request(method, path, json.dumps(document).encode(), headers)
        return status, json.loads(answer)

    def stats(self) -> dict[str, Any]:
        return self.json("GET", "/stats")[1]

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextmanager
def run_server(folder: Path, settings: Mapping[str, Any], *, ready: bool = True) -> Iterator[
    RunningServer
]:  # fmt: skip
    """Start `python -m serving` with these settings on an inherited socket; end it afterwards."""
    config, log = folder / "server.yaml", folder / "server.log"
    with config.open("w") as file:
        YAML(typ="safe", pure=True).dump(dict(settings), file)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "serving", "--config", str(config),
                 "--fd", str(listener.fileno())],
                pass_fds=(listener.fileno(),),
                stderr=output,
                env={**os.environ, "SERVING_ADMIN_TOKEN": TOKEN},
            )  # fmt: skip
    server = RunningServer(process, port, log)
    try:
        if ready:
            wait_ready(server)
        yield server
    finally:
        process.kill()
        process.wait()


def wait_ready(server: RunningServer) -> None:
    """Return when the server says that it is ready; fail with its log if it ends instead."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log.read_text()
        try:
            if server.json("GET", "/health/ready")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError("not ready in time")


def photo(width: int = 320, height: int = 240, seed: int = 0) -> Image.Image:
    """Smooth colours with some texture: what decoders and resizers are made for."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    waves = [np.sin(6 * (x * rng.normal() + y * rng.normal()) + rng.normal()) for _ in range(3)]
    pixels = 127 + 90 * np.stack(waves, axis=-1) + rng.normal(0, 6, (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """The image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def jpeg() -> bytes:
    return encoded(photo())
