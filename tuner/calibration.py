"""What the device and the preprocessing take by themselves: S(b), and the time of one image."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median

from tuner.configuration import FIXED_BATCH_ENGINES, Configuration, Value
from tuner.server import Server, ServerError
from tuner.space import Space

# Settings that change what a batch costs. Each combination in a space is calibrated once.
SERVICE_PARAMETERS = ("engine", "precision", "threads")


@dataclass(frozen=True)
class ServiceTime:
    """Seconds of one batch by size, measured while `instances` executors ran the same size."""

    instances: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, batch: float) -> float:
        """S(batch) in seconds: linear between measured sizes, the last slope beyond them."""
        if len(self.sizes) == 1:
            return self.seconds[0] * max(batch / self.sizes[0], 1.0)
        right = min(max(bisect_left(self.sizes, batch), 1), len(self.sizes) - 1)
        (b0, b1), (s0, s1) = self.sizes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return max(s0 + (s1 - s0) * (batch - b0) / (b1 - b0), min(self.seconds))

    @property
    def best_rate_rps(self) -> float:
        """The most requests/s of all instances together at any measured size: max k b / S(b)."""
        return max(self.instances * b / s for b, s in zip(self.sizes, self.seconds, strict=True))


@dataclass(frozen=True)
class Calibration:
    """S(b) by service settings and number of active instances; seconds of preprocessing by kind.

    `overhead_s` is what a lone request takes beyond its preprocessing and its batch of one;
    `refused` says by service settings why they cannot run.
    """

    service: Mapping[Configuration, tuple[ServiceTime, ...]]
    preprocess_s: Mapping[str, float]
    overhead_s: float
    refused: Mapping[Configuration, str] = field(default_factory=dict)

    @property
    def ceiling_rps(self) -> float:
        """The most requests/s the device can do on this model with no server around it."""
        return max(t.best_rate_rps for times in self.service.values() for t in times)

    def service_time(self, configuration: Mapping[str, Value], active: int) -> ServiceTime:
        """S(b) of this configuration while `active` instances run (nearest calibrated number)."""
        times = self.service[service_key(configuration)]
        return min(times, key=lambda t: abs(t.instances - active))

    def preprocessing_s(self, configuration: Mapping[str, Value]) -> float:
        """Seconds of one worker for one image."""
        return self.preprocess_s[str(configuration["preprocessing"])]

    def to_document(self) -> dict[str, object]:
        """A JSON-ready form; `from_document` restores it."""
        return {
            "service": [
                {"settings": dict(key), "instances": t.instances,
                 "sizes": list(t.sizes), "seconds": list(t.seconds)}
                for key, times in self.service.items() for t in times
            ],
            "preprocess_s": dict(self.preprocess_s),
            "overhead_s": self.overhead_s,
            "refused": [
                {"settings": dict(key), "reason": reason} for key, reason in self.refused.items()
            ],
        }  # fmt: skip

    @classmethod
    def from_document(cls, document: Mapping[str, object]) -> Calibration:
        rows = document["service"]
        assert isinstance(rows, Sequence)
        service: dict[Configuration, tuple[ServiceTime, ...]] = {}
        for row in rows:
            key = Configuration.of(row["settings"])
            time = ServiceTime(row["instances"], tuple(row["sizes"]), tuple(row["seconds"]))
            service[key] = (*service.get(key, ()), time)
        preprocess, overhead = document["preprocess_s"], document["overhead_s"]
        assert isinstance(preprocess, Mapping)
        assert isinstance(overhead, float)
        rows = document["refused"]
        assert isinstance(rows, Sequence)
        refused = {Configuration.of(row["settings"]): row["reason"] for row in rows}
        return cls(service, dict(preprocess), overhead, refused)


def service_key(configuration: Mapping[str, Value]) -> Configuration:
    """The settings of a full configuration that decide S(b)."""
    return Configuration.of({k: configuration[k] for k in SERVICE_PARAMETERS if k in configuration})


# Batch sizes probed: powers of two up to the largest in the space, and no further than a batch
# that fills the budget by itself.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REPEATS = 5
# Lone requests whose mean gives the preprocessing time and the overhead, after a few that pay for
# what is loaded and allocated once.
LONE_REQUESTS = 24
WARM_REQUESTS = 6


def variants_of(space: Space, defaults: Mapping[str, Value]) -> list[Configuration]:
    """The server starts a calibration needs: each engine, precision, thread count and
    preprocessing of the space once, with as many instances as the space allows."""
    names = [n for n in ("engine", "precision", "threads", "preprocessing") if n in defaults]
    choices = [space.values(name) or (defaults[name],) for name in names]
    instances = max(space.values("instances") or (defaults["instances"],))
    largest = max(space.values("max_batch_size") or (defaults["max_batch_size"],))
    variants = list[Configuration]()
    for values in product(*choices):
        chosen = {**defaults, **dict(zip(names, values, strict=True)), "instances": instances}
        if chosen.get("engine") in FIXED_BATCH_ENGINES:  # no larger batch could be timed
            chosen["max_batch_size"] = largest
        variants.append(Configuration.of(chosen))
    return variants


def calibrate(
    server: Server,
    variants: Iterable[Configuration],
    *,
    images: Sequence[bytes],
    largest: int,
    budget_s: float,
    obstacle: Callable[[Configuration], str | None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure S(b) in the server's own executors, and lone requests end to end.

    Args:
        images: real payloads for the lone requests.
        largest: the largest batch size worth probing.
        budget_s: a batch that takes longer than this is the last one probed.
        obstacle: why a variant is known not to run, so that it is not started.

    Raises:
        ServerError: none of the variants could be calibrated; one that cannot run is `refused`.
    """
    service: dict[Configuration, tuple[ServiceTime, ...]] = {}
    preprocess_s: dict[str, float] = {}
    overheads_s: list[float] = []
    refused: dict[Configuration, str] = {}
    failure: ServerError | None = None
    for variant in variants:
        key = service_key(variant)
        if (reason := obstacle(variant)) is not None:
            refused[key] = reason
            continue
        say(f"calibrating {key} {variant['preprocessing']}")
        try:
            server.obtain(variant)
        except ServerError as error:
            failure = error
            refused.setdefault(key, error.reason)
            continue
        if key not in service:
            service[key] = tuple(
                _service_time(server, active, largest, budget_s)
                for active in range(1, int(variant.number("instances", 1)) + 1)
            )
        one_image_s, lone_s = _lone_request(server, images)
        preprocess_s.setdefault(str(variant["preprocessing"]), one_image_s)
        overheads_s.append(lone_s - one_image_s - service[key][0].of(1))
    if not service:
        raise failure or ServerError(next(iter(refused.values()), "nothing to calibrate"))
    refused = {key: reason for key, reason in refused.items() if key not in service}
    return Calibration(service, preprocess_s, max(min(overheads_s), 0.0), refused)


def _service_time(server: Server, active: int, largest: int, budget_s: float) -> ServiceTime:
    sizes, seconds = list[int](), list[float]()
    for size in (s for s in SIZES if s <= largest):
        samples = server.calibrate(size, repeats=REPEATS, instances=active)
        sizes.append(size)
        seconds.append(median(samples))
        if seconds[-1] > budget_s:
            break
    return ServiceTime(active, tuple(sizes), tuple(seconds))


def _lone_request(server: Server, images: Sequence[bytes]) -> tuple[float, float]:
    """Median seconds of preprocessing and of a whole request, window excluded, sent one by one."""
    for image in images[:WARM_REQUESTS]:
        server.predict(image)
    before, taken_s = server.snapshot(), list[float]()
    for i in range(LONE_REQUESTS):
        began = time.perf_counter()
        server.predict(images[i % len(images)])
        taken_s.append(time.perf_counter() - began)
    work = server.work_since(before)
    waited_s = work.queue_s / work.answered
    return work.preprocess_s / work.answered, median(taken_s) - waited_s
