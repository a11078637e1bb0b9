"""Durations as people write them: `100ms`, `1.5s`, `1h30m`. Always with a unit."""

from __future__ import annotations

import re

import click

UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0,
           "d": 86400.0}  # fmt: skip
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h|d)")
_BARE = re.compile(r"[-+]?\d+(?:\.\d+)?")


def parse_s(text: str) -> float:
    """Seconds of a duration in the grammar of Go and Kubernetes, plus days.

    Raises:
        ValueError: not a positive duration; the message says what was given and what is allowed.
    """
    if _BARE.fullmatch(text):
        number = text.lstrip("+-")
        raise ValueError(f"{text!r} has no unit. Write {number}ms or {number}s.")
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(
            f"{text!r} is not a duration. Write a number with a unit (ns, us, ms, s, m, h, d), "
            f"such as 100ms or 1h30m."
        )
    seconds = sum(float(number) * UNITS_S[unit] for number, unit in parts)
    if seconds <= 0:
        raise ValueError(f"{text!r} is not above zero. Write a positive duration, such as 100ms.")
    return seconds


def format_s(seconds: float) -> str:
    """The shortest exact text: `parse_s(format_s(x)) == x` for positive x."""
    for unit in ("d", "h", "m", "s", "ms", "us"):
        count = seconds / UNITS_S[unit]
        if count >= 1 and count == int(count) and int(count) * UNITS_S[unit] == seconds:
            return f"{int(count)}{unit}"
    text = f"{seconds:.30f}".rstrip("0") if seconds < 1 else repr(seconds)
    return f"{text}s"


class DurationType(click.ParamType[float]):
    """A click option that takes a duration and gives seconds."""

    name = "duration"

    def convert(
        self, value: str | float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if not isinstance(value, str):
            return value
        try:
            return parse_s(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
