"""The search space: what may vary, and within which bounds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tuner.configuration import Value
from tuner.data import closest, load_yaml, plain, resolve, where
from tuner.errors import UsageError


@dataclass(frozen=True)
class IntRange:
    """Every whole number from low to high; `log` makes small ones as likely as large ones."""

    low: int
    high: int
    log: bool = False


@dataclass(frozen=True)
class FloatRange:
    """Numbers from low to high, in steps from low or continuous."""

    low: float
    high: float
    step: float | None = None
    log: bool = False


@dataclass(frozen=True)
class Choice:
    """One of these values."""

    values: tuple[Value, ...]


Parameter = IntRange | FloatRange | Choice
Point = dict[str, Value]


@dataclass(frozen=True)
class Numeric:
    """Hard bounds of a numeric server setting."""

    kind: type[int | float]
    low: float
    high: float


# The server's settings that may vary: numeric ones with the server's own bounds, the others with
# their words.
KNOWN: dict[str, Numeric | tuple[str, ...]] = {
    "batch_window_ms": Numeric(float, 0, 10_000),
    "max_batch_size": Numeric(int, 1, 1024),
    "workers": Numeric(int, 1, 256),
    "instances": Numeric(int, 1, 256),
    "threads": Numeric(int, 1, 256),
    "queue_capacity": Numeric(int, 1, 100_000),
    "precision": ("fp32", "tf32", "fp16", "bf16"),
    "preprocessing": ("torchvision", "pil", "dali", "model"),
    "engine": ("eager", "compile", "cudagraph", "tensorrt", "onnxruntime", "synthetic"),
}


@dataclass(frozen=True)
class Space:
    """Named parameters, in the order of the file."""

    name: str
    parameters: Mapping[str, Parameter]

    @classmethod
    def load(cls, name: str, *, cores: int) -> Space:
        """Read a space by path or shipped name.

        Args:
            cores: what the word `cores` stands for in the file.

        Raises:
            UsageError: not a space; the message names file and line.
        """
        source = resolve("search_spaces", "--space", name)
        document = load_yaml(source)
        for key in document:
            if key not in ("name", "parameters"):
                raise UsageError(
                    f"{where(source, document, key)}: {key} is not a key of a search space.",
                    hint="Allowed are: name, parameters.",
                )
        given = document.get("parameters")
        if not isinstance(given, dict) or not given:
            raise UsageError(f"{source}: no parameters.", hint="Name at least one to vary.")
        parameters = {
            str(key): _parameter(str(key), value, cores, where(source, given, key))
            for key, value in given.items()
        }
        default = Path(str(source)).stem
        return cls(str(document.get("name", default)), parameters)

    def values(self, name: str) -> tuple[Value, ...]:
        """A parameter's values in order; empty where it is continuous or not in the space."""
        match self.parameters.get(name):
            case Choice(values=values):
                return values
            case IntRange(low=low, high=high):
                return tuple(range(low, high + 1))
            case FloatRange(low=low, high=high, step=float(step)):
                count = math.floor((high - low) / step + 1e-9) + 1
                return tuple(round(low + i * step, 9) for i in range(count))
        return ()

    def size(self) -> int | None:
        """How many points there are; None if some range is continuous."""
        counts = [len(self.values(name)) for name in self.parameters]
        return None if 0 in counts else math.prod(counts)

    def grid(self) -> Iterator[Point]:
        """Every point of a finite space."""
        names = list(self.parameters)
        for values in product(*(self.values(name) for name in names)):
            yield dict(zip(names, values, strict=True))

    def sample(self, rng: random.Random) -> Point:
        """A point at random."""
        return {name: self._draw(name, rng) for name in self.parameters}

    def contains(self, point: Mapping[str, Value]) -> bool:
        """Whether every parameter has a value of this space."""
        return all(
            name in point and _inside(parameter, point[name], self.values(name))
            for name, parameter in self.parameters.items()
        )

    def nearest(self, point: Mapping[str, Value]) -> Point:
        """The closest point of the space; what the given one does not name takes the lowest."""
        return {name: self._snap(name, point.get(name)) for name in self.parameters}

    def restricted(
        self, offered: Mapping[str, Mapping[str, str | None]]
    ) -> tuple[Space, tuple[str, ...]]:
        """Without what the device cannot do, and a note for each value left out.

        Args:
            offered: for each parameter the known values; None, or why it cannot be done.

        Raises:
            UsageError: a parameter has no value left.
        """
        kept, notes = dict(self.parameters), list[str]()
        for name, reasons in offered.items():
            values = self.values(name)
            good = tuple(v for v in values if reasons.get(str(v), "not offered") is None)
            if good == values:
                continue
            notes += [f"{name} {v}: {reasons.get(str(v)) or 'this server does not offer it'}"
                      for v in values if v not in good]  # fmt: skip
            if not good:
                raise UsageError(
                    f"--space: {self.name}: nothing is left of {name}: {'; '.join(notes)}.",
                    hint="Add a value that this device can do.",
                )
            kept[name] = Choice(good)
        return replace(self, parameters=kept), tuple(notes)

    def capped(self, name: str, high: int) -> Space:
        """Without values of a numeric parameter above `high`."""
        values = tuple(v for v in self.values(name) if not isinstance(v, str) and v <= high)
        return replace(self, parameters={**self.parameters, name: Choice(values or (high,))})

    def describe(self) -> dict[str, Any]:
        """A JSON-ready form: equal spaces have equal descriptions."""
        return {
            name: {type(p).__name__: [list(v) if isinstance(v, tuple) else v
                                      for v in vars(p).values()]}
            for name, p in self.parameters.items()
        }  # fmt: skip

    def _draw(self, name: str, rng: random.Random) -> Value:
        if values := self.values(name):
            return rng.choice(values)
        parameter = self.parameters[name]
        assert isinstance(parameter, FloatRange)
        if parameter.log:
            return math.exp(rng.uniform(math.log(parameter.low), math.log(parameter.high)))
        return rng.uniform(parameter.low, parameter.high)

    def _snap(self, name: str, value: Value | None) -> Value:
        parameter, values = self.parameters[name], self.values(name)
        if isinstance(value, int | float):
            if isinstance(parameter, FloatRange) and parameter.step is None:
                return min(max(float(value), parameter.low), parameter.high)
            numbers = [v for v in values if not isinstance(v, str)]
            if numbers:
                return min(numbers, key=lambda v: abs(v - value))
        if value in values:
            return value
        return values[0] if values else parameter.low  # type: ignore[union-attr]


class _Range(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    low: float | int
    high: float | int
    step: Annotated[float | int, Field(gt=0)] | None = None
    log: bool = False


class _Values(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    values: list[int | float | str] = Field(min_length=1)


def _parameter(name: str, given: Any, cores: int, place: str) -> Parameter:
    if name not in KNOWN:
        raise UsageError(
            f"{place}: {name} is not a parameter of this server.", hint=closest(name, list(KNOWN))
        )
    written = {k: cores if v == "cores" else plain(v) for k, v in given.items()} if isinstance(
        given, dict) else given  # fmt: skip
    try:
        listed = isinstance(written, dict) and "values" in written
        shape = (_Values if listed else _Range).model_validate(written)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"{place}: {name}: {first['msg'].lower()}, given {plain(given)!r}.",
            hint="Write {low: ..., high: ...} with an optional step or log, or {values: [...]}.",
        ) from error
    known = KNOWN[name]
    if isinstance(shape, _Values):
        return _choice(name, shape.values, known, place)
    if not isinstance(known, Numeric):
        raise UsageError(
            f"{place}: {name} is a word, not a range.", hint=f"Write values out of {list(known)}."
        )
    return _range(name, shape, known, place)


def _choice(
    name: str, values: list[Any], known: Numeric | tuple[str, ...], place: str
) -> Parameter:
    for value in values:
        if isinstance(known, Numeric):
            _check_bound(name, value, known, place)
        elif value not in known:
            raise UsageError(
                f"{place}: {name}: {value!r} is unknown.", hint=closest(str(value), list(known))
            )
    if len(set(values)) < len(values):
        raise UsageError(f"{place}: {name}: a value is given twice.", hint="Leave one out.")
    kind = known.kind if isinstance(known, Numeric) else str
    return Choice(tuple(kind(v) for v in values))


def _range(name: str, given: _Range, known: Numeric, place: str) -> Parameter:
    if given.low > given.high:
        raise UsageError(
            f"{place}: {name}: low {given.low:g} is above high {given.high:g}.",
            hint="Swap them or mend one.",
        )
    for bound in (given.low, given.high):
        _check_bound(name, bound, known, place)
    if given.log and given.low <= 0:
        raise UsageError(f"{place}: {name}: log needs a low above 0.", hint="Raise low.")
    if known.kind is int:
        if given.step not in (None, 1):
            raise UsageError(
                f"{place}: {name}: whole numbers have no step.", hint="Write values instead."
            )
        return IntRange(int(given.low), int(given.high), given.log)
    step = None if given.step is None else float(given.step)
    return FloatRange(float(given.low), float(given.high), step, given.log)


def _check_bound(name: str, value: Any, known: Numeric, place: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not known.low <= value <= known.high or value != known.kind(value):
        kind = "a whole number" if known.kind is int else "a number"
        raise UsageError(
            f"{place}: {name}: {value!r} is not {kind} from {known.low:g} to {known.high:g}.",
            hint="Mend the value.",
        )


def _inside(parameter: Parameter, value: Value, values: tuple[Value, ...]) -> bool:
    if values:
        return value in values
    assert isinstance(parameter, FloatRange)
    return isinstance(value, int | float) and parameter.low <= value <= parameter.high
