"""Prometheus text from the server's counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

SECONDS = {
    "queue_seconds": "Time of requests between preprocessing and dispatch",
    "preprocess_seconds": "Time of preprocessing workers",
    "compute_seconds": "Time of executors inside the model, summed over instances",
    "busy_seconds": "Time in which at least one executor was inside the model",
}


class _Snapshot(Collector):
    """One snapshot of the counters as metric families."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        requests = CounterMetricFamily("serving_requests", "Requests", labels=["outcome"])
        for outcome, count in self._document["requests"].items():
            requests.add_metric([outcome], count)
        yield requests
        batches = CounterMetricFamily("serving_batches", "Batches by size", labels=["size"])
        for size, count in self._document["batch_sizes"].items():
            batches.add_metric([size], count)
        yield batches
        for name, help_ in SECONDS.items():
            yield CounterMetricFamily(f"serving_{name}", help_, value=self._document[name])
        for name in ("queue_depth", "in_flight"):
            yield GaugeMetricFamily(f"serving_{name}", name, value=self._document[name])


def exposition(document: dict[str, Any]) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(document))
    return generate_latest(registry)
