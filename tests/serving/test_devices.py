"""Several devices: executors of their own, and the quicker one gets more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving.statistics import imbalance
from tests.serving.conftest import RunningServer, run_server

pytestmark = pytest.mark.slow

TWO = {"engine": "synthetic", "device": "cpu,cpu", "max_batch_size": 1,
       "synthetic": {"base_ms": 20.0, "per_item_ms": 0.0, "speeds": [1.0, 4.0]}}  # fmt: skip


def flood(server: RunningServer, count: int, at_once: int) -> None:
    with ThreadPoolExecutor(at_once) as pool:
        statuses = [s for s, _ in pool.map(lambda _: server.json("POST", "/predict"), range(count))]
    assert statuses == [200] * count


def test_two_cpu_executors_share_a_real_model(tmp_path: Path, jpeg: bytes) -> None:
    """A process for each device, both at work, alike in their answers."""
    with run_server(tmp_path, {"device": "cpu,cpu", "threads": 1}) as server:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: server.json("POST", "/predict", jpeg), range(24)))
        assert len({tuple(answer["classes"]) for _, answer in answers}) == 1
        document = server.stats()
        assert len({i["pid"] for i in document["instances"]}) == 2
        assert set(document["devices"]) == {"cpu#0", "cpu#1"}
        assert document["imbalance"] < 1


def test_the_quicker_device_gets_more(tmp_path: Path) -> None:
    """Four times the speed: well over half of the requests, at full load."""
    with run_server(tmp_path, TWO) as server:
        flood(server, 60, 6)
        slow, quick = (i["requests"] for i in server.stats()["instances"])
    assert quick > 2 * slow


def test_taking_turns_gives_both_the_same(tmp_path: Path) -> None:
    """The baseline: half of the requests wait for the slow one."""
    with run_server(tmp_path, {**TWO, "dispatch": "round_robin"}) as server:
        flood(server, 60, 6)
        document = server.stats()
        slow, quick = (i["requests"] for i in document["instances"])
    assert abs(quick - slow) <= 1
    assert document["imbalance"] > 0.2


def test_imbalance_is_zero_where_all_are_equal() -> None:
    """And one where one of two does everything."""
    assert imbalance({"a": 2.0, "b": 2.0}) == 0
    assert imbalance({"a": 2.0, "b": 0.0}) == 1
    assert imbalance({}) == 0
