"""Durations: a unit always, exact both ways, one message for each mistake."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.durations import format_s, parse_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("100ms", 0.1), ("0.1s", 0.1), ("1h30m", 5400), ("500us", 5e-4), ("250µs", 2.5e-4),
     ("1.5s", 1.5), ("2d", 172800), ("1m30s", 90), ("10ns", 1e-8)],
)  # fmt: skip
def test_reads_the_grammar_of_go(text: str, seconds: float) -> None:
    """Numbers with units, one after the other."""
    assert parse_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100", "'100' has no unit. Write 100ms or 100s."),
        ("0ms", "not above zero"),
        ("-5ms", "is not a duration"),
        ("10 ms", "is not a duration"),
        ("1h!!30m", "is not a duration"),
        ("2mm", "is not a duration"),
        ("1H", "is not a duration"),
        ("", "is not a duration"),
        ("ms", "is not a duration"),
    ],
)
def test_refuses_the_rest(text: str, message: str) -> None:
    """Nothing is guessed or skipped."""
    with pytest.raises(ValueError, match=message):
        parse_s(text)


@given(st.floats(1e-9, 1e9))
def test_formats_exactly(seconds: float) -> None:
    """Reading what was written gives the same float."""
    assert parse_s(format_s(seconds)) == seconds


@pytest.mark.parametrize(("seconds", "text"), [(0.1, "100ms"), (90.0, "90s"), (3600.0, "1h")])
def test_formats_shortly(seconds: float, text: str) -> None:
    """The largest unit that is exact."""
    assert format_s(seconds) == text
