"""The server as a process: what a client, an operator and a supervisor see."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.serving.conftest import RunningServer, encoded, photo, run_server

pytestmark = pytest.mark.slow

SLOW = {"engine": "synthetic", "synthetic": {"base_ms": 200.0, "per_item_ms": 0.0},
        "batch_window_ms": 0.0, "max_batch_size": 2, "preprocessing": "pil"}  # fmt: skip
QUICK = {**SLOW, "synthetic": {"base_ms": 2.0, "per_item_ms": 1.0}, "max_batch_size": 8}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A synthetic server of a few milliseconds a batch, for tests that leave it as it was."""
    with run_server(tmp_path_factory.mktemp("quick"), {**QUICK, "max_body_bytes": 200_000}) as it:
        yield it


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A real model on the CPU."""
    settings = {"device": "cpu", "workers": 2, "instances": 2, "max_batch_size": 4}
    with run_server(tmp_path_factory.mktemp("real"), settings) as it:
        yield it


def at_once(count: int, call: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


class TestRealEngine:
    def test_answers_a_photograph(self, real: RunningServer, jpeg: bytes) -> None:
        """Five different classes, probabilities falling and below one."""
        status, answer = real.json("POST", "/predict", jpeg)
        assert status == 200
        assert len(set(answer["classes"])) == 5
        assert answer["probabilities"] == sorted(answer["probabilities"], reverse=True)
        assert 0 < sum(answer["probabilities"]) < 1
        assert "synthetic" not in answer

    def test_instances_and_batches_answer_alike(self, real: RunningServer, jpeg: bytes) -> None:
        """The same picture gets the same class alone, in a batch, and from either instance."""
        answers = at_once(12, lambda _: real.json("POST", "/predict", jpeg)[1]["classes"][0])
        assert len(set(answers)) == 1
        assert all(i["batches"] > 0 for i in real.stats()["instances"])

    def test_a_bad_image_harms_no_batch_mate(self, real: RunningServer, jpeg: bytes) -> None:
        """Garbage and a truncated file are 400 for their senders; everybody else is answered."""
        bodies = [jpeg, b"garbage", jpeg, jpeg[:3000], jpeg, jpeg]
        statuses = at_once(len(bodies), lambda i: real.json("POST", "/predict", bodies[i])[0])
        assert statuses == [200, 400, 200, 400, 200, 200]

    def test_counts_what_it_did(self, real: RunningServer, jpeg: bytes) -> None:
        """Requests, batches, and every stage's time move with the traffic."""
        before = real.stats()
        at_once(8, lambda _: real.json("POST", "/predict", jpeg))
        after = real.stats()
        assert after["requests"]["answered"] - before["requests"]["answered"] == 8
        sizes = {int(s): n - before["batch_sizes"].get(s, 0)
                 for s, n in after["batch_sizes"].items()}  # fmt: skip
        assert sum(size * n for size, n in sizes.items()) == 8
        for name in ("preprocess_seconds", "compute_seconds", "busy_seconds"):
            assert after[name] > before[name]
        assert after["busy_seconds"] <= after["compute_seconds"] + 1e-6

    def test_calibration_times_every_size(self, real: RunningServer) -> None:
        """A sample for each repeat of each active instance; larger batches take longer."""
        asked = {"batch_sizes": [1, 16], "repeats": 3, "instances": 2}
        status, answer = real.admin("POST", "/admin/calibrate", asked)
        assert status == 200
        times = answer["service_s"]
        assert {size: len(samples) for size, samples in times.items()} == {"1": 6, "16": 6}
        assert min(times["16"]) > min(times["1"])


class TestProtocol:
    def test_health(self, quick: RunningServer) -> None:
        """Live and ready once it is."""
        assert quick.json("GET", "/health/live") == (200, {"live": True})
        assert quick.json("GET", "/health/ready") == (200, {"ready": True})

    def test_a_synthetic_server_says_so(self, quick: RunningServer, jpeg: bytes) -> None:
        """In every answer and in its statistics."""
        assert quick.json("POST", "/predict", jpeg)[1]["synthetic"] is True
        assert quick.stats()["synthetic"] is True

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [("GET", "/nowhere", 404), ("GET", "/predict", 405), ("POST", "/stats", 405)],
    )
    def test_every_error_is_json(
        self, quick: RunningServer, method: str, path: str, status: int
    ) -> None:
        """`{"error": text}` on every path."""
        got, answer = quick.json(method, path)
        assert got == status
        assert isinstance(answer["error"], str)

    def test_a_body_above_the_bound_is_413(self, quick: RunningServer) -> None:
        """Refused by its length, and the server goes on."""
        status, answer = quick.json("POST", "/predict", b"x" * 200_001)
        assert (status, "200000 bytes" in answer["error"]) == (413, True)
        assert quick.json("GET", "/health/ready")[0] == 200

    def test_too_many_pixels_are_413(self, quick: RunningServer) -> None:
        """A small file that would decode to 400 megapixels."""
        bomb = encoded(photo(8, 8).convert("1").resize((20_000, 20_000)), "PNG")
        status, answer = quick.json("POST", "/predict", bomb)
        assert (status, "pixels" in answer["error"]) == (413, True)

    def test_metrics_are_prometheus_text(self, quick: RunningServer, jpeg: bytes) -> None:
        """Counters by outcome and by batch size."""
        quick.json("POST", "/predict", jpeg)
        _, headers, body = quick.request("GET", "/metrics")
        assert headers["content-type"].startswith("text/plain")
        assert b'serving_requests_total{outcome="answered"}' in body
        assert b'serving_batches_total{size="1"}' in body


class TestAdmin:
    def test_changes_without_a_restart(self, tmp_path: Path, jpeg: bytes) -> None:
        """A new maximum counts for the next batches of the same processes."""
        with run_server(tmp_path, {**QUICK, "max_batch_size": 1}) as server:
            pids = [i["pid"] for i in server.stats()["instances"]]
            status, effective = server.admin(
                "PATCH", "/admin/config", {"max_batch_size": 8, "batch_window_ms": 100}
            )
            assert (status, effective["max_batch_size"]) == (200, 8)
            at_once(8, lambda _: server.json("POST", "/predict", jpeg))
            assert max(map(int, server.stats()["batch_sizes"])) > 1
            assert server.json("GET", "/config")[1]["batch_window_ms"] == 100
            assert [i["pid"] for i in server.stats()["instances"]] == pids

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"workers": 2}, "workers cannot change on a running server"),
            ({"max_batch_size": 0}, "greater than or equal to 1"),
            ({"max_batch": 4}, "max_batch cannot change"),
            ([1], "not a JSON object"),
        ],
    )
    def test_refuses_what_it_cannot_change(
        self, quick: RunningServer, change: object, message: str
    ) -> None:
        """400, with what can."""
        status, answer = quick.admin("PATCH", "/admin/config", change)
        assert status == 400
        assert message in answer["error"]

    @pytest.mark.parametrize("token", ["", "Bearer wrong", "Bearer test-token2", "test-tokem"])
    def test_needs_the_token(self, quick: RunningServer, token: str) -> None:
        """401 without the right one, and nothing changes."""
        status, _, _ = quick.request(
            "PATCH", "/admin/config", b'{"max_batch_size": 1}', {"Authorization": token}
        )
        assert status == 401
        assert quick.json("GET", "/config")[1]["max_batch_size"] == 8

    def test_a_size_that_cannot_be_timed_is_400(self, quick: RunningServer) -> None:
        """Bounds are named."""
        status, answer = quick.admin("POST", "/admin/calibrate", {"batch_sizes": [0]})
        assert (status, "batch_sizes.0" in answer["error"]) == (400, True)


class TestOverload:
    def test_a_full_queue_refuses_with_retry_after(self, tmp_path: Path, jpeg: bytes) -> None:
        """Beyond the bound requests are 503 at once; the admitted ones are answered."""
        with run_server(tmp_path, {**SLOW, "queue_capacity": 2}) as server:
            answers = at_once(12, lambda _: server.request("POST", "/predict", jpeg))
            refused = [a for a in answers if isinstance(a, tuple) and a[0] == 503]
            served = [a for a in answers if isinstance(a, tuple) and a[0] == 200]
            assert len(refused) + len(served) == 12
            assert len(served) >= 2
            assert refused
            assert all("retry-after" in headers for _, headers, _ in refused)
            assert server.stats()["requests"]["rejected"] == len(refused)


class TestLife:
    def test_drains_on_sigterm(self, tmp_path: Path, jpeg: bytes) -> None:
        """Requests in flight are answered, then the exit code is 0 and nothing is left."""
        with run_server(tmp_path, SLOW) as server:
            pids = [i["pid"] for i in server.stats()["instances"]]
            statuses = list[int]()
            senders = [
                threading.Thread(
                    target=lambda: statuses.append(server.json("POST", "/predict", jpeg)[0])
                )
                for _ in range(4)
            ]
            for sender in senders:
                sender.start()
            assert eventually(lambda: server.stats()["requests"]["received"] == 4)
            assert server.terminate() == 0
            for sender in senders:
                sender.join()
            assert statuses == [200] * 4
            assert not any(psutil.pid_exists(pid) for pid in pids)

    def test_a_killed_front_end_takes_its_executors_along(self, tmp_path: Path) -> None:
        """kill -9 leaves no executor."""
        with run_server(tmp_path, {**QUICK, "instances": 2}) as server:
            pids = [i["pid"] for i in server.stats()["instances"]]
            server.process.kill()
            assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))

    def test_a_dead_executor_ends_the_server(self, tmp_path: Path, jpeg: bytes) -> None:
        """Its batch gets an error, not silence, and the exit code tells a supervisor."""
        with run_server(tmp_path, SLOW) as server:
            pid = server.stats()["instances"][0]["pid"]
            threading.Timer(0.1, lambda: os.kill(pid, 9)).start()
            status, answer = server.json("POST", "/predict", jpeg)
            assert status == 500
            assert "died" in answer["error"]
            assert server.process.wait(20) == 1
            assert "an executor died" in server.log.read_text()

    def test_a_port_in_use_is_exit_code_3(self, tmp_path: Path) -> None:
        """Known before the model is loaded; the message names address and remedy."""
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            done = run_module("--config", write(tmp_path, "engine: synthetic"), "--port", str(port))
        assert done.returncode == 3
        assert f"127.0.0.1:{port} cannot be listened on" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("text", "code", "message"),
        [
            ("worker: 1", 2, "Did you mean workers?"),
            ("model: resnet51\ndevice: cpu", 2, "Did you mean resnet50?"),
            ("device: cuda:7", 2, "device: cuda:7 was asked for"),
            ("precision: fp16\ndevice: cpu", 3, "precision fp16 on cpu: needs a GPU"),
            ("weights: absent.pt\ndevice: cpu", 3, "absent.pt is not a file"),
        ],
    )
    def test_what_cannot_start_says_why(
        self, tmp_path: Path, text: str, code: int, message: str
    ) -> None:
        """One line, the right exit code, no traceback."""
        done = run_module("--config", write(tmp_path, text), "--port", "0")
        assert done.returncode == code, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr

    def test_describe_is_one_json_document(self, tmp_path: Path) -> None:
        """Defaults, devices, and a reason for everything that cannot be done here."""
        done = run_module("--describe", "--config", write(tmp_path, "device: cpu"))
        document = json.loads(done.stdout)
        assert document["defaults"]["model"] == "mobilenet_v3_small"
        assert document["precisions"]["fp32"] is None
        assert "GPU" in document["precisions"]["tf32"]
        assert len(document["model"]["sha256"]) == 64
        assert document["devices"][0]["id"] == "cpu"


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "serving", *arguments],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
