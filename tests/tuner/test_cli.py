"""The command line: every mistake one message and its exit code, before anything is measured."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest
from ruamel.yaml import YAML

from tuner.payloads import photo_like

# A synthetic server of a few milliseconds: the whole command in seconds, on real processes.
SERVER = """
engine: synthetic
preprocessing: pil
synthetic: {base_ms: 5.0, per_item_ms: 1.0}
batch_window_ms: 2.0
max_batch_size: 8
"""
SPACE = "parameters:\n  max_batch_size: {values: [4, 8]}\n"


def tuner(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tuner", *arguments],
        cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True,
        timeout=150, check=False,
    )  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a server file and a small space of a synthetic server."""
    (tmp_path / "server.yaml").write_text(SERVER)
    (tmp_path / "mine.yaml").write_text(SPACE)
    (tmp_path / "images").mkdir()
    for seed in range(3):
        picture = photo_like(64, 64, np.random.default_rng(seed))
        picture.save(tmp_path / "images" / f"{seed}.jpg")
    return tmp_path


QUICK = ("--p99-budget", "200ms", "--qps", "120", "--objective", "efficiency", "--server",
         "server.yaml", "--space", "mine.yaml", "--search", "grid", "--time-budget",
         "2m", "--payloads", "images")  # fmt: skip


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--p99-budget", "100"), "'100' has no unit. Write 100ms or 100s."),
            (("--p99-budget", "0ms"), "not above zero"),
            (("--p99-budget", "-5ms"), "is not a duration"),
            ((), "Missing option '--p99-budget'"),
            (("--p99-budget", "1s", "--qps", "0"), "--qps"),
            (("--p99-budget", "1s", "--objective", "speed"), "'speed' is not one of"),
            (("--p99-budget", "1s", "--space", "mine2.yaml"), "mine2.yaml:2: max_batch_sze"),
            (("--p99-budget", "1s", "--study", "smal"), "Did you mean small?"),
            (("--p99-budget", "1s", "--server", "absent.yaml"), "absent.yaml is not a file"),
            (("--p99-budget", "1s", "--payloads", "absent"), "--payloads: absent does not exist"),
            (("--p99-budget", "1s", "--payloads", "."), "holds no images"),
            (("--p99-budget", "1s", "--storage", "server.yaml"), "is not a SQLite database"),
            (("--p99-budget", "1s", "--storage", "mysql://h/d"), "mysql:// is not supported"),
            (("--p99-budget", "1s", "--storage", "server.yaml/x.db"), "cannot be used"),
        ],
    )
    def test_are_usage_errors(
        self, project: Path, arguments: tuple[str, ...], message: str
    ) -> None:
        """Exit code 2, the message on standard error, nothing on standard output, no traceback."""
        (project / "mine2.yaml").write_text("parameters:\n  max_batch_sze: {low: 1, high: 2}\n")
        done = tuner("run", *arguments, cwd=project)
        assert done.returncode == 2, done.stderr
        assert message in " ".join(done.stderr.split())
        assert done.stdout == ""
        assert "Traceback" not in done.stderr

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--device", "cuda"), "no usable NVIDIA GPU was found"),
            (("--model", "mobilenet_v3_smal"), "Did you mean mobilenet_v3_small?"),
            (("--server", "odd.yaml"), "worker is not a setting. Did you mean workers?"),
        ],
    )
    def test_the_servers_own_are_usage_errors_too(
        self, project: Path, arguments: tuple[str, ...], message: str
    ) -> None:
        """What the server refuses at start comes back as its own words and exit code 2."""
        (project / "odd.yaml").write_text("worker: 1\n")
        done = tuner("run", "--p99-budget", "1s", *arguments, cwd=project)
        assert done.returncode == 2, done.stderr
        assert message in " ".join(done.stderr.split())

    def test_a_truncated_payload_is_named(self, project: Path) -> None:
        """The file, and what to do with it."""
        folder = project / "images"
        (folder / "cut.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a whole picture")
        done = tuner("run", "--p99-budget", "1s", "--payloads", "images", cwd=project)
        assert done.returncode == 2
        assert "cut.jpg does not decode" in " ".join(done.stderr.split())

    def test_json_is_json_on_failure_too(self, project: Path) -> None:
        """One document on standard output with code, message and hint."""
        done = tuner("run", "--p99-budget", "1s", "--space", "absent", "--json", cwd=project)
        document = json.loads(done.stdout)
        assert document["exit_code"] == done.returncode == 2
        assert document["error"]["code"] == "usage"
        assert "absent" in document["error"]["message"]
        assert document["error"]["hint"]

    @pytest.mark.parametrize("command", ["show", "export"])
    def test_nothing_to_read_is_said(self, project: Path, command: str) -> None:
        """A database that does not exist is not created by reading."""
        done = tuner(command, cwd=project)
        assert done.returncode == 2
        assert "studies/tuner.db does not exist" in done.stderr
        assert not (project / "studies").exists()


@pytest.mark.slow
class TestRun:
    def test_from_search_to_a_running_server(self, project: Path) -> None:
        """Run, show, export, serve: each with what the one before left; run again continues."""
        first = tuner("run", *QUICK, "--json", cwd=project)
        assert first.returncode == 0, first.stderr
        document = json.loads(first.stdout)
        measured = [t for t in document["trials"] if t["status"] == "measured"]
        assert [t["origin"] for t in measured] == ["defaults", "grid"]
        assert document["winner"]["load"]["verdict"] in ("meets", "undecided")
        assert "holds P99 <= 200 ms at 120/s" in document["sentence"]

        again = tuner("run", *QUICK, cwd=project)
        assert again.returncode == 0, again.stderr
        assert "Every proposed configuration has been tried" in again.stderr
        assert "winner" in again.stdout

        shown = tuner("show", "--json", cwd=project)
        assert json.loads(shown.stdout)["study"] == document["study"]
        one = tuner("show", "--trial", "0", cwd=project)
        assert "defaults" in one.stdout
        assert "ready at" in one.stdout  # the server's log

        exported = tuner("export", "-o", "best.yaml", cwd=project)
        assert exported.returncode == 0, exported.stderr
        content = YAML(typ="safe", pure=True).load(project / "best.yaml")
        assert content["server"]["engine"] == "synthetic"
        assert content["evidence"]["trial"] == document["winner"]["trial"]
        self.check_serves(project)

    def check_serves(self, project: Path) -> None:
        """`tuner serve best.yaml` is ready on a port, and ends with 0 on SIGTERM."""
        command = [sys.executable, "-m", "tuner", "serve", "best.yaml", "--port", "0"]
        with subprocess.Popen(command, cwd=project, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            assert "ready at http://127.0.0.1:" in server.stderr.readline()
            server.terminate()
            assert server.wait(20) == 0

    def test_settings_come_from_flag_environment_file(self, project: Path) -> None:
        """Flag over TUNER_ variable over study file, seen in what the study records."""
        (project / "study.yaml").write_text(
            "p99_budget: 300ms\nqps: 50\nseed: 5\nspace: mine.yaml\n"
        )
        env = {"TUNER_QPS": "60", "TUNER_SEED": "6"}
        flags = ("--study", "study.yaml", "--seed", "7", "--server", "server.yaml", "--trials", "1",
                 "--objective", "efficiency", "--json")  # fmt: skip
        done = tuner("run", *flags, cwd=project, env=env)
        document = json.loads(done.stdout)
        assert document["budget_ms"] == 300
        assert document["asked_qps"] == 60
        assert document["trials"][0]["measurements"][0]["seed"] == 7

    def test_nothing_that_meets_is_exit_code_4(self, project: Path) -> None:
        """A rate that nothing can hold: said with the closest, and with what to try."""
        arguments = ["900" if a == "120" else a for a in QUICK]
        done = tuner("run", *arguments, cwd=project)
        assert done.returncode == 4, done.stderr
        assert "No configuration met P99 <= 200 ms" in done.stdout
        export = tuner("export", cwd=project)
        assert export.returncode == 4
        assert "--force" in export.stderr

    def test_a_server_that_never_starts_is_exit_code_3(self, project: Path) -> None:
        """Said with its last words, not as a bad configuration."""
        (project / "server.yaml").write_text("device: cpu\nprecision: fp16\n")
        done = tuner("run", "--p99-budget", "1s", "--server", "server.yaml", "--space", "mine.yaml",
                     cwd=project)  # fmt: skip
        assert done.returncode == 3, done.stderr
        assert "precision fp16 on cpu" in " ".join(done.stderr.split())


def start_run(project: Path) -> subprocess.Popen[str]:
    """A run in the background, in its second trial at the earliest when it is handed out."""
    running = subprocess.Popen(
        [sys.executable, "-m", "tuner", "run", *QUICK],
        cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stderr is not None
    for line in running.stderr:
        if "trial   0" in line:
            break
    return running


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def recorded_trials(project: Path) -> int:
    with sqlite3.connect(project / "studies" / "tuner.db") as connection:
        count: int = connection.execute("select count(*) from tuner_trials").fetchone()[0]
    connection.close()
    return count


@pytest.mark.slow
class TestEndings:
    def test_ctrl_c_cleans_up_and_says_how_to_go_on(self, project: Path) -> None:
        """Exit code 130, nothing left running, the finished trial kept; the next run goes on."""
        running = start_run(project)
        children = descendants(running)
        assert len(children) >= 4  # two guards, a server, a load generator
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=40)
        assert running.returncode == 130
        assert "run the same command again" in said
        assert not any(child.is_running() for child in children)
        assert recorded_trials(project) == 1
        again = tuner("run", *QUICK, "--json", cwd=project)
        assert again.returncode == 0, again.stderr
        assert sum(t["status"] == "measured" for t in json.loads(again.stdout)["trials"]) == 2

    def test_sigterm_is_exit_code_143(self, project: Path) -> None:
        """A platform's stop signal cleans up the same way."""
        running = start_run(project)
        children = descendants(running)
        running.terminate()
        running.communicate(timeout=40)
        assert running.returncode == 143
        assert not any(child.is_running() for child in children)

    def test_kill_9_leaves_nothing_and_loses_nothing(self, project: Path) -> None:
        """Within five seconds every process is gone; the finished trial is in the database."""
        running = start_run(project)
        children = descendants(running)
        running.kill()
        running.communicate()
        deadline = time.monotonic() + 5
        while any(child.is_running() for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(child.is_running() for child in children)
        assert recorded_trials(project) == 1
        again = tuner("run", *QUICK, "--json", cwd=project)
        assert again.returncode == 0, again.stderr

    def test_a_second_tuner_on_the_device_is_refused(self, project: Path) -> None:
        """Two would measure each other's load; the message names the holder."""
        running = start_run(project)
        second = tuner("run", *QUICK, "--storage", "other.db", cwd=project)
        running.kill()
        running.communicate()
        assert second.returncode == 2
        assert f"pid {running.pid}" in second.stderr
        assert "device cpu" in second.stderr
