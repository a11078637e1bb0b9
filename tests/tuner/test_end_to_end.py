"""The main job on real input: a real model on the CPU, real JPEGs, real Locust."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Far below what any machine serves, with a budget far above what it needs: the test is about the
# whole path, not about speed.
COMMAND = ("run", "--p99-budget", "2s", "--qps", "30", "--objective", "efficiency", "--search",
           "grid", "--space", "tiny.yaml", "--time-budget", "2m",
           "--device", "cpu", "--json")  # fmt: skip


@pytest.mark.timeout(300)
def test_finds_and_exports_a_configuration(tmp_path: Path) -> None:
    """A winner with its evidence, the server's defaults beside it, and a file with both."""
    (tmp_path / "tiny.yaml").write_text("parameters:\n  max_batch_size: {values: [1, 8]}\n")
    done = subprocess.run(
        [sys.executable, "-m", "tuner", *COMMAND],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["defaults"]["trial"] == 0
    assert document["ceiling_rps"] > 30
    measured = [t for t in document["trials"] if t["status"] == "measured"]
    assert len(measured) == 2
    for trial in measured:
        target = trial["measurements"][0]
        assert target["verdict"] == "meets"
        assert target["errors"] == {}
        assert target["device_busy_source"] == "executor"
        assert 0 < target["device_busy"] < 1
        assert trial["predicted"]["mean_batch"] >= 1
    exported = subprocess.run(
        [sys.executable, "-m", "tuner", "export"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "model: mobilenet_v3_small" in exported.stdout
