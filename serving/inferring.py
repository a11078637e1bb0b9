"""The two routes that carry the traffic, `/predict` and the protocol's `infer`, as plain ASGI:
a framework's request and routing would cost more than everything else that the front end does.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from starlette.types import ASGIApp, Receive, Scope, Send

from serving import oip
from serving.errors import BadRequest, NotFound, RequestError, TooLarge
from serving.pixels import Pixels
from serving.service import Best, Service, Terms

TIMEOUT_HEADER = b"x-request-timeout-ms"
INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
JSON = {"content-type": "application/json"}


class Inferring:
    """Answers inference; everything else goes to `others`."""

    def __init__(self, service: Service, others: ASGIApp) -> None:
        self._service, self._others = service, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Receive -> preprocess -> batch -> infer -> answer; see `Service.answer`."""
        infer = self._infer_of(scope)
        if infer is None:
            await self._others(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            body = await read_body(headers, receive, self._service.settings.max_body_bytes)
            await _respond(send, 200, *await infer(scope, headers, body))
        except RequestError as error:
            await _respond(send, error.status, _error(str(error)), {**JSON, **error.headers})
        except ConnectionError:  # while its body was read: nobody is left to answer
            return
        except Exception as error:
            text = f"unexpected: {type(error).__name__}"
            await _respond(send, 500, _error(text), JSON)

    def _infer_of(self, scope: Scope) -> Callable[..., Any] | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        path: str = scope["path"]
        if path == "/predict":
            return self._predict
        return self._infer if path.startswith("/v2/") and INFER.fullmatch(path) else None

    async def _predict(
        self, scope: Scope, headers: dict[bytes, bytes], body: bytes
    ) -> tuple[bytes, dict[str, str]]:
        """One encoded image in, its best classes out."""
        (best,) = await self._service.answer([body], self._terms(scope, headers, None))
        answer: dict[str, Any] = {"classes": best[0], "probabilities": best[1]}
        if self._service.settings.engine == "synthetic":
            answer["synthetic"] = True
        return json.dumps(answer).encode(), JSON

    async def _infer(
        self, scope: Scope, headers: dict[bytes, bytes], body: bytes
    ) -> tuple[bytes, dict[str, str]]:
        """The Open Inference Protocol."""
        match = INFER.fullmatch(scope["path"])
        assert match is not None
        check_model(self._service, match[1], match[2])
        length = headers.get(oip.HEADER_LENGTH.encode())
        request = oip.parse(body, None if length is None else length.decode("latin-1"))
        pictures = self._pictures(request)
        terms = self._terms(scope, headers, request.timeout_s)
        best = await self._service.answer(pictures, terms)
        synthetic = self._service.settings.engine == "synthetic"
        return oip.encode(
            self._service.model_name,
            request,
            _outputs(best),
            {"synthetic": True} if synthetic else {},
        )

    def _pictures(self, request: oip.InferRequest) -> Sequence[bytes | Pixels]:
        side, most = self._service.spec.crop, self._service.settings.queue_capacity
        if len(request.inputs) != 1:
            raise BadRequest("inputs: give exactly one, image or pixels")
        tensor = request.inputs[0]
        count = tensor.shape[0] if tensor.shape else 0
        if not 1 <= count <= most:
            raise BadRequest(f"input {tensor.name}: from 1 to {most} pictures, given {count}")
        if tensor.name == "image" and tensor.datatype == "BYTES" and len(tensor.shape) == 1:
            return list(tensor.data)
        if (tensor.name, tensor.datatype) == ("pixels", "UINT8") and tensor.shape[1:] == (
            side,
            side,
            3,
        ):
            return list(np.asarray(tensor.data))
        raise BadRequest(
            f"input {tensor.name}: expected image, BYTES [-1], or pixels, UINT8 [-1, {side}, "
            f"{side}, 3]; given {tensor.datatype} {list(tensor.shape)}"
        )

    def _terms(self, scope: Scope, headers: dict[bytes, bytes], timeout_s: float | None) -> Terms:
        """When the answer must be there, counted from the request's receipt, and for whom."""
        if (given := headers.get(TIMEOUT_HEADER)) is not None:
            timeout_s = _milliseconds(given) / 1000
        elif timeout_s is None and self._service.settings.deadline_ms is not None:
            timeout_s = self._service.settings.deadline_ms / 1000
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        gone = scope.get("serving.gone")
        return Terms(deadline_s, gone) if gone else Terms(deadline_s)


def check_model(service: Service, name: str, version: str | None) -> None:
    """Raise NotFound unless this is the model that is served."""
    if name != service.model_name:
        raise NotFound(f"no model {name!r} is served; {service.model_name} is")
    if version not in (None, "1"):
        raise NotFound(f"{name} has no version {version!r}; it has version 1")


async def read_body(headers: dict[bytes, bytes], receive: Receive, limit: int) -> bytes:
    """The whole body, refused as soon as it is known to be too large.

    Raises:
        TooLarge: more than `limit` bytes.
        ConnectionError: the client went away before its end.
    """
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"the body is larger than {limit} bytes")
    message = await receive()
    body: bytes = message.get("body", b"")
    chunks, size = [body], len(body)
    while message.get("more_body"):
        message = await receive()
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise TooLarge(f"the body is larger than {limit} bytes")
    if message["type"] == "http.disconnect":
        raise ConnectionError
    if size > limit:
        raise TooLarge(f"the body is larger than {limit} bytes")
    return body if len(chunks) == 1 else b"".join(chunks)


def _outputs(best: Sequence[Best]) -> list[oip.Tensor]:
    classes = np.array([one[0] for one in best], dtype=np.int64)
    probabilities = np.array([one[1] for one in best], dtype=np.float32)
    return [
        oip.Tensor("classes", "INT64", classes.shape, classes),
        oip.Tensor("probabilities", "FP32", probabilities.shape, probabilities),
    ]


def _milliseconds(given: bytes) -> float:
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 < value <= 3_600_000:
        raise BadRequest(
            f"X-Request-Timeout-Ms: {given.decode('latin-1')!r} is not a number of milliseconds "
            "from above 0 to 3600000"
        )
    return value


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


async def _respond(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    raw = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
    raw.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
