"""Bounds on what a connection may send, and how long it may take: real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tests.serving.conftest import RunningServer, run_server

pytestmark = pytest.mark.slow

QUICK = {"engine": "synthetic", "receive_timeout_s": 0.5, "idle_timeout_s": 1.0,
         "max_header_bytes": 2000,
         "synthetic": {"base_ms": 1.0, "per_item_ms": 0.0}}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server(tmp_path_factory.mktemp("bounds"), QUICK) as it:
        yield it


def everything(link: socket.socket) -> bytes:
    """What the server sends until it closes."""
    link.settimeout(10)
    received = b""
    while chunk := link.recv(65536):
        received += chunk
    return received


def sent(server: RunningServer, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port)) as link:
        link.sendall(data)
        return everything(link)


def test_a_slow_header_is_closed(server: RunningServer) -> None:
    """A client that drips its request is sent away, others are served meanwhile."""
    with socket.create_connection(("127.0.0.1", server.port)) as link:
        link.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\nx-drip: ")
        assert server.json("GET", "/health/live")[0] == 200
        assert everything(link).startswith(b"HTTP/1.1 408")


def test_a_slow_body_is_closed(server: RunningServer) -> None:
    """The same for a body that never ends."""
    answer = sent(server, b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\nabc")
    assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("count", [1, 60])
def test_large_headers_are_431(server: RunningServer, count: int) -> None:
    """One long header or many short ones."""
    headers = b"".join(b"x-%d: %s\r\n" % (i, b"a" * (3000 // count)) for i in range(count))
    answer = sent(server, b"GET /stats HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431")


def test_a_header_that_never_ends_is_431(server: RunningServer) -> None:
    """Refused by what has arrived, not by what is complete."""
    answer = sent(server, b"GET /stats HTTP/1.1\r\nx: " + b"a" * 5000)
    assert answer.startswith(b"HTTP/1.1 431")


def test_an_idle_connection_is_closed(server: RunningServer) -> None:
    """Whether it never sent anything or has been answered."""
    assert sent(server, b"") == b""
    began_s = time.monotonic()
    answer = sent(server, b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert time.monotonic() - began_s > 0.5


def test_what_is_not_http_is_400_in_json(server: RunningServer) -> None:
    """Errors have one form on every path."""
    answer = sent(server, b"hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'{"error": ' in answer


def test_a_request_that_waits_long_is_not_a_slow_one(tmp_path: object) -> None:
    """The bound is on arrival; an answer may take longer."""
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    slow = {**QUICK, "synthetic": {"base_ms": 1200.0, "per_item_ms": 0.0}}
    with run_server(tmp_path, slow) as server:
        assert server.json("POST", "/predict")[0] == 200
