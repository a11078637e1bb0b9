"""A configuration: one point of the search space, and what changing it costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Value = float | int | str

# An engine that is built for its largest batch needs a restart for that as well.
FIXED_BATCH_ENGINES = frozenset({"cudagraph", "tensorrt"})
# What a running server changes through its admin endpoint; anything else needs a restart.
LIVE_PARAMETERS = frozenset({"batch_window_ms", "max_batch_size", "queue_capacity"})


@dataclass(frozen=True)
class Configuration(Mapping[str, Value]):
    """Named server settings, hashable and in a fixed order, so that equal points are one point."""

    items_: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, settings: Mapping[str, Value]) -> Configuration:
        """The configuration with these settings, whatever their order."""
        return cls(tuple(sorted(settings.items())))

    @classmethod
    def from_json(cls, text: str) -> Configuration:
        return cls.of(json.loads(text))

    def __getitem__(self, key: str) -> Value:
        return dict(self.items_)[key]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.items_)

    def __len__(self) -> int:
        return len(self.items_)

    def __hash__(self) -> int:
        return hash(self.items_)

    def __str__(self) -> str:
        return " ".join(f"{name}={_short(value)}" for name, value in self.items_)

    def number(self, name: str, default: float) -> float:
        """The numeric setting `name`, or the default where the space does not name it."""
        value = self.get(name, default)
        return float(value) if not isinstance(value, str) else default

    def restart_key(self) -> Configuration:
        """The part that only a restart changes: equal keys share one server process."""
        live = self.live()
        return Configuration.of({k: v for k, v in self.items() if k not in live})

    def live(self) -> dict[str, Value]:
        """The part that a running server changes at once."""
        fixed = {"max_batch_size"} if self.get("engine") in FIXED_BATCH_ENGINES else set()
        return {k: v for k, v in self.items() if k in LIVE_PARAMETERS - fixed}

    def to_json(self) -> str:
        return json.dumps(dict(self.items_), sort_keys=True)


def _short(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
