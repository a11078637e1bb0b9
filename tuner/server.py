"""The server under test: start it, change it, ask it, end it. All over its process and HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML

from tuner.configuration import Configuration, Value
from tuner.measurement import ServerWork
from tuner.process import Child

# Importing torch and capturing engines takes seconds on a laptop and up to a minute on a busy GPU.
READY_WITHIN_S = 120.0
# A TensorRT engine of a large model takes minutes to build.
BUILT_WITHIN_S = 900.0
DESCRIBE_WITHIN_S = 120.0
# Longer than any drain that the server promises (its `drain_s` is 10 by default).
STOP_GRACE_S = 12.0
LOG_LINES = 20


class ServerError(Exception):
    """The server did not start, died, or answered what it must not.

    Raised inside a trial, which turns it into an infeasible result; `log_tail` holds the last lines
    that the server printed.
    """

    def __init__(self, reason: str, log_tail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.log_tail = log_tail


@dataclass
class Server:
    """One server process at a time, restarted only for what a running one cannot change.

    Args:
        base: settings that every configuration shares (model, device, weights, ...).
        scratch: a folder for configuration files and logs.
        clock: seconds, monotonic.
    """

    base: Mapping[str, Any]
    scratch: Path
    clock: Callable[[], float] = time.monotonic
    starts: int = 0
    _child: Child | None = None
    _port: int = 0
    _token: str = ""
    _configuration: Configuration | None = None
    _log: Path = field(default_factory=Path)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def pids(self) -> set[int]:
        """The processes of the running server; empty when there is none."""
        if self._child is None:
            return set()
        with contextlib.suppress(psutil.Error):
            guard = psutil.Process(self._child.pid)
            return {guard.pid, *(child.pid for child in guard.children(recursive=True))}
        return set()

    def obtain(self, configuration: Configuration) -> bool:
        """Have a ready server with this configuration; True if it had to be started anew.

        Raises:
            ServerError: it died before it was ready, or was not ready within the deadline.
        """
        running = self._configuration
        if running is not None and running.restart_key() == configuration.restart_key():
            self.check_alive()
            self._change(configuration.live())
            self._configuration = configuration
            return False
        self.stop()
        self._start(configuration)
        self._configuration = configuration
        return True

    def stop(self) -> None:
        """End the process and everything it started; harmless when there is none."""
        child, self._child, self._configuration = self._child, None, None
        if child is not None:
            child.terminate(STOP_GRACE_S)

    def check_alive(self) -> None:
        """Raise ServerError if the process has ended."""
        if self._child is None or (code := self._child.poll()) is None:
            return
        tail = self.log_tail()
        self.stop()
        raise ServerError(f"the server ended with exit code {code}", tail)

    def log_tail(self) -> str:
        return self._child.log_tail(LOG_LINES) if self._child else ""

    def snapshot(self) -> dict[str, Any]:
        """The server's cumulative counters."""
        return self._ask("GET", "/stats")

    def work_since(self, before: Mapping[str, Any]) -> ServerWork:
        """What the server did between an earlier snapshot and now."""
        return difference(before, self.snapshot())

    def predict(self, image: bytes) -> dict[str, Any]:
        """Send one image, as any client would."""
        return self._ask("POST", "/predict", body=image)

    def calibrate(self, size: int, *, repeats: int, instances: int) -> list[float]:
        """Seconds of a batch of this size, each repeat of each of the active instances."""
        document = {"batch_sizes": [size], "repeats": repeats, "instances": instances}
        answer = self._ask("POST", "/admin/calibrate", document)
        return [float(s) for s in answer["service_s"][str(size)]]

    def _start(self, configuration: Configuration) -> None:
        self.starts += 1
        config_path = self.scratch / f"server-{self.starts}.yaml"
        self._log = self.scratch / f"server-{self.starts}.log"
        self._token = secrets.token_urlsafe(16)
        with config_path.open("w") as file:
            YAML(typ="safe", pure=True).dump({**self.base, **configuration}, file)
        # The tuner binds the port, so that nobody can take it between choosing and listening.
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1024)
            self._port = listener.getsockname()[1]
            command = [sys.executable, "-m", "serving", "--config", str(config_path)]
            self._child = Child.start(
                [*command, "--fd", str(listener.fileno())],
                log_path=self._log,
                env={"SERVING_ADMIN_TOKEN": self._token},
                pass_fds=(listener.fileno(),),
            )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        began, within_s = self.clock(), READY_WITHIN_S
        while self.clock() < began + within_s:
            self.check_alive()
            state = self._readiness()
            if state is None:
                return
            if "building" in state:  # an engine, once: it is kept on disk
                within_s = BUILT_WITHIN_S
            time.sleep(0.05)
        tail = self.log_tail()
        self.stop()
        raise ServerError(f"the server was not ready within {within_s:.0f} s", tail)

    def _readiness(self) -> str | None:
        """None when the server is ready, else why it is not."""
        try:
            status, answer = self._request("GET", "/health/ready", None, {}, timeout_s=2.0)
        except OSError:
            return "no answer"
        return None if status == 200 else answer.decode(errors="replace")

    def _change(self, live: dict[str, Value]) -> None:
        if live:
            self._ask("PATCH", "/admin/config", live)

    def _ask(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | None = None,
        *,
        body: bytes | None = None,
    ) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._token}"} if path.startswith("/admin") else {}
        if document is not None:
            body = json.dumps(dict(document)).encode()
        try:
            status, answer = self._request(method, path, body, headers, timeout_s=60.0)
        except OSError as error:
            self.check_alive()
            raise ServerError(f"{method} {path} failed: {error}", self.log_tail()) from error
        if status != 200:
            text = answer.decode(errors="replace")[:300]
            raise ServerError(f"{method} {path} answered {status}: {text}", self.log_tail())
        return dict(json.loads(answer))

    def _request(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError(f"broken answer: {error!r}") from error
        finally:
            connection.close()


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> ServerWork:
    """The work between two snapshots of the server's counters."""
    counted = {k: after["requests"][k] - before["requests"][k] for k in after["requests"]}
    sizes = {
        int(size): count - before["batch_sizes"].get(size, 0)
        for size, count in after["batch_sizes"].items()
    }
    return ServerWork(
        answered=counted["answered"],
        rejected=counted["rejected"],
        failed=counted["failed"] + counted["bad_request"],
        batches=after["batches"] - before["batches"],
        batch_sizes={size: count for size, count in sorted(sizes.items()) if count},
        queue_s=after["queue_seconds"] - before["queue_seconds"],
        preprocess_s=after["preprocess_seconds"] - before["preprocess_seconds"],
        compute_s=after["compute_seconds"] - before["compute_seconds"],
        busy_s=after["busy_seconds"] - before["busy_seconds"],
        elapsed_s=after["monotonic_s"] - before["monotonic_s"],
        memory_bytes=sum(i.get("rss_bytes") or 0 for i in after["instances"]),
    )


def describe(settings: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    """What the reference server would be with these settings, and what this device can do.

    Raises:
        ServerError: it could not say; the reason is its own message.
    """
    config_path, output = scratch / "describe.yaml", scratch / "describe.json"
    with config_path.open("w") as file:
        YAML(typ="safe", pure=True).dump(dict(settings), file)
    command = [sys.executable, "-m", "serving", "--describe", "--config", str(config_path)]
    code, text, log_tail = run_to_end(command, output.with_suffix(".log"))
    if code != 0:
        reason = log_tail.strip().splitlines()[-1] if log_tail.strip() else f"exit code {code}"
        raise ServerError(reason.removeprefix("serving: "), log_tail)
    return dict(json.loads(text))


def run_to_end(command: Sequence[str], log_path: Path) -> tuple[int, str, str]:
    """Run a short child to its end: exit code, standard output, last lines of its log."""
    import subprocess

    with Child.start(command, log_path=log_path, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        text = child.stdout.read().decode()
        code = child.wait(DESCRIBE_WITHIN_S)
        return code, text, child.log_tail(LOG_LINES)
