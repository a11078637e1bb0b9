"""Deadlines: what cannot be answered in time, or has no reader any more, is not computed."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving.admission import Pace
from tests.serving.conftest import run_server


def paced(preprocess_s: float, batch_s: float, size: int) -> Pace:
    pace = Pace()
    pace.preprocessed(preprocess_s)
    pace.batch_done(size, batch_s)
    return pace


def test_an_empty_server_takes_its_own_time() -> None:
    """Decoding and one batch."""
    assert paced(0.002, 0.010, 1).answer_in_s(0, 0, 1, 1) == pytest.approx(0.012)


def test_the_slower_stage_sets_the_wait() -> None:
    """Twenty pictures ahead at 5 ms each, or at 2 ms of decoding by one worker."""
    pace = paced(0.002, 0.040, 8)
    assert pace.answer_in_s(0, 20, 1, 1) == pytest.approx(20 * 0.005 + 0.042)
    assert pace.answer_in_s(60, 20, 1, 1) == pytest.approx(60 * 0.002 + 0.042)


def test_workers_and_places_share_the_queue() -> None:
    """Twice as many halve the wait."""
    pace = paced(0.002, 0.040, 8)
    one, two = (pace.answer_in_s(40, 40, n, n) - 0.042 for n in (1, 2))
    assert two == pytest.approx(one / 2)


def test_a_request_is_taken_with_a_margin() -> None:
    """An answer expected in the last moment would often be late."""
    assert Pace().makes_it(0.1, 0.05)
    assert not Pace().makes_it(0.1, 0.095)


SLOW = {"engine": "synthetic", "synthetic": {"base_ms": 100.0, "per_item_ms": 0.0},
        "max_batch_size": 1, "queue_capacity": 100}  # fmt: skip


@pytest.mark.slow
class TestServer:
    def test_a_passed_deadline_is_503_and_not_computed(self, tmp_path: Path) -> None:
        """Ten at once with time for three: some are answered, in time; the rest is refused."""
        with run_server(tmp_path, SLOW) as server:
            for _ in range(3):
                server.json("POST", "/predict")
            header = {"X-Request-Timeout-Ms": "350"}

            def ask(_: int) -> tuple[int, float]:
                began_s = time.monotonic()
                return server.request("POST", "/predict", b"", header)[0], (
                    time.monotonic() - began_s
                )

            with ThreadPoolExecutor(10) as pool:
                answers = list(pool.map(ask, range(10)))
            statuses = [status for status, _ in answers]
            assert set(statuses) == {200, 503}
            assert statuses.count(200) <= 4
            document = server.stats()
            assert document["requests"]["expired"] == statuses.count(503)
            assert document["pictures"] == 3 + statuses.count(200)

    @pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "1e99"])
    def test_a_deadline_that_is_none_is_400(self, tmp_path: Path, value: str) -> None:
        """The message names the header and the bounds."""
        with run_server(tmp_path, SLOW) as server:
            status, _, answer = server.request(
                "POST", "/predict", b"", {"X-Request-Timeout-Ms": value}
            )
        assert status == 400
        assert b"X-Request-Timeout-Ms" in answer

    def test_a_client_that_leaves_is_not_computed(self, tmp_path: Path) -> None:
        """Its place in the queue goes to the next one."""
        with run_server(tmp_path, SLOW) as server:
            links = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(6)]
            for link in links:
                link.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            time.sleep(0.05)
            for link in links:
                link.close()
            assert server.json("POST", "/predict")[0] == 200
            document = server.stats()
            assert document["requests"]["cancelled"] >= 3
            assert document["requests"]["cancelled"] + document["pictures"] == 7

    def test_the_servers_own_deadline_is_the_default(self, tmp_path: Path) -> None:
        """Requests that name none get the setting's."""
        with run_server(tmp_path, {**SLOW, "deadline_ms": 150.0}) as server:
            with ThreadPoolExecutor(5) as pool:
                statuses = [
                    s for s, _ in pool.map(lambda _: server.json("POST", "/predict"), range(5))
                ]
            assert 503 in statuses
            assert 200 in statuses
