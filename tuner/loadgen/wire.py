"""What the tuner and the load generator say to each other: JSON lines, samples as packed rows.

The tuner writes one `Phase` a line, or `{"stop": id}`; the generator answers with events: `hello`,
`started`, `progress` about five times a second, `result`. Neither gevent nor Locust is imported
here, so that both sides can.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 1
PROGRESS_S = 0.2

# One finished request: its place in the schedule, when it was sent and answered (ns since the start
# of the phase), and its HTTP status or a `Fault`.
ROW = np.dtype([("index", "<u4"), ("sent", "<i8"), ("done", "<i8"), ("status", "<i2")])
Rows = NDArray[np.void]


class Fault(IntEnum):
    """Why a request has no HTTP status. Every one of them counts as late."""

    PENDING = 0
    CONNECTION = -1
    TIMEOUT = -2
    UNANSWERED = -3  # still open when the drain after the phase ended
    NOT_SENT = -4  # too many requests were in flight already


@dataclass(frozen=True)
class Phase:
    """One phase of load, as sent to the generator.

    Args:
        timeout_s: of a whole request, counted from its intended send time.
        drain_s: how long after the last arrival answers are waited for.
        in_flight_cap: arrivals beyond this many open requests are not sent, and counted late.
    """

    id: int
    url: str
    rate_rps: float
    arrivals: str
    seed: int
    duration_s: float
    timeout_s: float
    drain_s: float
    in_flight_cap: int
    payloads: tuple[str, ...]

    def to_line(self) -> bytes:
        return json.dumps({"v": VERSION, "phase": asdict(self)}).encode() + b"\n"

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Phase:
        if document.get("v") != VERSION:
            raise ValueError(f"protocol version {document.get('v')}, this side speaks {VERSION}")
        fields = document["phase"]
        return cls(**{**fields, "payloads": tuple(fields["payloads"])})


def stop_line(phase: int) -> bytes:
    """Tells the generator to send nothing more of this phase and to drain."""
    return json.dumps({"stop": phase}).encode() + b"\n"


def pack(rows: list[tuple[int, int, int, int]]) -> str:
    return base64.b64encode(np.array(rows, dtype=ROW).tobytes()).decode()


def unpack(text: str) -> Rows:
    return np.frombuffer(base64.b64decode(text), dtype=ROW)
