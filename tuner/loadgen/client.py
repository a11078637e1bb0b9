"""One HTTP request of an open loop: kept-alive connections, and the moment each was really sent."""

from __future__ import annotations

import select
import time
from urllib.parse import urlsplit

import gevent
from gevent import getcurrent
from gevent.monkey import get_original
from gevent.socket import socket
from geventhttpclient import HTTPClient
from geventhttpclient.connectionpool import ConnectionPool

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
        self.opened = 0

    def get_socket(self) -> socket:
        """An idle live connection or a new one; stamps the calling greenlet's send time."""
        while self._idle:
            connection = self._idle.pop()
            if _is_quiet(connection):
                break
            connection.close()
        else:
            connection = self._create_socket()
            self.opened += 1
        request = getcurrent()
        request.connection, request.sent_ns = connection, time.monotonic_ns()
        return connection

    def return_socket(self, sock: socket) -> None:
        self._idle.append(sock)

    def release_socket(self, sock: socket) -> None:
        sock.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class Client:
    """Posts bodies to one URL."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        host, port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path = parts.path or "/"
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
        except gevent.Timeout:
            self._abandon()
            return Fault.TIMEOUT, 0
        except Exception:  # reset, refused, truncated or unreadable: the caller got no answer
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
