"""Prometheus text from the server's counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = {
    "queue_seconds": "Time of requests between preprocessing and dispatch",
    "preprocess_seconds": "Time of preprocessing workers",
    "compute_seconds": "Time of executors inside the model, summed over instances",
    "busy_seconds": "Time in which at least one executor was inside the model",
}


COUNTS = {
    "padding": "Pictures computed for nobody, to fill a captured batch size",
    "uncaptured_batches": "Batches refused because no CUDA graph has their size",
}
GAUGES = {
    "queue_depth": "Pictures waiting for an executor",
    "in_flight": "Pictures admitted and batches at work",
    "imbalance": "(most - mean) / mean of the devices' busy seconds",
}


class _Snapshot(Collector):
    """One snapshot of the counters as metric families."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("serving_requests", "Requests", labels=["outcome"])
        for outcome, count in self._document["requests"].items():
            requests.add_metric([outcome], count)
        yield requests
        batches = CounterMetricFamily("serving_batches", "Batches by size", labels=["size"])
        for size, count in self._document["batch_sizes"].items():
            batches.add_metric([size], count)
        yield batches
        for name, help_ in (*SECONDS.items(), *COUNTS.items()):
            yield CounterMetricFamily(f"serving_{name}", help_, value=self._document[name])
        for name, help_ in GAUGES.items():
            yield GaugeMetricFamily(f"serving_{name}", help_, value=self._document[name])
        yield from triton_families(self._document)


def triton_families(document: dict[str, Any]) -> Iterator[Metric]:
    """The same counters under the names that Triton gives them, for dashboards made for it.

    They lack Prometheus' `_total`, so they are made by hand; durations are in microseconds, summed
    over requests. Mean batch = nv_inference_count / nv_inference_exec_count.
    """
    requests = document["requests"]
    failed = requests["failed"] + requests["bad_request"]
    refused = requests["rejected"] + requests["expired"]
    values = {
        "nv_inference_request_success": requests["answered"],
        "nv_inference_count": document["pictures"],
        "nv_inference_exec_count": document["batches"],
        "nv_inference_request_duration_us": 1e6 * document["answer_seconds"],
        "nv_inference_queue_duration_us": 1e6 * document["queue_seconds"],
        "nv_inference_compute_input_duration_us": 1e6 * document["preprocess_seconds"],
        "nv_inference_compute_infer_duration_us": 1e6 * document["compute_seconds"],
        "nv_inference_compute_output_duration_us": 0,
    }
    labels = {"model": document["model"], "version": "1"}
    for name, value in values.items():
        family = Metric(name, "As Triton counts it", "counter")
        family.add_sample(name, labels, value)
        yield family
    failures = Metric("nv_inference_request_failure", "By reason", "counter")
    for reason, value in (("OTHER", failed), ("REJECTED", refused),
                          ("CANCELED", requests["cancelled"])):  # fmt: skip
        failures.add_sample(failures.name, {**labels, "reason": reason}, value)
    yield failures
    pending = Metric("nv_inference_pending_request_count", "Not yet dispatched", "gauge")
    pending.add_sample(pending.name, labels, document["queue_depth"])
    yield pending


def exposition(document: dict[str, Any]) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(document))
    return generate_latest(registry)
