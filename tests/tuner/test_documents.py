"""JSON without loss."""

from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tuner.documents import dumps, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_round_trip(document: object) -> None:
    """Whatever JSON can hold comes back equal, NaN and infinity included."""
    assert repr(loads(dumps(document))) == repr(document)


@given(VALUES)
def test_strict(document: object) -> None:
    """Every JSON reader can read it: no NaN, no Infinity."""
    constants = list[str]()
    json.loads(dumps(document), parse_constant=constants.append)
    assert constants == []


def test_numpy_scalars() -> None:
    """Numpy's numbers come back as Python's."""
    document = {"n": np.int64(3), "x": np.float32(0.5), "nan": np.float64(math.nan)}
    assert repr(loads(dumps(document))) == "{'n': 3, 'x': 0.5, 'nan': nan}"
