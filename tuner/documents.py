"""JSON as the database keeps it: strict for every reader, without losing NaN and infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

_MARK = "float"


def dumps(document: Any) -> str:
    """Strict JSON; NaN and the infinities, which it lacks, become `{"float": "nan"}`."""
    return json.dumps(_wrapped(document), allow_nan=False)


def loads(text: str | bytes) -> Any:
    """What `dumps` was given, with tuples as lists and numpy scalars as Python's."""
    return json.loads(text, object_hook=_unwrapped)


def _wrapped(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {_MARK: repr(value)}
    if isinstance(value, Mapping):
        return {key: _wrapped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_wrapped(item) for item in value]
    return value


def _unwrapped(document: dict[str, Any]) -> Any:
    if document.keys() == {_MARK} and document[_MARK] in ("nan", "inf", "-inf"):
        return float(document[_MARK])
    return document
