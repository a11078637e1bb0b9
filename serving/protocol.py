"""HTTP as uvicorn reads it, with bounds: on headers, on the time that a request takes to arrive,
and with word of clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.settings import Settings


def _closing(status: str, text: str) -> bytes:
    body = json.dumps({"error": text}).encode()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


TOO_LARGE = _closing("431 Request Header Fields Too Large", "the headers are too large")
TOO_SLOW = _closing("408 Request Timeout", "the request took too long to arrive")
NOT_HTTP = _closing("400 Bad Request", "this is not an HTTP request")


class Bounded(HttpToolsProtocol):
    """One connection, read by httptools: h11 would cost 0.1 ms a request more."""

    settings: Settings

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._in_headers, self._header_bytes, self._seen = True, 0, 0
        self._pieces, self._body_bytes = list[bytes](), 0
        self._overdue: asyncio.TimerHandle | None = None
        # A connection that never sends anything is idle from its first moment.
        self._expect(self.settings.idle_timeout_s, b"")

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        # Counted by the piece: what came with the last piece of the headers may be body.
        if self._in_headers and self._header_bytes > self.settings.max_header_bytes:
            self._refuse(TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect(self.settings.receive_timeout_s, TOO_SLOW)
        scope: Any = self.scope  # a TypedDict that knows the standard keys only
        scope["serving.gone"] = self.transport.is_closing

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._seen += len(name) + len(value)
        if self._seen > self.settings.max_header_bytes:
            self._refuse(TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._in_headers, self._seen = False, 0
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Gather the body and hand it over whole: piece by piece, each of the three that a picture
        comes in would stop the reading, wake the application and be copied to the others."""
        self._pieces.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > self.settings.max_body_bytes:  # for the application to refuse
            self._hand_over()

    def _hand_over(self) -> None:
        body, self._pieces, self._body_bytes = b"".join(self._pieces), [], 0
        if body and not self.cycle.response_complete:
            # Uvicorn gathers in a bytearray and copies it to bytes; bytes it hands on as they are.
            cycle: Any = self.cycle
            cycle.body = bytes(cycle.body) + body if cycle.body else body
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._relax()
        self._in_headers, self._header_bytes = True, 0
        if not self.transport.is_closing():
            self._hand_over()
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(NOT_HTTP)

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)

    def _expect(self, within_s: float, answer: bytes) -> None:
        self._relax()
        self._overdue = self.loop.call_later(within_s, self._refuse, answer)

    def _relax(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _refuse(self, answer: bytes) -> None:
        if self.transport.is_closing():
            return
        # Pipelined behind another request it would be read as that one's answer.
        if answer and not self.pipeline:
            self.transport.write(answer)
        self.transport.close()


def bounded_protocol(settings: Settings) -> type[asyncio.Protocol]:
    """The protocol within these bounds, for uvicorn to make one a connection."""
    return type("BoundedProtocol", (Bounded,), {"settings": settings})
