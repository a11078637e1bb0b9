"""The Open Inference Protocol (KServe V2) over HTTP: bodies to tensors and back.

With Triton's binary extension: `Inference-Header-Content-Length` bytes of JSON, then the raw
little-endian tensors in order. Pure; the routes are in `serving.app`.
Specification: https://github.com/kserve/open-inference-protocol, extension:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.errors import BadRequest

EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics")
HEADER_LENGTH = "inference-header-content-length"
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32,
    "UINT64": np.uint64, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32,
    "INT64": np.int64, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip
# A shape is checked against the body's size anyway; this keeps its product a small number.
MOST_ELEMENTS = 1 << 40


class _Output(BaseModel):
    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class _Input(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    data: list[Any] | None = None


class _Request(BaseModel):
    """Unknown keys are ignored, as the specification asks."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    inputs: list[_Input] = Field(min_length=1)
    outputs: list[_Output] | None = None


@dataclass(frozen=True)
class Tensor:
    """A named tensor: a numeric array, or for BYTES a list of byte strings, with its shape."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: NDArray[Any] | list[bytes]


@dataclass(frozen=True)
class InferRequest:
    """A request for inference.

    Args:
        outputs: names asked for with whether they are wanted in binary; None: all of them.
        binary: of outputs that are not named.
    """

    id: str | None
    parameters: Mapping[str, Any]
    inputs: Sequence[Tensor]
    outputs: Mapping[str, bool] | None = None
    binary: bool = False

    @property
    def timeout_s(self) -> float | None:
        """`parameters.timeout`, which is in microseconds; None: none, 0 included as Triton does.

        Raises:
            BadRequest: not a number that is not negative.
        """
        given = self.parameters.get("timeout")
        if given is None:
            return None
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 1e15:
            raise BadRequest(f"parameters.timeout: {given!r} is not a number of microseconds")
        return given / 1e6 or None


@dataclass
class _Binary:
    """What follows the JSON, read from left to right."""

    data: memoryview
    at: int = 0

    def take(self, size: Any, name: str) -> memoryview:
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise BadRequest(f"input {name}: binary_data_size {size!r} is not a size")
        if self.at + size > len(self.data):
            raise BadRequest(f"input {name}: {size} bytes are announced, the body ends before them")
        part = self.data[self.at : self.at + size]
        self.at += size
        return part


def parse(body: bytes, header_length: str | None) -> InferRequest:
    """The request in a body.

    Args:
        header_length: the value of `Inference-Header-Content-Length`; None: all of it is JSON.

    Raises:
        BadRequest: not a request of the protocol; the message names the place.
    """
    cut = _cut(body, header_length)
    try:
        request = _Request.model_validate_json(body[:cut])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise BadRequest(f"{place}: {first['msg'].lower()}") from error
    rest = _Binary(memoryview(body)[cut:])
    inputs = [_tensor(given, rest) for given in request.inputs]
    if rest.at != len(rest.data):
        raise BadRequest(f"{len(rest.data) - rest.at} bytes follow the last input")
    outputs = None
    if request.outputs is not None:
        outputs = {o.name: o.parameters.get("binary_data") is True for o in request.outputs}
    return InferRequest(
        request.id, request.parameters, inputs, outputs,
        binary=request.parameters.get("binary_data_output") is True,
    )  # fmt: skip


def encode(
    model: str, request: InferRequest, outputs: Sequence[Tensor], parameters: Mapping[str, Any]
) -> tuple[bytes, dict[str, str]]:
    """The answer's body and headers.

    Raises:
        BadRequest: an output was asked for that is not one of `outputs`.
    """
    known = {tensor.name for tensor in outputs}
    for name in request.outputs or ():
        if name not in known:
            raise BadRequest(f"outputs: {name} is not one of {', '.join(sorted(known))}")
    wanted = [t for t in outputs if request.outputs is None or t.name in request.outputs]
    binary = {
        t.name: request.binary if request.outputs is None else request.outputs[t.name]
        for t in wanted
    }
    described, raw = list[dict[str, Any]](), list[bytes]()
    for tensor in wanted:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype,
                                 "shape": list(tensor.shape)}  # fmt: skip
        if binary[tensor.name]:
            raw.append(to_bytes(tensor))
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            entry["data"] = _listed(tensor)
        described.append(entry)
    document: dict[str, Any] = {"model_name": model, "model_version": "1", "outputs": described}
    if request.id is not None:
        document["id"] = request.id
    if parameters:
        document["parameters"] = dict(parameters)
    header = json.dumps(document).encode()
    if not raw:
        return header, {"content-type": "application/json"}
    return b"".join((header, *raw)), {
        "content-type": "application/octet-stream",
        HEADER_LENGTH: str(len(header)),
    }


def to_bytes(tensor: Tensor) -> bytes:
    """A tensor as the binary extension has it: little-endian, BYTES with 4 bytes of length each."""
    if isinstance(tensor.data, list):
        return b"".join(struct.pack("<I", len(item)) + item for item in tensor.data)
    return tensor.data.astype(tensor.data.dtype.newbyteorder("<")).tobytes()


def from_bytes(name: str, datatype: str, shape: tuple[int, ...], raw: memoryview) -> Tensor:
    """The inverse of `to_bytes`.

    Raises:
        BadRequest: the size does not fit the shape, or the datatype is unknown.
    """
    count = math.prod(shape)
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, _byte_strings(name, raw, count))
    dtype = np.dtype(_dtype(name, datatype)).newbyteorder("<")
    if len(raw) != count * dtype.itemsize:
        raise BadRequest(
            f"input {name}: {datatype} of shape {list(shape)} is {count * dtype.itemsize} bytes, "
            f"given {len(raw)}"
        )
    return Tensor(name, datatype, shape, np.frombuffer(raw, dtype).reshape(shape))


def _cut(body: bytes, header_length: str | None) -> int:
    if header_length is None:
        return len(body)
    if not (header_length.isascii() and header_length.isdigit()) or len(header_length) > 12:
        raise BadRequest(f"Inference-Header-Content-Length: {header_length!r} is not a length")
    if int(header_length) > len(body):
        raise BadRequest(
            f"Inference-Header-Content-Length: {header_length} is more than the {len(body)} bytes "
            "of the body"
        )
    return int(header_length)


def _tensor(given: _Input, rest: _Binary) -> Tensor:
    shape = tuple(given.shape)
    if any(side < 0 for side in shape) or math.prod(shape) > MOST_ELEMENTS:
        raise BadRequest(f"input {given.name}: {given.shape} is not a shape")
    if "binary_data_size" in given.parameters:
        raw = rest.take(given.parameters["binary_data_size"], given.name)
        return from_bytes(given.name, given.datatype, shape, raw)
    if given.data is None:
        raise BadRequest(f"input {given.name}: neither data nor binary_data_size is given")
    return _from_list(given, shape)


def _from_list(given: _Input, shape: tuple[int, ...]) -> Tensor:
    flat = _flatten(given.data or [])
    if len(flat) != math.prod(shape):
        raise BadRequest(
            f"input {given.name}: shape {given.shape} has {math.prod(shape)} elements, data has "
            f"{len(flat)}"
        )
    if given.datatype == "BYTES":
        if not all(isinstance(item, str) for item in flat):
            raise BadRequest(f"input {given.name}: BYTES in JSON are strings")
        return Tensor(given.name, "BYTES", shape, [item.encode() for item in flat])
    dtype = _dtype(given.name, given.datatype)
    if not all(isinstance(item, bool | int | float) for item in flat):
        raise BadRequest(f"input {given.name}: data holds something that is no number")
    try:
        array = np.array(flat, dtype=dtype)
    except (OverflowError, ValueError) as error:
        raise BadRequest(f"input {given.name}: data does not fit {given.datatype}") from error
    return Tensor(given.name, given.datatype, shape, array.reshape(shape))


def _flatten(data: list[Any]) -> list[Any]:
    """Row-major, nested or not; without recursion, whose depth a client could choose."""
    while any(isinstance(item, list) for item in data):
        data = [inner for item in data for inner in (item if isinstance(item, list) else [item])]
    return data


def _byte_strings(name: str, raw: memoryview, count: int) -> list[bytes]:
    found, at = list[bytes](), 0
    while at < len(raw):
        if at + 4 > len(raw):
            raise BadRequest(f"input {name}: a length is cut off")
        (length,) = struct.unpack_from("<I", raw, at)
        if at + 4 + length > len(raw):
            raise BadRequest(f"input {name}: an element is cut off")
        found.append(bytes(raw[at + 4 : at + 4 + length]))
        at += 4 + length
    if len(found) != count:
        raise BadRequest(f"input {name}: {count} elements are announced, {len(found)} are given")
    return found


def _dtype(name: str, datatype: str) -> Any:
    if datatype not in DTYPES:
        raise BadRequest(f"input {name}: datatype {datatype!r} is not one of the protocol's")
    return DTYPES[datatype]


def _listed(tensor: Tensor) -> list[Any]:
    if isinstance(tensor.data, list):
        return [item.decode(errors="replace") for item in tensor.data]
    flat: list[Any] = tensor.data.ravel().tolist()
    return flat


@dataclass(frozen=True)
class ModelInterface:
    """What this server's model takes and gives, in the protocol's words.

    Args:
        crop: side of the pictures in pixels.
        classes: how many of the best classes an answer holds.
    """

    name: str
    platform: str
    crop: int
    classes: int = 5
    max_batch_size: int = 1
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def metadata(self) -> dict[str, Any]:
        """GET /v2/models/NAME. A request has one of the two inputs."""
        side = self.crop
        return {
            "name": self.name,
            "versions": ["1"],
            "platform": self.platform,
            "inputs": [
                {"name": "image", "datatype": "BYTES", "shape": [-1]},
                {"name": "pixels", "datatype": "UINT8", "shape": [-1, side, side, 3]},
            ],
            "outputs": [
                {"name": "classes", "datatype": "INT64", "shape": [-1, self.classes]},
                {"name": "probabilities", "datatype": "FP32", "shape": [-1, self.classes]},
            ],
        }

    def configuration(self) -> dict[str, Any]:
        """GET /v2/models/NAME/config, in the words of Triton's model configuration."""
        side = self.crop
        return {
            "name": self.name,
            "platform": self.platform,
            "backend": "serving",
            "version_policy": {"latest": {"num_versions": 1}},
            # 0: a request brings its own batch dimension, as in the metadata's shapes.
            "max_batch_size": 0,
            "input": [
                {"name": "image", "data_type": "TYPE_STRING", "dims": [-1], "optional": True},
                {"name": "pixels", "data_type": "TYPE_UINT8", "dims": [-1, side, side, 3],
                 "optional": True},
            ],
            "output": [
                {"name": "classes", "data_type": "TYPE_INT64", "dims": [-1, self.classes]},
                {"name": "probabilities", "data_type": "TYPE_FP32", "dims": [-1, self.classes]},
            ],
            "parameters": {k: {"string_value": str(v)} for k, v in self.parameters.items()},
        }  # fmt: skip


def statistics_of(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """GET /v2/models/NAME/stats from the server's counters; times in nanoseconds."""
    requests = document["requests"]
    answered, failed = requests["answered"], requests["failed"]

    def spent(count: int, seconds: float) -> dict[str, int]:
        return {"count": count, "ns": round(seconds * 1e9)}

    batches = [
        {
            "batch_size": int(size),
            "compute_input": spent(count, 0.0),
            "compute_infer": spent(count, document["compute_seconds_by_size"][size]),
            "compute_output": spent(count, 0.0),
        }
        for size, count in document["batch_sizes"].items()
    ]
    return {
        "model_stats": [
            {
                "name": name,
                "version": "1",
                "last_inference": 0,
                "inference_count": document["pictures"],
                "execution_count": document["batches"],
                "inference_stats": {
                    "success": spent(answered, document["answer_seconds"]),
                    "fail": spent(failed, 0.0),
                    "queue": spent(answered, document["queue_seconds"]),
                    "compute_input": spent(answered, document["preprocess_seconds"]),
                    "compute_infer": spent(answered, document["compute_seconds"]),
                    "compute_output": spent(answered, 0.0),
                },
                "batch_stats": batches,
            }
        ]
    }
