"""One HTTP request of an open loop: kept-alive connections, and the moment each was really sent."""

from __future__ import annotations

import select
import time
from socket import IPPROTO_TCP, TCP_NODELAY
from typing import Any
from urllib.parse import urlsplit

import gevent
from gevent import getcurrent
from gevent.monkey import get_original
from gevent.socket import socket
from geventhttpclient import HTTPClient
from geventhttpclient.connectionpool import ConnectionPool
from geventhttpclient.response import HTTPParseError

from tuner.loadgen.wire import Fault

_poll = get_original("select", "poll")


class OpenPool(ConnectionPool):
    """Idle connections without a limit: the in-flight cap is the schedule's, because a pool that
    makes requests wait is coordinated omission through the back door."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        super().__init__(
            host, port, host, port, connection_timeout=timeout_s, network_timeout=timeout_s
        )
        self._idle: list[socket] = []
        self._addresses: list[Any] = []
        self.opened = 0

    def get_socket(self) -> socket:
        """An idle live connection or a new one; stamps the calling greenlet's send time.

        The stamp comes before connecting: a server slow to accept is slow, and we are not late.
        """
        request = getcurrent()
        request.sent_ns = time.monotonic_ns()
        while self._idle:
            connection = self._idle.pop()
            if _is_quiet(connection):
                break
            connection.close()
        else:
            connection = self._create_socket()
            self.opened += 1
        request.connection = connection
        return connection

    def return_socket(self, sock: socket) -> None:
        self._idle.append(sock)

    def release_socket(self, sock: socket) -> None:
        sock.close()

    def after_connect(self, sock: socket) -> None:
        """No waiting to fill a segment: the end of a large body would lie about for 40 ms."""
        sock.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _resolve(self) -> list[Any]:
        """Once: gevent asks a thread, which a burst of new connections would queue for."""
        self._addresses = self._addresses or super()._resolve()
        return self._addresses


class Client:
    """Posts bodies to one URL."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url}: the load generator speaks http://HOST[:PORT]/PATH only.")
        host, port = parts.hostname, parts.port or 80
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._http = HTTPClient(host, port, headers={"Content-Type": "application/octet-stream"})
        self.pool = OpenPool(host, port, timeout_s)
        self._http._connection_pool = self.pool

    def post(self, body: bytes, deadline_ns: int) -> tuple[int, int]:
        """HTTP status or `Fault`, and the length of the answer.

        The whole request, connecting included, ends by the deadline.
        """
        left_s = (deadline_ns - time.monotonic_ns()) / 1e9
        try:
            with gevent.Timeout(max(left_s, 0.001)):
                response = self._http.request("POST", self._path, body)
                return response.status_code, len(response.read())
        except (gevent.Timeout, TimeoutError):
            self._abandon()
            return Fault.TIMEOUT, 0
        except (OSError, HTTPParseError):  # refused, reset, truncated, unreadable: no answer
            self._abandon()
            return Fault.CONNECTION, 0

    def close(self) -> None:
        self.pool.close()

    def _abandon(self) -> None:
        """A connection with an answer outstanding must not be used again."""
        connection = getattr(getcurrent(), "connection", None)
        if connection is not None:
            connection.close()


def _is_quiet(connection: socket) -> bool:
    """Whether an idle connection is still open: one that is readable was closed by the server.

    By poll, because select fails for descriptors above 1023 and would throw good connections away.
    """
    if connection.fileno() < 0:
        return False
    poller = _poll()
    poller.register(connection.fileno(), select.POLLIN)
    return not poller.poll(0)
